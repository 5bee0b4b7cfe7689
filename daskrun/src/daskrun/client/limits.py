"""The options of a job, as its user has set them."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from dask.utils import parse_timedelta


class Limits(NamedTuple):
    """The options of a job: see `launch`. fewest, most: of its n_workers, None for all."""

    fewest: int | None = None
    most: int | None = None
    workers: tuple[str, ...] = ()
    time_limit: float | None = None
    max_restarts: int = 0
    retry: tuple[type[BaseException], ...] = ()
    wait_for_workers: float = 0
    wait_for_successors: float = 30
    stall_after: float | None = 300
    shutdown_timeout: float = 30
    start_method: str | None = None
    virtual_local_rank: bool = False


def limits(
    n_workers: int | tuple[int, int] | None,
    time_limit: float | str | None,
    max_restarts: int,
    stall_after: float | str | None,
    *,
    workers: str | Sequence[str] = (),
    retry: type[BaseException] | Sequence[type[BaseException]] = (),
    start_method: str | None = None,
    virtual_local_rank: bool = False,
    **waits: float | str,
) -> Limits:
    """Return the options of a job; raise ValueError for an invalid one. See `launch`."""
    fewest, most = n_workers if isinstance(n_workers, tuple) else (n_workers, n_workers)
    if n_workers is not None and not 1 <= fewest <= most:  # type: ignore[operator]
        raise ValueError(
            f"n_workers is {n_workers!r}: give at least 1, a pair (fewest, most), or None for all workers."
        )
    kinds = (retry,) if isinstance(retry, type) else tuple(retry)
    if max_restarts < bool(kinds):
        raise ValueError(f"max_restarts is {max_restarts!r}: give 0 or more; with retry, 1 or more.")
    if start_method not in (None, "fork", "spawn"):
        raise ValueError(f"start_method is {start_method!r}: write 'fork' or 'spawn', or leave it out.")
    return Limits(
        fewest,
        most,
        (workers,) if isinstance(workers, str) else tuple(workers),
        time_limit=None if time_limit is None else seconds("time_limit", time_limit),
        stall_after=None if stall_after is None else seconds("stall_after", stall_after) or None,
        max_restarts=max_restarts,
        retry=kinds,
        start_method=start_method,
        virtual_local_rank=virtual_local_rank,
        **{name: seconds(name, value) for name, value in waits.items()},  # type: ignore[arg-type]
    )


def seconds(name: str, value: Any) -> float:
    """Return a duration in seconds, of a number or a text such as "10 min". Raises ValueError."""
    try:
        text = re.sub(r"(?i)\bmins?$|(?<=\d)mins?$", "m", str(value).strip())  # which Dask lacks
        found = float(parse_timedelta(text))
    except (ValueError, KeyError):
        found = -1
    if not found >= 0:
        raise ValueError(f"{name} is {value!r}: give seconds, 0 or more, or a text such as '10 min'.")
    return found
