"""Where this process is: the program's stack, and the collectives that it has called."""

import traceback
from collections.abc import Sequence
from pathlib import Path
from threading import main_thread
from types import TracebackType

from daskrun.private import recorded_collectives, stack_of
from daskrun.protocol import Snapshot

OURS = str(Path(__file__).parents[1]), "<frozen runpy>"


def snapshot() -> Snapshot | str:
    """Return where this process is; why that can't be said, where PyTorch's private names are others."""
    try:
        frames = list(traceback.extract_stack(stack_of(main_thread().ident or 0)))
        frames = frames[n_above([frame.filename for frame in frames]) :]
        stack = [(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in frames]
        return Snapshot(stack, *recorded_collectives())
    except (AttributeError, KeyError, ValueError) as error:
        return repr(error)


def n_above(files: Sequence[str]) -> int:
    """Return how many frames of a stack are above the program's first: python -c's, ours, and Python's own.

    Args:
        files: Of the frames, outermost first.
    """
    start = len(files) > 1 and files[0] == "<string>" and files[1].startswith(OURS)
    return next((n for n in range(start, len(files)) if not files[n].startswith(OURS)), len(files))


def from_the_program(stack: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the program's first frame on, None where it has none."""
    for _ in range(n_above([frame.f_code.co_filename for frame, _ in traceback.walk_tb(stack)])):
        stack = stack and stack.tb_next
    return stack
