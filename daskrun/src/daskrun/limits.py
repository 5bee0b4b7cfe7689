"""What a job may take, as its user has set it."""

from numbers import Integral, Real
from typing import Any, NamedTuple


class Limits(NamedTuple):
    """What a job may take: see `launch`. fewest, most: of its n_workers, None for all of a kind.

    shutdown_timeout: seconds that scripts have to end after SIGTERM; 0 for functions, which cannot be told.
    """

    fewest: int | None = None
    most: int | None = None
    timeout: float | None = None
    max_restarts: int = 0
    wait_for_workers: float = 0
    wait_for_successors: float = 30
    stall_after: float | None = None
    shutdown_timeout: float = 0


def limits(
    n_workers: int | tuple[int, int] | None,
    timeout: float | None,
    max_restarts: int,
    stall_after: float | None = None,
    **waits: Any,
) -> Limits:
    """Return the limits of a job; raise ValueError for one that cannot be. All is as in `daskrun.launch`."""
    pair = n_workers if isinstance(n_workers, tuple) else (n_workers, n_workers)
    whole = len(pair) == 2 and all(isinstance(number, Integral) and number is not True for number in pair)
    if whole and 1 <= pair[1] < pair[0]:  # type: ignore[operator]
        raise ValueError(f"n_workers is {n_workers!r}: the fewest come first, as in {pair[::-1]!r}.")
    if n_workers is not None and not (whole and min(pair) >= 1):  # type: ignore[type-var, operator]
        raise ValueError(
            f"n_workers is {n_workers!r}: give a whole number of at least 1, a pair (fewest, most) of them, or None "
            "for all workers."
        )
    for name, value in (("timeout", timeout), ("stall_after", stall_after)):
        if value is not None and not (_is_seconds(value) and value > 0):
            raise ValueError(f"{name} is {value!r}: give seconds, or None for no limit.")
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts!r}: give a whole number of at least 0.")
    for name, seconds in waits.items():
        if not (_is_seconds(seconds) and seconds >= 0):
            raise ValueError(f"{name} is {seconds!r}: give seconds, 0 not to wait.")
    return Limits(*pair, timeout=timeout, max_restarts=max_restarts, stall_after=stall_after, **waits)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
