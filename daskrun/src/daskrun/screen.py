"""Where lines that move are shown: on a screen as they move, in a file as one line each."""

import builtins
import io
import sys
from contextlib import suppress
from typing import Any, TextIO


def screen() -> Any:
    """Return the file that `tqdm` should write to."""
    if hasattr(builtins, "__IPYTHON__"):
        return sys.stdout  # a notebook gives stderr the colour of an error
    if sys.stderr is None or sys.stderr.closed:  # a service, for example, may have none
        return _LastStates(io.StringIO())
    return sys.stderr if sys.stderr.isatty() else _LastStates(sys.stderr)


class _LastStates:
    """Writes of each line what is left after its last carriage return, once the line has ended.

    What cannot be written is lost: nobody's job should end because a disk is full, or because `head` has read enough.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self._line = file, ""

    def write(self, text: str) -> None:
        self._line += text
        if text.endswith("\n"):
            with suppress(OSError, ValueError):
                self._file.write(self._line.rpartition("\r")[2].rstrip() + "\n")
            self._line = ""

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()
