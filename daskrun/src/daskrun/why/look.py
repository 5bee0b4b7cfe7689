"""How a rank looks from outside while it runs: its Python stack, and the collectives that it has called."""

import sysconfig
import traceback
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from daskrun.child.stack import LOWEST, n_above
from daskrun.private import described
from daskrun.protocol import Snapshot

LIBRARIES = (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen", "<string>")
# What decorators call their function, PyTorch's collectives' too, and what a module's call goes through.
WRAPPERS = ("wrapper", "decorate_context", "inner", "_wrapped_call_impl", "_call_impl")
WAITING = ("distributed", "autograd", "nn/parallel")  # folders of PyTorch
BUSY = 0.5  # of a core: what a process has to use to be called busy
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
    """A rank at work. place: the innermost line of the user's own code, as `place_of` returns it, of the main thread
    and of others that wait for other ranks.

    stack: text, from that code's first line on. calls: in order. groups: the process groups that the rank is in.
    trouble: why its process does not answer, or why else there is nothing to say; empty where there is. waits: whether
    it is in code of PyTorch that waits for other ranks, as far as Python's frames show.
    """

    rank: int
    place: str = ""
    stack: str = ""
    calls: tuple[Call, ...] = ()
    groups: tuple[str, ...] = ()
    trouble: str = ""
    waits: bool = False

    @property
    def called(self) -> str:
        """The innermost function of the place."""
        return self.place.rpartition(" in ")[2]


def look_at(rank: int, snapshot: Snapshot) -> Look:
    """Return how a rank looks that has answered."""
    frames, *others = [
        [traceback.FrameSummary(file, number, name, line=line) for file, number, name, line in stack]
        for stack in (snapshot.frames, *snapshot.others)
    ]
    others = [other for other in others if is_in_waiting_code(other)]
    calls = tuple(_call(entry) for entry in snapshot.collectives[-MOST_CALLS:])
    place = "; another thread is at ".join(map(place_of, [frames, *others]))
    stack = "in another thread:\n".join(map(stack_of_code, [frames, *others]))
    waits = bool(others) or is_in_waiting_code(frames)
    if snapshot.is_idle:
        place = "no line of a cell, and waits for the next one"
    if at := snapshot.stopped_at:
        place, stack, waits = at, "", False  # and not where pdb is
    trouble = f"is stopped at {at} by its debugger: job.debug({rank}) opens the prompt" if at else ""
    return Look(rank, place, stack, calls, tuple(snapshot.groups), trouble, waits)


def silent(rank: int, pid: int, status: str, cpu: float, written: str) -> Look:
    """Return the look at a rank whose process does not answer.

    Args:
        status: Of psutil.
        cpu: The cores that it uses.
        written: What faulthandler wrote.
    """
    frames = frames_written(written)
    place, stack = (place_of(frames), stack_of_code(frames)) if frames else ("", "")
    about = f"process {pid}"
    if status == "stopped":
        why = f"is stopped: {about} got SIGSTOP or Ctrl-Z, or its batch system suspended it. kill -CONT lets it go on"
    else:
        does = f"uses {cpu:.1f} of a core" if cpu >= BUSY else "waits"
        where = f"{about} {does}, at {place}" if place else f"{about} {does}"
        why = f"does not answer: {where}. Native code there may hold Python's lock (the GIL), or its machine is busy"
    return Look(rank, place, stack, trouble=why)


def is_in_waiting_code(frames: list[traceback.FrameSummary]) -> bool:
    """Return whether the innermost frame is of PyTorch's collectives, or of a backward pass, in which DDP waits."""
    torch = _torch()
    files = [frame.filename for frame in frames]
    through_operators = (str(torch / "_ops.py"), str(torch / "_library"))
    if files and files[-1].startswith(through_operators):  # wait_tensor, for one, is an operator of PyTorch
        caller = next((file for file in reversed(files) if not file.startswith(through_operators)), "")
        return caller == str(torch / "distributed/_functional_collectives.py")
    return bool(files) and files[-1].startswith(tuple(str(torch / folder) for folder in WAITING))


@cache
def _torch() -> Path:
    return Path(find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]


def frames_written(text: str) -> list[traceback.FrameSummary]:
    """Return the frames of the rank's thread, outermost first, from what faulthandler wrote; none if it is not there.

    >>> frames_written('Thread 0x1 (most recent call first):\\n  File "a.py", line 3 in f\\n')
    []
    """
    for thread in _threads(text):
        lines = [line.strip().split('"') for line in thread.splitlines() if line.strip().startswith("File ")]
        found = [(name, *rest.removeprefix(", line ").split(" in ", 1)) for _, name, rest in lines][::-1]
        if found and found[0][0] == LOWEST:
            found = found[n_above([name for name, *_ in found]) :]
            return [traceback.FrameSummary(name, int(line), function) for name, line, function in found]
    return []


def is_current(text: str) -> bool:
    """Return whether the rank's main thread is the one that crashed, in what faulthandler wrote."""
    return any(thread.startswith("Current thread") and f'"{LOWEST}"' in thread for thread in _threads(text))


def _threads(text: str) -> list[str]:
    """Return what faulthandler wrote last, thread by thread, the latest first."""
    return [thread[max(thread.find("Thread 0x"), thread.find("Current thread"), 0) :] for thread in text.split("\n\n")][
        ::-1
    ]


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


def _call(entry: dict[str, Any]) -> Call:
    group, number = entry["process_group"][0], entry["collective_seq_id"]
    return Call(group, number, described(entry), entry["retired"], entry["recorder"])
