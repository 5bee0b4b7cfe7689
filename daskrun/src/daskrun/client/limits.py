"""The options of a job, as its user has set them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dask.utils import parse_timedelta


@dataclass
class Limits:
    """The options of a job: see `launch`. Durations become seconds.

    Raises:
        ValueError: For an invalid one.
    """

    n_workers: int | tuple[int, int] | None = None
    workers: str | Sequence[str | int] | None = None
    time_limit: Any = None
    max_restarts: int = 0
    retry: type[BaseException] | Sequence[type[BaseException]] = ()
    wait_for_workers: Any = 0
    wait_for_successors: Any = 30
    stall_after: Any = 300
    shutdown_timeout: Any = 30
    start_method: str | None = None
    virtual_local_rank: bool = False
    debug: str | None = None
    debug_timeout: Any = 600

    def __post_init__(self) -> None:
        n = self.n_workers
        self.fewest, self.most = n if isinstance(n, tuple) else (n, n)
        if n is not None and not 1 <= self.fewest <= self.most:  # type: ignore[operator]
            raise ValueError(f"n_workers is {n!r}: give at least 1, a pair (fewest, most), or None for all workers.")
        named = self.workers.split(",") if isinstance(self.workers, str) else self.workers or ()
        self.names = tuple(map(str, named))
        if self.workers is not None and not self.names:
            raise ValueError(f"workers is {self.workers!r}: name some, or leave it out for all.")
        self.retried = (self.retry,) if isinstance(self.retry, type) else tuple(self.retry)
        if self.max_restarts < bool(self.retried):
            raise ValueError(f"max_restarts is {self.max_restarts!r}: give 0 or more; with retry, 1 or more.")
        if self.start_method not in (None, "fork", "spawn"):
            raise ValueError(f"start_method is {self.start_method!r}: write 'fork' or 'spawn', or leave it out.")
        if self.debug not in (None, "error"):
            raise ValueError(f"debug is {self.debug!r}: write 'error', or leave it out.")
        durations = "time_limit", "wait_for_workers", "wait_for_successors", "stall_after", "shutdown_timeout"
        for name in (*durations, "debug_timeout"):
            if getattr(self, name) is not None:
                setattr(self, name, seconds(name, getattr(self, name)))


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
