"""Where this process is: the program's stack, and the collectives that it has called."""

import traceback
from pathlib import Path
from threading import current_thread, main_thread
from types import TracebackType
from typing import Any

from daskrun.child import context
from daskrun.private import frames_of_threads, recorded_collectives
from daskrun.protocol import Snapshot

LOWEST = "<string>"  # the file of a rank's lowest frame, which calls the program
CELL = "<cell "  # how the files of the cells begin that a rank is sent
MOST_THREADS = 20
OURS = str(Path(__file__).parents[1]), "<frozen runpy>"


def snapshot() -> Snapshot | str:
    """Return where this process is; why that can't be said, where PyTorch's private names are others."""
    try:
        innermost, first, ours = frames_of_threads(), main_thread().ident, current_thread().ident
        main = _stack(innermost[first or 0])
        others = [_stack(frame) for thread, frame in innermost.items() if thread not in (first, ours)]
        here = context.current()
        at, is_idle = (here.stopped_at, here.is_idle) if here else ("", False)
        return Snapshot(main, others[:MOST_THREADS], *recorded_collectives(), at, is_idle)
    except (AttributeError, KeyError, ValueError) as error:
        return repr(error)


def _stack(frame: Any) -> list[tuple[str, int, str, str]]:
    frames = list(traceback.extract_stack(frame))
    frames = frames[n_above([frame.filename for frame in frames]) :]
    return [(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in frames]


def n_above(files: list[str]) -> int:
    """Return how many frames of a stack are above the program's first: the lowest one, ours, and Python's own.

    Args:
        files: Of the frames, outermost first.
    """
    if cells := [n for n, file in enumerate(files) if file.startswith(CELL)]:
        return cells[0]
    start = files[:1] == [LOWEST]
    return next((n for n in range(start, len(files)) if not files[n].startswith(OURS)), len(files))


def from_the_program(stack: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the program's first frame on, None where it has none."""
    for _ in range(n_above([frame.f_code.co_filename for frame, _ in traceback.walk_tb(stack)])):
        stack = stack and stack.tb_next
    return stack
