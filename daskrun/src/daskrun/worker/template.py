"""Start the template of a host, and ask it for processes; where it can't be had, start fresh interpreters."""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from threading import Lock
from typing import Any

from daskrun.child.template import read_at_import

ADDRESS = "DASKRUN_TEMPLATE"  # names the socket of the template that serves the local workers of a program
PRELOAD = "DASKRUN_PRELOAD"  # names, with commas between them, the modules that a worker's own template imports, too
ROOT = str(Path(__file__).parents[2])  # from which daskrun is imported
# The interpreter finds daskrun wherever it is, and then has the path that it would have had. This is a rank's lowest
# frame. It's not called __main__, as Python shows more warnings of that module.
CODE = """import sys
sys.path[0] = {root!r}
from daskrun.child.{module} import main
del sys.path[0]
program, __name__ = main(), "daskrun"
try:
    program.call(*program.arguments)
except BaseException as error:
    program.end(error)
program.end()
"""
READY_S = 120  # for a template that still imports
DASKS = {"PYTHONHASHSEED": "6640", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what a nanny sets for its worker, not for ranks

_lock = Lock()


class Template:
    """A template that this process has started. It ends with this process."""

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        # For this user alone. A Unix socket's name may have 107 bytes, which TMPDIR may not leave.
        self.address = f"{tempfile.mkdtemp(prefix='daskrun-', dir='/tmp')}/t"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(128)
            fd = listener.fileno()
            self.process = subprocess.Popen(
                _command("template", fd, os.getpid(), *preload),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[fd],
                start_new_session=True,
            )
        atexit.register(self.close)

    def close(self) -> None:
        """End the template, and with it the ranks that it has forked."""
        atexit.unregister(self.close)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(Path(self.address).parent, ignore_errors=True)


class Forked:
    """A child of the template."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid, self._connection = pid, connection
        self._end: tuple[int, int] | None = None

    def poll(self) -> tuple[int, int] | None:
        """Return (exit code or minus a signal, the most bytes that it had); None while it runs."""
        if not self._end and self._connection.poll():
            try:
                self._end = self._connection.recv()
            except (EOFError, OSError):  # its template has ended, and it with that
                self._end = -signal.SIGKILL, 0
        return self._end

    def fileno(self) -> int:
        """Return the descriptor that's readable once it has ended."""
        return self._connection.fileno()

    def close(self) -> None:
        """Let the template end it, if it still runs."""
        self._connection.close()


class Fresh:
    """A new interpreter, a child of this process."""

    def __init__(self, fds: Sequence[int], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            _command("main", *fds),
            stdin=subprocess.DEVNULL,
            stdout=fds[1],  # from the beginning, so that nothing of an interpreter that fails is lost
            stderr=fds[2],
            env=dict(environment),
            pass_fds=fds,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._end: tuple[int, int] | None = None

    def poll(self) -> tuple[int, int] | None:
        """Return what `Forked.poll` does."""
        if not self._end:
            ended, status, usage = os.wait4(self.pid, os.WNOHANG)
            if ended:
                code = self._process.returncode = os.waitstatus_to_exitcode(status)
                self._end = code, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return self._end

    def fileno(self) -> int:
        """Return -1: its end has to be asked for."""
        return -1

    def close(self) -> None:
        """End it, if it still runs."""
        if not self.poll():
            self._process.kill()


def without_dasks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker without those that Dask's nanny sets for the worker alone."""
    return {name: value for name, value in environment.items() if DASKS.get(name) != value and name != ADDRESS}


def new_process(fds: Sequence[int], environment: Mapping[str, str], starts_fresh: bool) -> tuple[Forked | Fresh, str]:
    """Return (a process that calls `child.main.begin` with these descriptors, why it's no fork: "" where it is one).

    A fork that wasn't asked for, because a variable differs, needs no reason.
    """
    why = ""
    if not starts_fresh and sys.platform == "linux":
        try:
            answer = _ask(_address(), environment, fds)
            if isinstance(answer, Forked):
                return answer, ""
            why = "" if answer.startswith("environment") else answer
        except (OSError, EOFError) as error:
            why = f"the template doesn't answer ({error!r})"
    return Fresh(fds, environment), why


def _address() -> str:
    """Return the address of the template that serves this process; start it, if it's this process's own."""
    return os.environ.get(ADDRESS) or own_template().address


def own_template(preload: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Template:
    """Return this process's template for these variables, which is started if there is none, or it has ended."""
    environment = without_dasks(os.environ if environment is None else environment)
    names = tuple(dict.fromkeys([*preload, *filter(None, environment.get(PRELOAD, "").split(","))]))
    with _lock:
        key = os.getpid(), names, tuple(sorted(read_at_import(environment).items()))
        template = _templates().get(key)
        if template is None or template.process.poll() is not None:
            template = _templates()[key] = Template(names, environment)
        return template


@cache
def _templates() -> dict[Any, Template]:
    return {}


def _ask(address: str, environment: Mapping[str, str], fds: Sequence[int]) -> Forked | str:
    """Return a fork of the template, or why it refuses."""
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(address)
        connection = Connection(plain.detach())
    try:
        connection.send((dict(environment), len(fds)))
        for fd in fds:
            send_handle(connection, fd, None)
        if not connection.poll(READY_S):
            raise TimeoutError(f"it is not ready after {READY_S} s")
        answer = connection.recv()
        if isinstance(answer, int):
            return Forked(answer, connection)
    except BaseException:
        connection.close()
        raise
    connection.close()
    return answer


def _command(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", CODE.format(root=ROOT, module=module), *map(str, arguments)]
