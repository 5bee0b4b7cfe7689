"""Points for an answer about a case of the gym: is there a fault, where, since when, which, and what cures it?"""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from workshop_utils.exercises import expect
from workshop_utils.exercises.gym.drawn import Drawn
from workshop_utils.exercises.gym.faults import FOUND

HEALTHY, LEFT_ALONE = "none", "nothing"
KINDS = {number: one.kind for number, one in FOUND.items()}
FAULTS = (HEALTHY, *KINDS.values())  # the words for diagnose(fault=…)
CURES = (LEFT_ALONE, *dict.fromkeys(one.cure for one in FOUND.values()))  # the words for diagnose(cure=…)
POINTS = {"detection": 2, "place": 2, "step": 1, "kind": 3, "cure": 2}
FULL = sum(POINTS.values())
LOST = -4  # for a false alarm, and for a fault that was overlooked


@dataclass(frozen=True)
class Answer:
    """What an attendee says of a case. rank: None if the fault is on all ranks. step: the first that it spoils."""

    fault: str
    rank: int | None = None
    step: int | None = None
    cure: str | None = None


def checked(fault: Any, rank: Any, step: Any, cure: Any, n_ranks: int = 2) -> Answer:
    """Return the answer. Raises NotYet, which costs nothing, for words and numbers that cannot be one."""
    expect(fault in FAULTS, f"fault is {fault!r}: write one of {', '.join(map(repr, FAULTS))}.")
    expect(cure is None or cure in CURES, f"cure is {cure!r}: write one of {', '.join(map(repr, CURES))}.")
    for name, value in (("rank", rank), ("step", step)):
        whole = isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's are, too
        expect(value is None or whole, f"{name} is {value!r}: write a whole number, or None if there is none.")
    expect(rank in (None, *range(n_ranks)), f"rank is {rank}: it is from 0 to {n_ranks - 1}, or None for all ranks.")
    return Answer(fault, rank, step, cure)


def points(drawn: Drawn, answer: Answer) -> dict[str, int]:
    """Return the points for each part of an answer; a healthy job has no rank, no step, and nothing to cure."""
    if (answer.fault == HEALTHY) != (drawn.number == 0):
        return dict.fromkeys(POINTS, 0) | {"detection": LOST}
    right = _right(drawn, answer)
    return {part: POINTS[part] if right[part] else 0 for part in POINTS}


def _right(drawn: Drawn, answer: Answer) -> dict[str, bool]:
    if drawn.number == 0:
        left_alone = answer.cure in (None, LEFT_ALONE)
        none = {"place": answer.rank is None, "step": answer.step is None, "cure": left_alone}
        return none | {"detection": True, "kind": True}
    one = FOUND[drawn.number]
    assert drawn.step is not None
    kind, place = answer.fault in (one.kind, one.alike), answer.rank == drawn.rank
    return {
        "detection": kind or place,  # most cases have a fault: to say so alone is no finding
        "place": place,
        "step": answer.step is not None and abs(answer.step - drawn.step) <= one.tolerance,
        "kind": kind,
        "cure": answer.cure == one.cure,
    }


def solution(drawn: Drawn) -> str:
    """Return what was wrong, and which look would have shown it, in a sentence or two."""
    if drawn.number == 0:
        return "Nothing was wrong: all ranks took the steps of the clean run."
    one = FOUND[drawn.number]
    place = "all ranks" if drawn.rank is None else f"rank {drawn.rank}"
    near = f" ({one.tolerance} more or less count, too)" if one.tolerance else ""
    about = f"It was {one.kind!r}, on {place}, from step {drawn.step} on{near}: the kind that {BRANCHES[one.branch]}."
    return f"{about} case.{one.look}() shows it; the cure is {one.cure!r}."


BRANCHES = {"hangs": "hangs", "slow": "is slow", "wrong": "gives wrong numbers", "dead": "ends a process"}
