"""How a rank looks from outside while it runs: its Python stack, and the collectives that it has called.

These functions run on the rank's worker, in another thread. A process that does not let them run is looked at by its
nanny: see `process`.
"""

import faulthandler
import re
import signal
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from daskrun.private import recorded_collectives, stack_of

LIBRARIES = (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen", "<string>")
# What decorators call their function, PyTorch's collectives' too, and what a module's call goes through.
WRAPPERS = ("wrapper", "decorate_context", "inner", "_wrapped_call_impl", "_call_impl")
WAITING = ("distributed", "autograd", "nn/parallel")  # folders of PyTorch
COMMUNICATION = re.compile("gloo|nccl|horovod", re.IGNORECASE)  # in the texts of its errors
MOST_OWN = 20  # innermost frames of the user's code
DEEPEST = 6  # frames of libraries below the line of the user's code: enough to see what it waits for
MOST_CALLS = 200  # the latest ones, which travel


class Call(NamedTuple):
    """A collective that a rank has called. number: its position among those of its group and recorder, from 1.

    what: name and shape, such as "all_reduce of [10]". done: whether the rank has its result.
    """

    group: str
    number: int
    what: str
    done: bool
    recorder: str = "gloo"


class Look(NamedTuple):
    """A rank at work. place: the innermost line of the user's own code, as `place_of` returns it.

    stack: text, from that code's first line on. calls: in order. groups: the process groups that the rank is in.
    trouble: why its process does not answer, or why else there is nothing to say; empty where there is. waits: whether
    it is in code of PyTorch that waits for other ranks, as far as Python's frames show. is_mute: whether its process
    lives, it seems, and does not answer.
    """

    rank: int
    place: str = ""
    stack: str = ""
    calls: tuple[Call, ...] = ()
    groups: tuple[str, ...] = ()
    trouble: str = ""
    waits: bool = False
    is_mute: bool = False

    @property
    def called(self) -> str:
        """The innermost function of the place."""
        return self.place.rpartition(" in ")[2]


ask_script: Callable[[], Look] | None = None  # looks at the process of the script that this worker's rank runs


def look_here(job: str, attempt: int, dask_worker: Any = None) -> Look | None:
    """Return how the job's rank on this worker looks; None where no such rank is at work."""
    for thread, key in dict(dask_worker.active_threads).items():
        if isinstance(key, tuple) and key[:2] == (job, attempt):
            try:
                if ask_script:
                    return ask_script()
                frames = below_the_launcher(list(traceback.extract_stack(stack_of(thread))))
                return look_at(key[2], frames, *recorded_collectives())
            except Exception as error:  # these are PyTorch's private names
                return Look(key[2], trouble=f"could not be looked at: {error!r}")
    return None


def look_at(rank: int, frames: list[traceback.FrameSummary], groups: list[str], entries: list[dict[str, Any]]) -> Look:
    """Return how a rank looks. frames: of the user's code. The others: as from `private.recorded_collectives`."""
    calls = tuple(_call(entry) for entry in entries[-MOST_CALLS:])
    place, stack, waits = place_of(frames), stack_of_code(frames), is_in_waiting_code(frames)
    return Look(rank, place, stack, calls, tuple(groups), waits=waits)


def is_in_waiting_code(frames: list[traceback.FrameSummary]) -> bool:
    """Return whether the innermost frame is of PyTorch's collectives, or of a backward pass, in which DDP waits."""
    torch = Path(find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
    files = [frame.filename for frame in frames]
    through_operators = (str(torch / "_ops.py"), str(torch / "_library"))
    if files and files[-1].startswith(through_operators):  # wait_tensor, for one, is an operator of PyTorch
        caller = next((file for file in reversed(files) if not file.startswith(through_operators)), "")
        return caller == str(torch / "distributed/_functional_collectives.py")
    return bool(files) and files[-1].startswith(tuple(str(torch / folder) for folder in WAITING))


def may_follow_a_death(error: BaseException) -> bool:
    """Return whether an error, or one in its chain or group, came out of the ranks' communication.

    That breaks when another rank dies. The texts of gloo's and NCCL's errors name them.
    """
    import torch.distributed as dist

    seen: list[BaseException] = []
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is None or any(link is one for one in seen):
            continue
        seen.append(link)
        links += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]
        if isinstance(link, dist.DistError) or type(link).__name__ == "HorovodInternalError":
            return True
        with suppress(Exception):  # not every exception has a text
            if isinstance(link, RuntimeError) and COMMUNICATION.search(str(link)):
                return True
    return False


@cache
def write_stacks(worker_folder: str) -> None:
    """Let SIGUSR1, and a crash of native code, write the stacks of all threads into a file beside the worker's folder.

    It works where nothing else does, such as while native code holds Python's lock. The nanny reads the file, and
    removes it at the process's end. Raises OSError where there is no such folder.
    """
    for left in Path(worker_folder).parent.glob("*.stacks"):  # of a worker whose nanny was killed with it
        if not left.with_suffix("").exists():
            left.unlink(missing_ok=True)
    file = Path(f"{worker_folder}.stacks").open("w")  # noqa: SIM115  it stays open
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(file, all_threads=True)


def frames_written(text: str) -> list[traceback.FrameSummary]:
    """Return the frames of the rank's thread, outermost first, from what faulthandler wrote; none if it is not there.

    >>> frames_written('Thread 0x1 (most recent call first):\\n  File "a.py", line 3 in f\\n')
    []
    """
    for thread in _threads(text):
        lines = [line.strip().split('"') for line in thread.splitlines() if line.strip().startswith("File ")]
        frames = [(name, *rest.removeprefix(", line ").split(" in ", 1)) for _, name, rest in lines]
        if any(name == _calling() for name, *_ in frames):
            return below_the_launcher(
                [traceback.FrameSummary(name, int(line), function) for name, line, function in reversed(frames)]
            )
    return []


def is_current(text: str) -> bool:
    """Return whether the rank's thread is the one that crashed, in what faulthandler wrote."""
    return any(thread.startswith("Current thread") and f'"{_calling()}"' in thread for thread in _threads(text))


def _threads(text: str) -> list[str]:
    """Return what faulthandler wrote last, thread by thread, the latest first."""
    return [thread[max(thread.find("Thread 0x"), thread.find("Current thread"), 0) :] for thread in text.split("\n\n")][
        ::-1
    ]


def described(entry: dict[str, Any]) -> str:
    """Return a collective of the flight recorder as text, such as "all_reduce of [10]"."""
    name = entry["profiling_name"].partition(":")[2]  # "gloo:all_reduce"
    return f"{name} of {_shapes(entry)}" if entry["input_sizes"] else name


def below_the_launcher(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames of the user's function, of a rank's whole stack; none where it has not begun."""
    starts = [
        position for position, frame in enumerate(frames, 1) if (frame.filename, frame.name) == (_calling(), "run")
    ]
    return frames[starts[-1] :] if starts else []


def stack_of_code(frames: list[traceback.FrameSummary]) -> str:
    """Return the user's part of a stack as text, with the first frames of what it calls."""
    end = _innermost_own(frames) + 1
    n_left_out = max(0, end - MOST_OWN)
    left_out = f"  ... {n_left_out} {'frame' if n_left_out == 1 else 'frames'}\n" if n_left_out else ""
    return left_out + "".join(traceback.format_list(frames[n_left_out : end + DEEPEST]))


def place_of(frames: list[traceback.FrameSummary]) -> str:
    """Return the innermost line of the user's own code, its function, and what it calls, if that shows.

    Such as "train.py:40 in train, in all_reduce"; native code, as `time.sleep` is, does not show.
    """
    if not frames:
        return "no line of the function: it is being imported, waits for the others to begin, or is in native code"
    at = _innermost_own(frames)
    called = [frame.name for frame in frames[at + 1 :] if frame.name not in WRAPPERS]
    callee = f", in {called[0]}" if called else ""
    file = "cell" if "ipykernel_" in frames[at].filename else Path(frames[at].filename).name  # of a notebook
    return f"{file}:{frames[at].lineno} in {frames[at].name}{callee}"


def _innermost_own(frames: list[traceback.FrameSummary]) -> int:
    own = [position for position, frame in enumerate(frames) if not frame.filename.startswith(LIBRARIES)]
    return own[-1] if own else 0


def _calling() -> str:
    return str(Path(__file__).parents[1] / "rank.py")  # calls the user's function


def _call(entry: dict[str, Any]) -> Call:
    group, number = entry["process_group"][0], entry["collective_seq_id"]
    return Call(group, number, described(entry), entry["retired"], entry["recorder"])


def _shapes(entry: dict[str, Any]) -> str:
    kinds = zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
    sizes = ((size or "one number", kind) for size, kind in kinds)
    shapes = [str(size) if kind == "Float" else f"{size} ({kind})" for size, kind in sizes]
    return ", ".join(shapes[:3]) + (f" and {len(shapes) - 3} more" if len(shapes) > 3 else "")
