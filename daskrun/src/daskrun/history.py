"""What jobs have done so far: plain data, which the scheduler's plugin is told and the dashboard's page shows.

It's bounded: ENDED jobs beside those that run; about POINTS points of a metric, in the last ATTEMPTS attempts; NAMES
metrics; texts of at most LONGEST characters.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from daskrun.claims import Request, Worker
from daskrun.protocol import Event, JobState, RankState

ENDED, ATTEMPTS, POINTS, OF_A_LINE, NAMES, LONGEST = 10, 10, 2_000, 50, 50, 500
OF_EACH_ROW = ("rank", "attempt", "time", "worker", "step")  # what rows hold beside metrics
HANGS_S, LATE = 10, 3  # a rank is late after so many seconds, and so many times its longest silence so far


class Point(NamedTuple):
    """A value of a metric. step: The last one that its rank has logged, or how many rows if it logs no steps."""

    step: float
    value: float


@dataclass
class Line:
    """A metric of one rank in one attempt: the first point, one of every `stride`, and the last."""

    stride: int = 1
    n_points: int = 0
    kept: list[Point] = field(default_factory=list)
    last: Point | None = None

    def add(self, point: Point, most: int) -> None:
        """Add a point, and keep so many at most."""
        if self.n_points % self.stride == 0:
            self.kept.append(point)
        self.last = point
        self.n_points += 1
        while len(self.kept) > most:
            self.kept, self.stride = self.kept[::2], 2 * self.stride

    @property
    def points(self) -> list[Point]:
        """What is kept of it."""
        return self.kept if self.last is None or self.last is self.kept[-1] else [*self.kept, self.last]


@dataclass
class Rank:
    """A rank of a job's latest attempt.

    Attributes:
        step: As in `Point`.
        heard_at: When it last logged or printed something, or began.
        longest_s: The longest time between two rows, None before the second.
        values: The last of each metric.
        cpu: Cores in use.
    """

    worker: Worker
    state: RankState = RankState.STARTING
    step: float = 0
    logs_steps: bool = False
    heard_at: float | None = None
    n_rows: int = 0
    longest_s: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    last_line: str = ""
    cpu: float | None = None
    memory_bytes: int | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether it's starting or running."""
        return self.state in (RankState.STARTING, RankState.RUNNING)

    def silent_s(self, now: float) -> float | None:
        """Return for how many seconds it has been silent, while it runs."""
        return None if self.heard_at is None or self.state is not RankState.RUNNING else now - self.heard_at

    def is_late(self, now: float) -> bool:
        """Return whether it has been silent for longer than it ever was."""
        silent_s = self.silent_s(now)
        return silent_s is not None and self.longest_s is not None and silent_s > max(HANGS_S, LATE * self.longest_s)

    def heard(self, now: float, is_row: bool) -> None:
        """Note that it has logged, or printed, something."""
        if self.n_rows and self.heard_at is not None:
            self.longest_s = max(self.longest_s or 0.0, now - self.heard_at)
        self.heard_at, self.n_rows = now, self.n_rows + is_row


@dataclass
class JobHistory:
    """A job.

    Attributes:
        n_heard: Messages, so that a page knows what's new.
        attempt: From 0.
        wanted: The attempt for which it asks for workers.
        error: Of the last attempt that ended with one.
        lines: Of each metric, by (attempt, rank).
        starts: The first step of attempts.
        deaths: The last step of (attempt, rank).
        signal: The one with which its user stopped it.
    """

    name: str
    client: str
    attempts: int
    attempt: int = 0
    wanted: int = 0
    state: JobState = JobState.WAITING
    error: str = ""
    signal: str = ""
    ranks: list[Rank] = field(default_factory=list)
    lines: dict[str, dict[tuple[int, int], Line]] = field(default_factory=lambda: defaultdict(dict))
    starts: dict[int, float] = field(default_factory=dict)
    deaths: dict[tuple[int, int], float] = field(default_factory=dict)
    n_heard: int = 0
    launched: datetime = field(default_factory=datetime.now)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED, JobState.STOPPED)


class History:
    """The jobs of a cluster, by id. `now` is in seconds, and its clock is one for all calls."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobHistory] = {}

    def asks(self, request: Request) -> None:
        """A job asks for workers: it's new, or one of its ranks has died."""
        job = self.jobs.setdefault(
            request.job,
            JobHistory(_shortened(request.job.rpartition("-")[0]), request.client, request.attempts),
        )
        if not job.is_over:
            job.state, job.wanted = JobState.WAITING, request.attempt

    def begins(self, job_id: str, workers: Sequence[Worker]) -> None:
        """A job has these workers, in rank order."""
        if job := self._running(job_id):
            job.state, job.attempt, job.ranks = JobState.STARTING, job.wanted, [Rank(worker) for worker in workers]
            too_old = job.attempt - ATTEMPTS
            job.starts.pop(too_old, None)
            job.deaths = {whose: death for whose, death in job.deaths.items() if whose[0] > too_old}
            for metric, lines in job.lines.items():
                job.lines[metric] = {whose: line for whose, line in lines.items() if whose[0] > too_old}

    def hears(self, kind: str, job_id: str, about: Sequence[Any], now: float) -> None:
        """Take a message about a job: see `Event`."""
        job = self._running(job_id)
        if job is None or kind in (Event.NOTICE, Event.CLOSED):
            return
        job.n_heard += 1
        if kind == Event.GONE:
            for number, rank in enumerate(job.ranks):
                if rank.worker.process == about[0] and rank.is_at_work:
                    _dies(job, number)
            return
        row = about[0] if kind == Event.ROW else {}
        attempt, number, *more = (row["attempt"], row["rank"]) if row else about
        if attempt != job.attempt or number >= len(job.ranks):
            return
        rank = job.ranks[number]
        if kind == Event.ROW:
            _logs(job, rank, row, now)
        elif kind == Event.OUTPUT:
            rank.heard(now, is_row=False)
            rank.last_line = _shortened(more[0][-1][1].decode(errors="replace"))
        elif kind == Event.USAGE:
            rank.cpu, rank.memory_bytes = more
        elif kind == Event.BEGAN and rank.state is RankState.STARTING:
            rank.state, rank.heard_at = RankState.RUNNING, now
            if all(rank.state is not RankState.STARTING for rank in job.ranks):
                job.state = JobState.RUNNING
        elif kind == Event.FAILED:
            rank.state = RankState.STOPPED if job.signal else RankState.FAILED
            job.state = JobState.ENDING
        elif kind == Event.DIED:
            _dies(job, number)

    def stops(self, job_id: str, signal: str) -> None:
        """A job's user stops it with a signal: no rank that ends from now on has failed."""
        if job := self._running(job_id):
            job.signal, job.state = signal, JobState.ENDING

    def returns(self, job_id: str, attempt: int, number: int) -> None:
        """A rank has returned."""
        job = self._running(job_id)
        if job and attempt == job.attempt and number < len(job.ranks) and job.ranks[number].is_at_work:
            job.ranks[number].state = RankState.FINISHED

    def ends(self, job_id: str, state: JobState, error: str = "") -> None:
        """An attempt is over. state: ENDING if the next one follows."""
        if not (job := self._running(job_id)):
            return
        for rank in job.ranks:
            if rank.is_at_work:
                rank.state = RankState.FINISHED if state is JobState.FINISHED else RankState.STOPPED
        job.state = state
        job.error = _shortened(error) or job.error
        for name in [name for name, other in self.jobs.items() if other.is_over][:-ENDED]:
            del self.jobs[name]

    def loses(self, client: str) -> None:
        """A client is gone, and with it its jobs."""
        for name, job in list(self.jobs.items()):
            if job.client == client:
                self.ends(name, JobState.FAILED, "Its client is gone.")

    def _running(self, job_id: str) -> JobHistory | None:
        job = self.jobs.get(job_id)
        return None if job is None or job.is_over else job


def _dies(job: JobHistory, number: int) -> None:
    job.ranks[number].state, job.state = RankState.DEAD, JobState.ENDING
    job.deaths[job.attempt, number] = job.ranks[number].step


def _logs(job: JobHistory, rank: Rank, row: dict[str, Any], now: float) -> None:
    rank.heard(now, is_row=True)
    step = _as_float(row.get("step"))
    rank.logs_steps |= step is not None
    rank.step = step if step is not None else rank.step if rank.logs_steps else rank.n_rows
    for name, value in row.items():
        number = None if name in OF_EACH_ROW or len(name) > LONGEST else _as_float(value)
        if number is not None and (name in job.lines or len(job.lines) < NAMES):
            rank.values[name] = number
            job.starts.setdefault(job.attempt, rank.step)
            lines = job.lines[name]
            line = lines.setdefault((job.attempt, row["rank"]), Line())
            line.add(Point(rank.step, number), max(OF_A_LINE, POINTS // len(lines)))


def _as_float(value: Any) -> float | None:
    """Return a number as a float, None for what is none, or too large for one."""
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
