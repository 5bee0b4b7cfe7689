"""Have local workers forked from a process that has imported PyTorch, so that a new one takes a second, not five."""

import os
import signal
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from threading import Lock, Thread
from typing import Any, Literal

import dask
from distributed import Nanny
from distributed.core import Status
from distributed.proctitle import enable_proctitle_on_children

METHOD = "distributed.worker.multiprocessing-method"


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

    async def close(self, timeout: float = 5, reason: str = "nanny-close") -> Literal["OK"]:  # type: ignore[override]
        if reason == "nanny-instantiate-failed" and self.process and self.process.status == Status.starting:
            self.process.status = Status.stopped  # it has never been; Dask would wait for its end for ever
        try:
            return await super().close(timeout, reason)
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
        self.method: str = ""
        self.of_multiprocessing = forkserver.connect_to_new_process

    def begin(self, nanny, environment):
        with self.lock:
            self.used_by[nanny] = frozenset(environment.items())
            if not self.starting:
                self.method = dask.config.get(METHOD)
                self.setting = dask.config.set({METHOD: "forkserver"})
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
            server = self.servers.setdefault(frozenset(os.environ.items()), _Server())
        return server.connect_to_new_process(fds)

    def _end_unused(self):
        for environment in set(self.servers) - set(self.used_by.values()):
            # It waits for the end, which comes after that of the last child.
            Thread(target=self.servers.pop(environment)._stop, daemon=True).start()


class _Server(forkserver.ForkServer):
    """Is not started before the first child is asked for."""

    def __init__(self):
        super().__init__()
        self.set_forkserver_preload(["daskrun.preloaded"])

    def _stop(self):
        with suppress(FileNotFoundError):  # at this process's end, multiprocessing has removed its socket before
            super()._stop()  # type: ignore[misc]

    def ensure_running(self):
        resource_tracker.ensure_running()  # now, as it would unblock the signals
        # The stop button could end a server that has just begun. Its first import, of `preloaded`, unblocks them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            super().ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_servers = _Servers()


def start_method() -> str:
    """Return how Dask is to start processes here, which is another way as long as a worker is forked."""
    with _servers.lock:
        return _servers.method if _servers.starting else dask.config.get(METHOD)
