"""Have local workers forked from a process that has imported PyTorch, so that a new one takes a second, not five."""

import os
from multiprocessing import forkserver
from threading import Lock, Thread
from typing import Any, Literal

import dask
from distributed import Nanny
from distributed.core import Status
from distributed.proctitle import enable_proctitle_on_children


class ForkingNanny(Nanny):
    """A nanny whose worker is forked from a server, which nannies of this class have in common.

    A worker finds the environment that a new process would find, as each environment has a server of its own.
    """

    async def instantiate(self) -> Status:
        enable_proctitle_on_children()  # it sets a variable: the first of some workers is to find what all find
        _servers.begin(self, {**os.environ, **self.pre_spawn_env})
        try:
            return await super().instantiate()
        finally:
            _servers.end(self)

    async def close(self, *args: Any, **settings: Any) -> Literal["OK"]:  # type: ignore[override]
        try:
            return await super().close(*args, **settings)
        finally:
            _servers.leave(self)


class _Servers:
    """The servers of this process: one for each environment in which nannies started their workers.

    Dask has one setting and multiprocessing has one server for all children of a process. Both are replaced, but no
    longer than a worker starts, so that other children of this process are started as ever.
    """

    def __init__(self):
        self.lock = Lock()  # clusters have threads of their own
        self.servers: dict[frozenset, Any] = {}
        self.used_by: dict[Nanny, frozenset] = {}
        self.starting: set[Nanny] = set()
        self.setting: Any = None
        self.of_multiprocessing = forkserver.connect_to_new_process

    def begin(self, nanny, environment):
        with self.lock:
            self.used_by[nanny] = frozenset(environment.items())
            if not self.starting:
                self.setting = dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
                forkserver.connect_to_new_process = self._connect_to_new_process
            self.starting.add(nanny)
            self._end_unused()

    def end(self, nanny):
        with self.lock:
            self.starting.discard(nanny)
            if not self.starting:
                forkserver.connect_to_new_process = self.of_multiprocessing
                self.setting.__exit__(None, None, None)

    def leave(self, nanny):
        with self.lock:
            self.used_by.pop(nanny, None)
            self._end_unused()

    def _connect_to_new_process(self, fds):
        with self.lock:
            server = self.servers.setdefault(frozenset(os.environ.items()), _new_server())
        return server.connect_to_new_process(fds)

    def _end_unused(self):
        for environment in set(self.servers) - set(self.used_by.values()):
            # It waits for the end, which comes after that of the last child.
            Thread(target=self.servers.pop(environment)._stop, daemon=True).start()


def _new_server():
    server: Any = forkserver.ForkServer()  # it is not started before the first child is asked for
    server.set_forkserver_preload(["workshop_utils.preloaded"])
    return server


_servers = _Servers()
