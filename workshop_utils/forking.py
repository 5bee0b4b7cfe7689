"""Have local workers forked from a process that has imported PyTorch, so that a new one takes a second, not five."""

import os
from multiprocessing import forkserver
from threading import Thread
from typing import Any

import dask
from distributed.utils import get_mp_context


def fork_workers() -> None:
    """Let the nannies of this process fork their workers, from now on, from a new server.

    A worker finds the environment of the moment in which the server starts, with the first of its workers.
    """
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    get_mp_context().set_forkserver_preload(["distributed.nanny", "workshop_utils.preloaded"])
    _leave_server()


def _leave_server() -> None:
    """Have the next child of this process forked from another server. The one before ends with its last child."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]  # multiprocessing has no public name for this
    with server._lock:
        if server._forkserver_pid is not None:
            os.close(server._forkserver_alive_fd)
            Thread(target=os.waitpid, args=(server._forkserver_pid, 0), daemon=True).start()
            server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
