"""How far one rank is, and for how long it has been silent."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from daskrun.claims import Worker

HANGS = 10  # seconds
LATE = 3  # how many times as long as the others a rank has to be silent to be called late


@dataclass
class Rank:
    """One rank of a job's latest attempt.

    state: "starting", "running", "finished", "failed", "dead" or "stopped". step: the last that it has logged, or how
    many rows of metrics if it logs none; None before the first. first_step: of this attempt. begun_at: when its
    function began. last_at: when its last row came, None if it has logged nothing; longest_s: the longest time from one
    row to the next. values: the last of each metric. last_line: of its output. cpu: cores in use. last_own, delay_s:
    see `logged_at`.
    """

    worker: Worker
    state: str = "starting"
    step: float | None = None
    has_steps: bool = False
    first_step: float | None = None
    begun_at: float | None = None
    last_at: float | None = None
    longest_s: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    last_line: str = ""
    cpu: float | None = None
    memory_bytes: int | None = None
    last_own: float = -inf
    delay_s: float = inf

    def logged_at(self, own: float, now: float) -> float:
        """Return when a row that has come now was logged. own: the same by the rank's clock.

        By what the two clocks differ is not known: the row with the shortest delay so far is taken for one without.
        """
        if own < self.last_own - 1:  # its clock was put back
            self.delay_s = inf
        delay_s = now - own
        self.last_own, self.delay_s = own, min(self.delay_s, delay_s)
        return now - (delay_s - self.delay_s)

    @property
    def is_at_work(self) -> bool:
        """Whether the rank's function runs."""
        return self.state == "running"

    def has_gone_on(self, since: float) -> bool:
        """Return whether it has logged or printed something since."""
        return self.last_at is not None and self.last_at > since

    def silent_s(self, now: float) -> float | None:
        """Return the seconds since its last row, while it is at work.

        None for one that has not logged twice: it may have nothing more to say, as where rank 0 alone logs.
        """
        if self.last_at is None or self.longest_s is None or not self.is_at_work:
            return None
        return now - self.last_at

    def ago_s(self, now: float, nobody_logs: bool) -> float | None:
        """Return the seconds since its last row, while it is at work; since it began where nobody has logged so far."""
        begin = self.begun_at if nobody_logs else self.last_at
        return None if begin is None or not self.is_at_work else now - begin

    def hangs(self, silent_s: float) -> bool:
        """Return whether it has been silent for long, for this rank."""
        return self.longest_s is not None and silent_s > max(HANGS, LATE * self.longest_s)


class Line(NamedTuple):
    """A rank, as it is shown.

    share: of the steps of the rank that is first. silent_s: seconds since its last row, while it is at work; None
    before the second one. is_late: whether that is more than LATE times what is usual among those that log metrics, and
    more than LATE seconds; or, as where all hang, more than LATE times the longest so far, and more than HANGS seconds.
    One that only prints is late where all hang. ago_s: see `Rank.ago_s`. cpu: cores that it uses.
    """

    state: str
    step: float | None
    share: float
    silent_s: float | None
    is_late: bool
    ago_s: float | None
    value: float | None
    cpu: float | None
    memory_bytes: int | None
    worker: Worker
    printed: str
