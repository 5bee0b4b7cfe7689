"""Where a rank stands: the Python stack of its thread, and the line of the user's code in it."""

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workshop_utils.job.errors import listed
from workshop_utils.job.private import stack_of

WRAPPERS = ("wrapper", "decorate_context", "inner")  # what decorators call their function, PyTorch's collectives' too


def stack_here(job: str, attempt: int, dask_worker: Any = None) -> tuple[str, str] | None:
    """Return (place, stack) of the job's rank on this worker; None where no such rank is at work.

    place: the innermost line of the user's own code, and what it calls. stack: text, from that code's first line on.
    Client.call_stack has the text alone, with all of Dask's frames, and waits for workers that do not answer.
    """
    for thread, key in dict(dask_worker.active_threads).items():
        if isinstance(key, tuple) and key[:2] == (job, attempt):
            frames = _below_the_launcher(list(traceback.extract_stack(stack_of(thread))))
            return _place(frames), "".join(traceback.format_list(frames))
    return None


def timed_out(seconds: float, late: Sequence[int], standing: Sequence[tuple[int, str, str]]) -> TimeoutError:
    """Return the error of a job that took too long. late: ranks. standing: (rank, place, stack) of who answers."""
    places = "; ".join(f"rank {rank}: {place}" for rank, place, _ in standing) or "no rank is at work"
    error = TimeoutError(
        f"Rank {listed(late)} had not returned after {seconds} s ({places}): give the job a longer timeout, or see "
        "there who waits for whom."
    )
    if standing:
        error.add_note("\n".join(f"Rank {rank}:\n{stack}" for rank, _, stack in standing))
    return error


def _below_the_launcher(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    calling = str(Path(__file__).with_name("rank.py"))  # calls the user's function
    starts = [position for position, frame in enumerate(frames, 1) if frame.filename == calling]
    return frames[starts[-1] if starts else 0 :] or frames[-1:]


def _place(frames: list[traceback.FrameSummary]) -> str:
    libraries = (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen")
    own = [position for position, frame in enumerate(frames) if not frame.filename.startswith(libraries)]
    at = own[-1] if own else 0
    called = [frame.name for frame in frames[at + 1 :] if frame.name not in WRAPPERS]
    name = called[0] if called else frames[at].name
    return f"{Path(frames[at].filename).name}:{frames[at].lineno} in {name}"
