"""The template: a process that has imported PyTorch, and forks a rank whenever a worker asks for one.

It has no Dask, and no thread that a fork would lose. Its socket is in a folder of its user's own. A request is
(variables, number of file descriptors that follow). The answer is the fork's process id, or a text where a fork
wouldn't be what was asked for, and at its end (exit code or minus a signal, the most bytes that it had).
"""

import ctypes
import gc
import os
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daskrun.child.main import Program

PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
LOOK_S = 1.0  # between two looks whether the process that has started the template lives
# Variables that libraries read when they're imported, or that the interpreter reads when it starts.
READ_AT_IMPORT = (
    *("ATEN_", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_"),
    *("PYTHON", "PYTORCH_", "TORCH_"),
)
READ_LATER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_", "PYTORCH_NVML_BASED_CUDA_CHECK")


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork can't change any more."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith(READ_LATER)
    }


def n_threads() -> int:
    """Return how many threads this process has that a fork would lose; jemalloc, of pyarrow, starts its own again."""
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return len(names) - names.count("jemalloc_bg_thd")


def import_all(names: list[str]) -> str:
    """Import what ranks need, and then the modules named; return why they can't be forked, "" if they can.

    OpenBLAS, of NumPy, ends its threads before a fork and starts them after it, so those are fine.
    """
    import cloudpickle  # noqa: F401
    import numpy as np  # noqa: F401
    import tblib.pickling_support  # noqa: F401
    import torch._dynamo  # noqa: F401  # which the first DistributedDataParallel of a process imports
    import torch.distributed.algorithms.ddp_comm_hooks.default_hooks  # noqa: F401

    import daskrun.child.main  # noqa: F401

    known = n_threads()
    for name in names:
        try:
            __import__(name)
        except (Exception, SystemExit) as error:
            print(f"daskrun could not preload {name}: {error!r}", file=sys.stderr, flush=True)
        if n_threads() > known:
            return f"preloading {name} started a thread, which a fork would lose"
    return ""


class Template:
    """Forks children for workers, and says how they end."""

    def __init__(self, listener: socket.socket, parent: int, unfit: str) -> None:
        self._listener, self._parent, self._unfit = listener, parent, unfit
        self._imported = read_at_import(os.environ)
        self._n_threads = n_threads()
        self._children: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        woken, wakes = os.pipe()
        for end in (woken, wakes):
            os.set_blocking(end, False)
        self._fds = woken, wakes
        self._selector.register(woken, selectors.EVENT_READ, None)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> list[int] | None:
        """Fork until the process that has started this one ends; return None then, and in a child its descriptors."""
        while os.getppid() == self._parent:
            for key, _ in self._selector.select(LOOK_S):
                if key.fileobj is self._listener:
                    accepted, _ = self._listener.accept()
                    if fds := self._fork(Connection(accepted.detach())):
                        return fds
                elif key.fd == self._fds[0]:
                    with suppress(BlockingIOError):
                        os.read(key.fd, 4096)
                else:  # the worker has ended, or wants no more of its child
                    self._end(key.data)
            self._reap()
        for pid in self._children:
            _kill_group(pid)
        return None

    def _fork(self, connection: Connection) -> list[int] | None:
        fds: list[int] = []
        try:
            environment, n_fds = connection.recv()
            fds = [recv_handle(connection) for _ in range(n_fds)]
            why, pid = self._refuses(environment), 0
            if not why and not (pid := os.fork()):
                self._become(environment)
                return fds
            if pid:
                self._children[pid] = connection
                self._selector.register(connection, selectors.EVENT_READ, pid)
            connection.send(why or pid)
        except (OSError, EOFError):  # whoever asked has ended
            connection.close()
        for fd in fds:
            os.close(fd)
        return None

    def _refuses(self, environment: Mapping[str, str]) -> str:
        asked = read_at_import(environment)
        if differing := sorted(name for name, _ in asked.items() ^ self._imported.items()):
            return f"environment: {', '.join(dict.fromkeys(differing))}"
        if self._unfit:
            return self._unfit
        if n_threads() > self._n_threads:
            return "threads: the template has some that a fork would lose"
        torch = sys.modules["torch"]
        return "CUDA is initialized in the template" if torch.cuda.is_initialized() else ""

    def _become(self, environment: Mapping[str, str]) -> None:
        """Make this fork a process of its own."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._listener.close()
        for connection in self._children.values():
            connection.close()
        for fd in self._fds:
            os.close(fd)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        gc.enable()
        import random

        import numpy as np

        # Else all ranks would draw the same.
        random.seed()
        np.random.seed()
        sys.modules["torch"].default_generator.seed()

    def _end(self, pid: int) -> None:
        self._selector.unregister(self._children[pid])
        self._children[pid].close()
        _kill_group(pid)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = ended
                connection = self._children.pop(pid, None)  # of none that a rank has started
                if connection and not connection.closed:
                    self._selector.unregister(connection)
                    with suppress(OSError):
                        connection.send((os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024))
                    connection.close()


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it had no group of its own yet
        os.kill(pid, signal.SIGKILL)


def main() -> "Program":
    """Be the template, and in a fork, return what that has to run.

    Arguments: the number of the socket that listens, the process that started this one, and modules to import, too.
    """
    listening, parent, *names = sys.argv[1:]
    # Which Slurm, or Jupyter, sends to all processes. A fork gets those that are sent to it once it's ready for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    # What a rank has started is reaped here when that has ended: process 1 of a container may leave it a zombie.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that to look for a GPU doesn't initialize CUDA
    gc.disable()
    unfit = import_all(names)
    gc.freeze()  # so that ranks need not copy these pages to look for garbage in them
    listener = socket.socket(fileno=int(listening))
    fds = Template(listener, int(parent), unfit).serve()
    if fds is None:
        shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)
        os._exit(0)  # else C++ libraries would print what is left
    from daskrun.child.main import begin

    return begin(fds)
