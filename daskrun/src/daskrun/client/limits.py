"""The options of a job, as its user has set them."""

import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from dask.utils import parse_timedelta

TINY = 1e-300  # a duration that isn't 0
START_METHODS = (None, "fork", "spawn")


class Limits(NamedTuple):
    """The options of a job: see `launch`. fewest, most: of its n_workers, None for all of a kind."""

    fewest: int | None = None
    most: int | None = None
    time_limit: float | None = None
    max_restarts: int = 0
    retry: tuple[type[BaseException], ...] = ()
    wait_for_workers: float = 0
    wait_for_successors: float = 30
    stall_after: float | None = 300
    shutdown_timeout: float = 30
    starts_fresh: bool = False
    virtual_local_rank: bool = False


def limits(
    n_workers: int | tuple[int, int] | None,
    time_limit: float | str | None,
    max_restarts: int,
    stall_after: float | str | None,
    *,
    retry: type[BaseException] | Sequence[type[BaseException]] = (),
    start_method: str | None = None,
    virtual_local_rank: bool = False,
    **waits: float | str,
) -> Limits:
    """Return the options of a job; raise ValueError or TypeError for an invalid one. See `launch`."""
    pair = n_workers if isinstance(n_workers, tuple) else (n_workers, n_workers)
    whole = len(pair) == 2 and all(isinstance(number, Integral) and number is not True for number in pair)
    if whole and 1 <= pair[1] < pair[0]:  # type: ignore[operator]
        raise ValueError(f"n_workers is {n_workers!r}: the fewest come first, as in {pair[::-1]!r}.")
    if n_workers is not None and not (whole and min(pair) >= 1):  # type: ignore[type-var, operator]
        raise ValueError(
            f"n_workers is {n_workers!r}: give an integer of at least 1, a pair (fewest, most) of them, or None "
            "for all workers."
        )
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts!r}: give an integer of at least 0.")
    kinds = (retry,) if isinstance(retry, type) else tuple(retry)
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        raise TypeError(f"retry is {retry!r}: give exception types, such as (OSError,).")
    if kinds and not max_restarts:
        raise ValueError("retry has no effect with max_restarts=0: say how often, such as max_restarts=3.")
    if start_method not in START_METHODS:
        raise ValueError(f"start_method is {start_method!r}: write 'fork' or 'spawn', or leave it out.")
    return Limits(
        *pair,
        time_limit=None if time_limit is None else seconds("time_limit", time_limit, TINY),
        stall_after=None if stall_after is None else seconds("stall_after", stall_after, TINY),
        max_restarts=max_restarts,
        retry=kinds,
        starts_fresh=start_method == "spawn",
        virtual_local_rank=virtual_local_rank,
        **{name: seconds(name, value) for name, value in waits.items()},  # type: ignore[arg-type]
    )


def seconds(name: str, value: Any, least: float = 0) -> float:
    """Return a duration in seconds, of a number or a text such as "10 min". Raises ValueError."""
    found: Any = value
    if isinstance(value, str):
        try:
            found = parse_timedelta(re.sub(r"(?i)\bmins?$|(?<=\d)mins?$", "m", value.strip()))  # which Dask lacks
        except (ValueError, KeyError):
            found = None
    if not isinstance(found, Real) or isinstance(found, bool) or not float(found) >= least:
        more = "more than 0" if least else "0 or more"
        raise ValueError(f"{name} is {value!r}: give seconds, {more}, or a text such as '10 min'.")
    return float(found)
