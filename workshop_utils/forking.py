"""Have local workers forked from a process that has imported PyTorch, so that a new one takes a second, not five."""

import os
import time
from multiprocessing import forkserver
from threading import Lock, Thread
from typing import Any, Literal

import dask
from distributed import Nanny
from distributed.core import Status
from distributed.proctitle import enable_proctitle_on_children
from distributed.utils import get_mp_context


class ForkingNanny(Nanny):
    """A nanny whose worker is forked from a server, which all nannies of this class have in common.

    A worker finds the environment that a new process would find: where that has changed, there is a new server.
    """

    async def instantiate(self) -> Status:
        enable_proctitle_on_children()  # it sets a variable: the first of some workers is to find what all find
        _server.begin(self, {**os.environ, **self.pre_spawn_env})
        try:
            return await super().instantiate()
        finally:
            _server.end(self)

    async def close(self, *args: Any, **settings: Any) -> Literal["OK"]:  # type: ignore[override]
        try:
            return await super().close(*args, **settings)
        finally:
            _server.leave(self)


class _Server:
    """What this process knows of the server that workers are forked from."""

    def __init__(self):
        self.lock = Lock()  # clusters have threads of their own
        self.environment: dict | None = None  # None: there is no server
        self.nannies: set = set()
        self.starting: set = set()
        self.setting: Any = None

    def begin(self, nanny, environment):
        with self.lock:
            if environment != self.environment:
                _leave_server()
                self.environment = environment
            if not self.starting:
                # Dask has one setting for all clusters of a process, so it is set no longer than a worker starts.
                self.setting = dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
                get_mp_context().set_forkserver_preload(["workshop_utils.preloaded"])
            self.starting.add(nanny)
            self.nannies.add(nanny)

    def end(self, nanny):
        with self.lock:
            self.starting.discard(nanny)
            if not self.starting:
                self.setting.__exit__(None, None, None)

    def leave(self, nanny):
        with self.lock:
            self.nannies.discard(nanny)
            if not self.nannies and self.environment is not None:
                _leave_server()
                self.environment = None


_server = _Server()


def _leave_server() -> None:
    """Have the next child of this process forked from another server. The one before ends with its last child."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]  # multiprocessing has no public name for this
    with server._lock:
        if server._forkserver_pid is not None:
            Thread(target=_end_server, args=(server._forkserver_pid, server._forkserver_alive_fd), daemon=True).start()
            server._forkserver_pid = None


def _end_server(pid, alive_fd):
    time.sleep(1)  # another thread may be about to ask this server for a child
    os.close(alive_fd)
    os.waitpid(pid, 0)
