"""Where lines that move are shown: on a screen as they move, in a file as one line each."""

import builtins
import sys
from typing import Any, TextIO


def screen() -> Any:
    """Return the file that `tqdm` should write to; None in a program that was started without one."""
    if hasattr(builtins, "__IPYTHON__"):
        return sys.stdout  # a notebook gives stderr the colour of an error
    if sys.stderr is None or sys.stderr.isatty():
        return sys.stderr
    return _LastStates(sys.stderr)


class _LastStates:
    """Writes of each line what is left after its last carriage return, once the line has ended."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._line = file, ""

    def write(self, text: str) -> None:
        self._line += text
        if text.endswith("\n"):
            self._file.write(self._line.rpartition("\r")[2].rstrip() + "\n")
            self._line = ""

    def flush(self) -> None:
        self._file.flush()
