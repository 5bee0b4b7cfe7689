"""A script's own process: it runs as `__main__`, and a thread answers its worker, which asks how it looks."""

import ctypes
import os
import runpy
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from threading import Thread, main_thread
from types import TracebackType
from typing import Any

from daskrun import rank
from daskrun.family import OF_RANK
from daskrun.private import stack_of
from daskrun.why.look import look_at

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


class Printer:
    """What stands in for the worker here: a row of metrics is printed among the script's other lines."""

    address = ""

    def log_event(self, topic: str, message: Any) -> None:
        """Print the row of a message ("row", job, row)."""
        row = {name: value for name, value in message[2].items() if name not in rank.ABOUT}
        print("  ".join(f"{name} {value}" for name, value in row.items()))


def main() -> None:
    """Run the script that the worker names; sys.argv has the number of the file by which to hear it."""
    if sys.platform == "linux":  # elsewhere, `_answer` ends this process, if the script lets it
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    mine, script = connection.recv()
    os.environ[OF_RANK] = str(os.getpid())  # this process may log, its children may not
    rank.take_part(Printer(), mine)
    Thread(target=_answer, args=(connection, mine.rank), name="daskrun", daemon=True).start()
    sys.excepthook = _print_error
    sys.argv = [script.path, *script.arguments]
    sys.path[0] = script.beside(os.getcwd())
    if script.is_module:
        runpy.run_module(script.path, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(script.path), run_name="__main__")


def _answer(connection: Connection, number: int) -> None:
    """Answer each question with how this process looks; end with the worker."""
    while True:
        try:
            connection.recv()
            stack = list(traceback.extract_stack(stack_of(main_thread().ident or 0)))
            connection.send(look_at(number, stack[_n_before(stack) :]))
        except (EOFError, OSError):
            os._exit(1)


def _print_error(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
    """Print an error as Python does, without the frames before the script's first."""
    for _ in range(_n_before(traceback.extract_tb(stack))):
        stack = stack and stack.tb_next
    traceback.print_exception(kind, error, stack)


def _n_before(stack: list[traceback.FrameSummary]) -> int:
    """Return how many frames of a stack come before the script's first."""
    return max((n for n, frame in enumerate(stack, 1) if frame.filename == "<frozen runpy>"), default=0)


if __name__ == "__main__":
    main()
