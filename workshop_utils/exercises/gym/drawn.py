"""What a fault is, what a seed draws, and the table of faults that `faults` fills."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# The clean run: 3 epochs of 12 steps. A case resumes it after step 8.
EPOCHS, PER_EPOCH, SAVED_EVERY, RESUMED_AT = 3, 12, 4, 8
ANY_STEP = range(12, 31)
SHOWN_AT = {"read": "_read_from(", "send": "return _allreduce_fut", "batches": "return ["}
Piece = Callable[..., Any]  # a function of the training that a fault replaces


@dataclass(frozen=True)
class Drawn:
    """What is wrong in a case. number: of the fault, 0 for none. rank: None for all. step: the first that it spoils."""

    number: int
    rank: int | None = None
    step: int | None = None


@dataclass(frozen=True)
class Fault:
    """A fault as an attendee names it.

    kind: its name. branch: "hangs", "slow", "wrong" or "dead". piece: what it changes. at: text of the line of that
    piece where stacks show the replacement. look: what shows it best. cure: what undoes it. ranks, steps: to draw from.
    tolerance: steps by which an answer may differ. alike: another kind that looks the same, and counts, too.
    """

    kind: str
    branch: str
    piece: str
    at: str
    look: str
    cure: str
    ranks: tuple[int | None, ...]
    steps: Sequence[int]
    tolerance: int
    alike: str
    make: Callable[[Any, Piece], Piece]


FOUND: dict[int, Fault] = {}  # by number, from 1


def fault(
    kind: str,
    branch: str,
    *,
    piece: str,
    at: str = "",
    look: str,
    cure: str,
    ranks: tuple[int | None, ...] = (0, 1),
    steps: Sequence[int] = ANY_STEP,
    tolerance: int = 1,
    alike: str = "",
) -> Callable:
    """Decorate the next fault. The arguments are the fields of `Fault`; `at` has a default for most pieces."""

    def keep(make: Callable[[Any, Piece], Piece]) -> Callable:
        shown = at or SHOWN_AT[piece]
        FOUND[len(FOUND) + 1] = Fault(kind, branch, piece, shown, look, cure, ranks, steps, tolerance, alike, make)
        return make

    return keep
