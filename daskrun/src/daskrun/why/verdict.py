"""Say what a job waits for, and of what a rank died, from what workers tell: text alone."""

import re
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dask.utils import format_bytes

from daskrun.claims import Worker, unfit
from daskrun.errors import GO_ON, JobError, ranks_do, ranks_named
from daskrun.protocol import Ended
from daskrun.why.look import Call, Look, frames_written, is_current, place_of

T = TypeVar("T")
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
BETWEEN_TWO = ("send", "recv", "send_object_list", "recv_object_list")  # the flight recorder has none of them on gloo
# What Dask calls the usual reasons for which it closes a worker.
REASONS = {
    "client-restart-workers": "somebody restarted it",
    "nanny-restart": "somebody restarted it",
    "scheduler-remove-worker": "it was retired",
    "worker-lifetime-reached": "its lifetime was over",
}


def explain(looks: Sequence[Look], ended: Sequence[int] = ()) -> str:
    """Return who waits for whom, in a sentence or more, and then the stacks, the odd one first.

    looks: of the ranks at work. ended: ranks that have returned or raised an error.
    """
    return "\n\n".join(part for part in (verdict(looks, ended), stacks(looks)) if part)


def verdict(looks: Sequence[Look], ended: Sequence[int] = ()) -> str:
    """Return which ranks do not run, which wait in a collective, and which of the others have not called it."""
    if not looks:
        return "No rank is at work."
    said = [f"Rank {look.rank} {look.trouble}." for look in looks if look.trouble]
    groups = dict.fromkeys(group for look in looks for group in look.groups)
    recorders = dict.fromkeys(call.recorder for look in looks for call in look.calls)
    waits = (_wait_in(group, recorder, looks, not ended) for group in groups for recorder in recorders)
    said += filter(None, waits)
    said += [
        f"Rank {look.rank} waits in {look.called}, at {look.place}: the other rank has not made its part of it."
        for look in looks
        if look.called in BETWEEN_TWO and look.waits
    ]
    if not said:
        where = "; ".join(f"rank {look.rank} is at {look.place}" for look in looks)
        said = [f"No rank waits for another in a collective that PyTorch records: {where}."]
    if ended:
        said.append(f"{ranks_do(ended, 'has', 'have').capitalize()} returned, or raised an error.")
    return " ".join(said)


def stacks(looks: Sequence[Look]) -> str:
    """Return the stacks; ranks with the same one stand together.

    First come those that do not wait, as the others may wait for them; then those that have the fewest like them.
    """
    alike = defaultdict(list)
    for look in looks:
        if look.stack:  # a stopped process writes none
            alike[look.waits, look.place, look.stack].append(look.rank)
    in_order = sorted(alike.items(), key=lambda item: (item[0][0], len(item[1])))
    return "\n".join(
        f"{ranks_named(ranks).capitalize()}, at {place}:\n{stack}" for (_, place, stack), ranks in in_order
    )


def unreachable(rank: int) -> Look:
    """Return the look at a rank whose worker does not answer."""
    why = "it may be stopped, or its host, or the network to it, is lost"
    return Look(rank, trouble=f"cannot be asked, as its worker does not answer: {why}")


def stalled(seconds: float, looks: Sequence[Look], ended: Sequence[int]) -> str:
    """Return the warning of a job that seems to hang."""
    return f"No rank has logged anything for {seconds:.0f} s. {explain(looks, ended)}"


def timed_out(seconds: float | None, size: int, looks: Sequence[Look], ended: Sequence[int]) -> TimeoutError:
    """Return the error of a job of `size` ranks that took too long."""
    late = [rank for rank in range(size) if rank not in ended]
    who = f"{ranks_named(late).capitalize()} had not returned" if late else "The ranks' results had not arrived"
    error = TimeoutError(
        f"{who} after {seconds} s. {verdict(looks, ended)} If all is well, give the job a longer time_limit."
    )
    if looks:
        error.add_note(stacks(looks))
    return error


def diagnosed(kind: Callable[[str], T], describe: Callable[..., T], *about: Any) -> T:
    """Return what a diagnosis makes of this; what it raises becomes its text, as it must not end a job."""
    try:
        return describe(*about)
    except Exception as error:
        return kind(f"This cannot be explained ({describe.__name__}): {error!r}.")


def check_can_begin(rank: int, worker: Worker, job: str, late_s: float | None) -> None:
    """Raise JobError if a rank cannot begin. late_s: seconds after which it was late, None if it is not."""
    if worker.status != "running":
        raise JobError(f"Rank {rank} cannot begin: worker {worker.address} {unfit(worker)}.")
    if late_s:
        raise JobError(f"Rank {rank} has not begun within {late_s} s: {_at_work(worker, job)}. Launch the job again.")


def not_begun(rank: int, worker: Worker, job: str) -> Look:
    """Return the look at a rank of this job that has not begun."""
    return Look(rank, trouble=f"has not begun: {_at_work(worker, job)}")


def _at_work(worker: Worker, job: str) -> str:
    """Return what keeps a worker from the rank of this job that it was given."""
    if others := [task for task in worker.tasks if task != job]:
        return f"worker {worker.address} is busy with {others}"
    return f"worker {worker.address} has not come to it"


def how_it_ended(ended: Ended) -> tuple[str, str]:
    """Return (how a rank's process ended, what to do), the first as the end of a sentence about the process."""
    number, code = -ended.code, ended.code
    if ended.limit_bytes:
        how = f"was ended, as it and its worker came to {format_bytes(ended.limit_bytes)}, 95 % of the memory limit"
        return how, "Keep fewer tensors, or give workers a larger memory_limit."
    if code >= 0:
        how = f"ended with exit code {code}: the function, or a library, ended the process"
        return how, "Let the function return, or raise an error, instead."
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    # Of other signals' deaths nothing was written: what is there is of an earlier look.
    frames = frames_written(ended.stacks) if number in (*CRASHES, signal.SIGABRT) else []
    where = "at" if is_current(ended.stacks) else "in another thread, with the function at"
    killed = f"was killed by signal {number} ({name})" + (f", {where} {place_of(frames)}" if frames else "")
    if number == signal.SIGKILL and ended.out_of_memory:
        how = f"{killed}, from the kernel, for want of memory: its control group (cgroup) counts an oom_kill"
        return how, "Keep fewer tensors, or give that group, such as a container or a batch job, more memory."
    if number == signal.SIGKILL:
        return f"{killed}, from a person, a batch system, or a kernel without memory left", GO_ON
    if number == signal.SIGABRT:
        how = (
            f"{killed}: native code gave up, as gloo does where ranks call different collectives, and NCCL after "
            "another rank's death or a timeout"
        )
        return how, "Call the same collectives, with the same shapes, on all ranks; under NCCL, see who died first."
    return (f"{killed}: native code crashed", "") if number in CRASHES else (killed, GO_ON)


def how_worker_ended(reason: str, rss: int | None) -> tuple[str, str]:
    """Return (how a worker ended, what to do), the first as the end of a sentence about the worker.

    Args:
        reason: For which Dask closed it, "" if it didn't.
        rss: The bytes that it had when Dask's nanny ended it for its memory limit, None if that didn't.
    """
    if rss is not None:
        how = f"had {format_bytes(rss)}, too near to its memory limit, so Dask ended it"
        return how, "Keep less on the workers, or give them a larger memory_limit."
    if reason:
        word, _, code = reason.partition("-")
        reason = re.sub(r"-\d[\d.]*$", "", reason)  # without Dask's number of an order
        by = signal.Signals(int(code)).name if word == "signal" else f"Dask ({REASONS.get(reason, reason)})"
        return f"was closed by {by}", GO_ON
    return "is gone: it was killed, or its host, or the network to it, is lost", GO_ON


def _wait_in(group: str, recorder: str, looks: Sequence[Look], all_at_work: bool) -> str:
    """Return who waits in the oldest unfinished collective of a group that a recorder has, and what the others do.

    "" if nobody waits.
    """
    members = {look.rank: look for look in looks if group in look.groups}
    called = {
        rank: {call.number: call for call in look.calls if (call.group, call.recorder) == (group, recorder)}
        for rank, look in members.items()
    }
    open_calls = [number for calls in called.values() for number, call in calls.items() if not call.done]
    if not open_calls:
        return ""
    number, in_group = min(open_calls), "" if group == "0" else f" in group {group}"
    calls = {rank: mine[number] for rank, mine in called.items() if number in mine}
    alike = defaultdict(list)
    for rank, call in calls.items():
        alike[_comparable(call)].append(rank)
    if len(alike) > 1:
        ways = [_calls(ranks, calls[ranks[0]], members[ranks[0]]) for ranks in alike.values()]
        return f"The ranks' collective {number}{in_group} is not the same: {'; '.join(ways)}."
    waiting = [rank for rank, call in calls.items() if not call.done]
    name, _, shape = calls[waiting[0]].what.partition(" of ")
    what = f"{name} (collective {number}{in_group}{', shape ' if shape else ''}{shape})"
    inside = [rank for rank in waiting if members[rank].waits]  # others may have gone on after an asynchronous call
    said = []
    if inside:
        said.append(f"{ranks_do(inside, 'waits', 'wait').capitalize()} in {what}, at {members[inside[0]].place}.")
    said += [
        f"Rank {rank} has called {what}, which is not done, and is at {members[rank].place}."
        for rank in waiting
        if rank not in inside
    ]
    missing = [rank for rank, mine in called.items() if not any(n >= number for n in mine)]
    said += [f"Rank {rank} has not called it: it is at {members[rank].place}." for rank in missing]
    if not missing and all_at_work and len(looks) == len(members):
        said.append("All ranks have called it, so it is under way.")
    return " ".join(said)


def _comparable(call: Call) -> str:
    """Return what has to be the same on all ranks: the shapes, too, but for calls in which they may differ."""
    return call.what.partition(" ")[0] if call.what.startswith(("scatter", "gather", "all_to_all")) else call.what


def _calls(ranks: Sequence[int], call: Call, look: Look) -> str:
    if call.done:
        return f"{ranks_named(ranks)} called {call.what}, and {'is' if len(ranks) == 1 else 'are'} now at {look.place}"
    return f"{ranks_do(ranks, 'calls', 'call')} {call.what}, at {look.place}"
