"""The sixteen faults as an attendee names them, what a seed draws of them, and the points for an answer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from workshop_utils.exercises import expect

# The clean run: 3 epochs of 12 steps. A case resumes it after step 8.
EPOCHS, PER_EPOCH, SAVED_EVERY, RESUMED_AT = 3, 12, 4, 8
ANY_STEP = range(12, 31)
MIDDLE_STEPS = range(14, 18)  # with enough steps before and after them to compare their times
SAVED_STEPS = ANY_STEP[::SAVED_EVERY]
LAST_STEPS = (PER_EPOCH, 2 * PER_EPOCH)  # of an epoch
FIRST_STEPS = (PER_EPOCH + 1, 2 * PER_EPOCH + 1)
ALL_RANKS = (None,)
SAME_CALLS = "same collectives on all ranks"


@dataclass(frozen=True)
class Fault:
    """A fault as an attendee names it.

    branch: "hangs", "slow", "dead" or "wrong". look: the method of `Case` that shows it best. cure: what undoes it.
    ranks, steps: where it may begin; rank None means all ranks. tolerance: how many steps an answer may be off.
    alike: another kind that looks the same and has the same cure, so it counts, too.
    """

    kind: str
    branch: str
    look: str
    cure: str
    ranks: tuple[int | None, ...] = (0, 1)
    steps: Sequence[int] = ANY_STEP
    tolerance: int = 1
    alike: str = ""


# What a seed draws depends on their order. `pieces` makes them.
_ALL = (
    Fault("collective on one rank", "hangs", "explain", SAME_CALLS, (0,), SAVED_STEPS, alike="collectives swapped"),
    Fault("collectives swapped", "hangs", "explain", SAME_CALLS, alike="collective on one rank"),
    Fault("uneven batches", "hangs", "explain", "as many batches on all ranks", steps=LAST_STEPS, tolerance=0),
    Fault("stalled read", "hangs", "stacks", "time limit for reads"),
    Fault("GIL held", "hangs", "explain", "release the GIL"),
    Fault("process stopped", "hangs", "explain", "continue the process"),
    Fault("slow rank", "slow", "metrics", "another machine", steps=MIDDLE_STEPS),
    Fault("slow input", "slow", "metrics", "more readers", steps=MIDDLE_STEPS, tolerance=3),  # two batches read ahead
    Fault("too many threads", "slow", "metrics", "one thread a core", ALL_RANKS, MIDDLE_STEPS),
    Fault("slow link", "slow", "metrics", "faster network", ALL_RANKS, MIDDLE_STEPS),
    Fault("memory leak", "dead", "result", "keep no tensors"),
    Fault("reader killed", "dead", "result", "more memory for readers", tolerance=3),  # two batches read ahead
    Fault("weights drift", "wrong", "metrics", "call the wrapped model", ALL_RANKS),
    Fault("same images", "wrong", "metrics", "shard by rank", ALL_RANKS, FIRST_STEPS),
    Fault("bad resume", "wrong", "metrics", "load all of the checkpoint", ALL_RANKS, (RESUMED_AT + 1,)),
    Fault("bad gradient", "wrong", "metrics", "another machine"),
)
BY_KIND = {fault.kind: fault for fault in _ALL}

HEALTHY, LEFT_ALONE = "none", "nothing"
FAULTS = (HEALTHY, *BY_KIND)  # the words for diagnose(fault=…)
CURES = (LEFT_ALONE, *dict.fromkeys(fault.cure for fault in _ALL))  # the words for diagnose(cure=…)
POINTS = {"detection": 2, "place": 2, "step": 1, "kind": 3, "cure": 2}
FULL = sum(POINTS.values())
LOST = -4  # for a false alarm, and for a fault that was overlooked
BRANCHES = {"hangs": "hangs", "slow": "is slow", "wrong": "gives wrong numbers", "dead": "ends a process"}
MOST_LEAKED = 4 * 2**30  # bytes


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong in a case, by default nothing. rank: None for all ranks. step: the first that the fault spoils."""

    fault: str = HEALTHY
    rank: int | None = None
    step: int | None = None
    cure: str | None = None


def draw(seed: int, possible: Sequence[str] = FAULTS) -> Diagnosis:
    """Return what is wrong in the case of this seed: nothing in one of six, else one of the `possible` faults.

    A fault that is not possible does not change what other seeds draw.
    """
    chance = random.Random(seed)
    if chance.random() < 1 / 6:
        return Diagnosis()
    fault = chance.choice(_ALL)
    while fault.kind not in possible:
        fault = chance.choice(_ALL)
    return Diagnosis(fault.kind, chance.choice(fault.ranks), chance.choice(fault.steps), fault.cure)


def possible_with(memory_limit: int | None) -> list[str]:
    """Return the faults that can be on workers with this memory limit in bytes, None for no limit."""
    leaks = memory_limit is not None and memory_limit <= MOST_LEAKED
    return [kind for kind in BY_KIND if leaks or kind != "memory leak"]


def checked(fault: Any, rank: Any, step: Any, cure: Any, n_ranks: int = 2) -> Diagnosis:
    """Return the answer. Raises NotYet, which costs nothing, for words and numbers that cannot be one."""
    expect(fault in FAULTS, f"fault is {fault!r}: write one of {', '.join(map(repr, FAULTS))}.")
    expect(cure is None or cure in CURES, f"cure is {cure!r}: write one of {', '.join(map(repr, CURES))}.")
    for name, value in (("rank", rank), ("step", step)):
        whole = isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer()  # such as 24.0
        expect(value is None or whole, f"{name} is {value!r}: write a whole number, or None if there is none.")
    expect(rank in (None, *range(n_ranks)), f"rank is {rank}: it is from 0 to {n_ranks - 1}, or None for all ranks.")
    return Diagnosis(fault, rank, step, cure)


def points(truth: Diagnosis, answer: Diagnosis) -> dict[str, int]:
    """Return the points for each part of an answer; a healthy job has no rank, no step, and nothing to cure."""
    if (answer.fault == HEALTHY) != (truth.fault == HEALTHY):
        return dict.fromkeys(POINTS, 0) | {"detection": LOST}
    place = answer.rank == truth.rank
    if truth.fault == HEALTHY:
        kind, step, cure = True, answer.step is None, answer.cure in (None, LEFT_ALONE)
    else:
        fault = BY_KIND[truth.fault]
        kind, cure = answer.fault in (fault.kind, fault.alike), answer.cure == fault.cure
        assert truth.step is not None
        step = answer.step is not None and abs(answer.step - truth.step) <= fault.tolerance
    # Most cases have a fault: to say so alone is no finding.
    right = {"detection": kind or place, "place": place, "step": step, "kind": kind, "cure": cure}
    return {part: POINTS[part] if right[part] else 0 for part in POINTS}


def solution(truth: Diagnosis) -> str:
    """Return what was wrong, and which look would have shown it, in a sentence or two."""
    if truth.fault == HEALTHY:
        return "Nothing was wrong: all ranks took the steps of the clean run."
    fault = BY_KIND[truth.fault]
    place = "all ranks" if truth.rank is None else f"rank {truth.rank}"
    near = f" ({fault.tolerance} more or less count, too)" if fault.tolerance else ""
    branch = BRANCHES[fault.branch]
    about = f"It was {fault.kind!r}, on {place}, from step {truth.step} on{near}: the kind that {branch}."
    return f"{about} case.{fault.look}() shows it; the cure is {fault.cure!r}."
