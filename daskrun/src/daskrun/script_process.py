"""A script's own process: it runs as `__main__`, and a thread answers its worker, which asks how it looks.

Python runs this file by its path, and nothing here imports Dask: the script finds a process as Python alone would give.
"""

import builtins
import ctypes
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread, main_thread
from types import ModuleType, TracebackType
from typing import Any

OURS = (__file__, "<frozen runpy>")  # files of the frames before the script's first

PR_SET_PDEATHSIG = 1  # of Linux: send a signal to this process when its parent ends


def main() -> None:
    """Run the script that sys.argv names, after the number of the file by which to hear the worker."""
    _, number, path, *arguments = sys.argv
    connection = Connection(int(number))
    is_module, beside, of_rank, end = connection.recv()
    own, place = os.getpid(), os.fstat(end)
    os.environ[of_rank] = f"script {os.getpid()}"  # as in `family`: this process may log, its children may not
    private = runpy.run_path(str(Path(__file__).with_name("private.py")))  # its package would import Dask
    Thread(target=_answer, args=[connection, private], name="daskrun", daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # local workers ignore these two, or block them
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    sys.excepthook = sys.__excepthook__ = _print_error
    if sys.platform == "linux":  # also what the script may become by exec; and it may not let the thread above run
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.argv = [path, *arguments]
    sys.path[0] = beside
    # For good, as its threads may outlive it; by the second name multiprocessing finds its classes.
    script = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    vars(script)["__builtins__"] = builtins
    code = 0
    try:
        if is_module:
            runpy._run_module_as_main(path)  # type: ignore[attr-defined]  # as python -m does
        else:
            script.__file__ = os.path.abspath(path)
            script.__loader__ = SourceFileLoader("__main__", script.__file__)
            exec(compile(Path(path).read_bytes(), script.__file__, "exec"), vars(script))
    except BaseException as error:
        code = _exit_code(error)
        raise
    finally:
        with suppress(OSError):  # the script has closed it
            if os.getpid() == own and os.path.samestat(os.fstat(end), place):  # no fork, and no other file by now
                os.write(end, str(code).encode())


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python gives a process for what has ended its code; minus a signal's number for it."""
    if isinstance(error, SystemExit):
        code = error.code or 0
        return code & 0xFF if isinstance(code, int) else 1
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _answer(connection: Connection, private: dict[str, Any]) -> None:
    """Answer each question with (the script's stack, its groups, their collectives); end with the worker."""
    while True:
        try:
            connection.recv()
            stack = list(traceback.extract_stack(private["stack_of"](main_thread().ident)))
            try:
                connection.send((stack[_n_before(stack) :], *private["recorded_collectives"]()))
            except (AttributeError, KeyError, ValueError) as error:  # these are PyTorch's private names
                connection.send(error)
        except (EOFError, ConnectionError):
            os.killpg(0, signal.SIGKILL)  # what it has started, too
        except OSError:  # the script has closed the connection
            return


def _print_error(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
    """Print an error as Python does, without the frames before the script's first."""
    for _ in range(_n_before(traceback.extract_tb(stack))):
        stack = stack and stack.tb_next
    traceback.print_exception(kind, error, stack)


def _n_before(stack: list[traceback.FrameSummary]) -> int:
    """Return how many frames of a stack come before the script's first."""
    return next((n for n, frame in enumerate(stack) if frame.filename not in OURS), len(stack))


if __name__ == "__main__":
    main()
