"""pdb in a rank: its prompt is on the client, which sends it lines."""

import pdb
from contextlib import suppress
from io import StringIO
from pathlib import Path
from queue import Empty
from types import FrameType, TracebackType
from typing import Any

from daskrun.child.context import Context
from daskrun.child.failure import may_follow
from daskrun.child.stack import CELL, from_the_program, n_above
from daskrun.errors import NoDebugger


class _Terminal(StringIO):
    """What pdb takes for its input and its screen."""

    def __init__(self, here: Context) -> None:
        super().__init__()
        self.here, self.said, self.place = here, "", ""

    def write(self, text: str) -> int:
        self.said += text
        return len(text)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Send what pdb has printed, its prompt last, and return the client's line."""
        self.here.stopped_at = self.place
        try:
            self.here.send("prompt", self.place, self.said)
            self.said = ""
            line = self.here.lines.get(timeout=self.here.mine.debug_timeout)
        except (Empty, OSError, KeyboardInterrupt):
            line = None
        finally:
            self.here.stopped_at = ""
        if line is None:
            self.resume()
            raise NoDebugger(self.here.mine.rank, self.place)
        return line

    def resume(self) -> None:
        """Tell the client that the rank goes on, and what else was printed."""
        said, self.said = self.said, ""
        with suppress(OSError):
            self.here.send("resumed", said)


class RankPdb(pdb.Pdb):
    """pdb on the client's screen."""

    def __init__(self, here: Context) -> None:
        self._terminal = terminal = _Terminal(here)
        self._first: FrameType | None = None  # of the program
        self._in_cell = False
        super().__init__(stdin=terminal, stdout=terminal, skip=["daskrun.*"], nosigint=True, readrc=False)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the program's part of the stack, without the launcher's frames."""
        stack, at = super().get_stack(f, t)
        above = n_above([frame.f_code.co_filename for frame, _ in stack])
        self._first = stack[above][0] if stack[above:] else None
        return stack[above:], at - above

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether to stop: of a cell's code, IPython runs each statement in a frame of its own."""
        return super().stop_here(frame) and (not self._in_cell or _is_of_a_cell(frame))

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        """Stop where a function begins."""
        if not (self._in_cell and frame.f_code.co_name == "<module>"):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Stop at a function's end, but not in the launcher's code that called the program."""
        if self._in_cell and frame.f_code.co_name == "<module>":
            return  # the cell's next statement has a frame of its own
        super().user_return(frame, return_value)
        if frame is self._first and not self._in_cell and not self.quitting:
            self.set_continue()

    def do_interact(self, arg: str) -> None:
        """Say that there's none: it would read this process's standard input."""
        self.error("interact isn't supported in a rank")

    def cmdloop(self, intro: Any = None) -> None:
        """Take commands where the program stands."""
        frame, number = self.stack[self.curindex]
        self._in_cell = _is_of_a_cell(frame)
        self._terminal.place = f"{Path(frame.f_code.co_filename).name}:{number}"
        super().cmdloop(intro)

    def set_continue(self) -> None:
        super().set_continue()
        self._terminal.resume()

    def set_quit(self) -> None:
        super().set_quit()
        self._terminal.resume()


def _is_of_a_cell(frame: FrameType | None) -> bool:
    return frame is not None and (frame.f_code.co_filename.startswith(CELL) or _is_of_a_cell(frame.f_back))


def post_mortem(here: Context, error: BaseException) -> None:
    """Open the debugger where an error was raised, and return once it is left, or nobody answers."""
    stack = from_the_program(error.__traceback__)
    if stack is None or not isinstance(error, Exception) or isinstance(error, NoDebugger) or may_follow(error):
        return
    debugger = RankPdb(here)
    debugger.reset()
    debugger.message(f"{type(error).__name__}: {error}")
    with suppress(NoDebugger):
        debugger.interaction(None, stack)
