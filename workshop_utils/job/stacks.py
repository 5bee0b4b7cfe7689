"""Where each rank of a job stands: the Python stack of the thread that runs it, read while it runs."""

import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client

from workshop_utils.job import rank
from workshop_utils.job.workers import ANSWER_S

WRAPPERS = ("wrapper", "decorate_context", "inner")  # what decorators call their function: PyTorch's collectives', too


@dataclass(frozen=True)
class Standing:
    """Where a rank stands. stack: text, from the function's first line on. place: the user's own innermost line."""

    stack: str
    place: str


def stacks_of(client: Client, workers: list[str], key: tuple) -> dict[str, Standing]:
    """Return where the tasks whose keys begin with `key` stand, by worker; one that does not answer is left out."""
    try:
        found = client.sync(client._run, _standing, key, workers=workers, on_error="ignore", callback_timeout=ANSWER_S)
    except (OSError, TimeoutError):
        return {}
    return {address: standing for address, standing in found.items() if standing}


def _standing(key: tuple, dask_worker: Any) -> Standing | None:
    for thread, active in dict(dask_worker.active_threads).items():
        if isinstance(active, tuple) and active[: len(key)] == key:
            frames = list(traceback.extract_stack(sys._current_frames()[thread]))
            starts = [i for i, frame in enumerate(frames, 1) if frame.filename == rank.__file__]
            frames = frames[starts[-1] if starts else 0 :] or frames[-1:]
            return Standing("".join(traceback.format_list(frames)), _place(frames))
    return None


def _place(frames: list[traceback.FrameSummary]) -> str:
    paths = sysconfig.get_paths()
    libraries = tuple(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = [i for i, frame in enumerate(frames) if not frame.filename.startswith((*libraries, "<frozen"))]
    at = own[-1] if own else 0
    called = [frame.name for frame in frames[at + 1 :] if frame.name not in WRAPPERS]
    return f"{Path(frames[at].filename).name}:{frames[at].lineno} in {(called or [frames[at].name])[0]}"
