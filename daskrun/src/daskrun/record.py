"""What jobs have done so far, for whoever looks at them: plain data without Dask, which `scheduler` is told and `page`
shows.

It is bounded: ENDED jobs beside those that run, of each the last ROWS rows, and texts of at most LONGEST characters.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from statistics import median_low
from typing import Any, NamedTuple

from daskrun.claims import Request, Worker
from daskrun.metrics import logged_in

ENDED, ROWS, LONGEST = 10, 2_000, 200
NAMES = 50  # metrics of one job that can be shown
RATE_S = 10  # over which a script's lines per second are counted
LATE = 3  # how many times as long as the others a rank has to be silent to be called late
OF_EACH_ROW = ("rank", "attempt", "time", "worker", "output")  # what rows hold beside metrics


@dataclass
class Rank:
    """One rank of a job's latest attempt.

    state: "starting", "started" (its function runs), "running" (it logs), "waits" (in a collective, as somebody who
    asked was told), "over", "failed", "dead" or "ended". step: that of its last row, else how many there were; last_at:
    when that came, or the rank began. values: the last of each metric. lines: (when, how many) of a script's output.
    """

    worker: Worker
    state: str = "starting"
    step: float = 0
    last_at: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    lines: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=100))
    last_line: str = ""

    @property
    def is_at_work(self) -> bool:
        """Whether the rank's function runs."""
        return self.state in ("started", "running", "waits")

    def lines_per_s(self, now: float) -> float:
        """Return how many lines a second its script has printed of late."""
        return sum(n for at, n in self.lines if now - at < RATE_S) / RATE_S


class Line(NamedTuple):
    """A rank, as it is shown.

    share: of the steps of the rank that is first. silent_s: seconds since its last row, while it is at work. is_late:
    whether that is LATE times as long as is usual, and more than seconds.
    """

    state: str
    step: float
    share: float
    silent_s: float | None
    is_late: bool
    value: float | None
    worker: str
    host: str
    printed: str


@dataclass
class JobRecord:
    """A job. since: when it was launched. attempt: from 1, of `attempts`. error: the first line; "" if there is none.

    rows: (when, attempt, rank, step, values) of each row of metrics.
    """

    name: str
    client: str
    since: float
    attempts: int
    attempt: int = 1
    state: str = "waiting for workers"
    error: str = ""
    ranks: list[Rank] = field(default_factory=list)
    rows: deque[tuple[float, int, int, float, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=ROWS))
    names: dict[str, None] = field(default_factory=dict)  # of metrics, as they were first seen
    deaths: list[tuple[int, int]] = field(default_factory=list)  # (attempt, rank)
    is_over: bool = False
    is_script: bool = False

    def shows(self, name: str, value: Any) -> bool:
        """Return whether a metric's value can be shown; its name is kept."""
        if name in OF_EACH_ROW or not isinstance(value, int | float) or not isfinite(value):
            return False
        if len(self.names) < NAMES and len(name) <= LONGEST:
            self.names.setdefault(name)
        return name in self.names

    def table(self, metric: str, now: float) -> list[Line]:
        """Return what to show of each rank, in their order, with the last value of a metric."""
        silent = [now - rank.last_at if rank.is_at_work else None for rank in self.ranks]
        usual = median_low([seconds for seconds in silent if seconds is not None] or [0.0])
        most = max((rank.step for rank in self.ranks), default=0) or 1
        return [
            Line(
                state=rank.state,
                step=rank.step,
                share=max(0.0, min(1.0, rank.step / most)),
                silent_s=seconds,
                is_late=seconds is not None and seconds > LATE * max(1.0, usual),
                value=rank.values.get(metric),
                worker=rank.worker.name or rank.worker.address,
                host=rank.worker.host,
                printed=f"{rank.lines_per_s(now):.1f} lines/s: {rank.last_line}" if rank.lines else "",
            )
            for rank, seconds in zip(self.ranks, silent, strict=True)
        ]

    def lines(self, metric: str, by_step: bool) -> list[tuple[int, int, list[float], list[float]]]:
        """Return (attempt, rank, xs, ys) of one metric, for each rank of each attempt that has logged it.

        xs: steps, or seconds since the launch.
        """
        points = [
            (attempt, rank, step if by_step else at - self.since, values[metric])
            for at, attempt, rank, step, values in self.rows
            if metric in values
        ]
        points.sort(key=lambda point: point[:2])
        found = []
        for (attempt, rank), group in groupby(points, key=lambda point: point[:2]):
            _, _, xs, ys = zip(*group, strict=True)
            found.append((attempt, rank, list(xs), list(ys)))
        return found


class Record:
    """The jobs of a cluster, by their ids. `now` is in seconds, and its clock is one for all calls."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self.version = 0  # grows with each change

    def in_order(self) -> list[tuple[str, JobRecord]]:
        """Return (id, job) of those that run, and then of those that are over, the newest first."""
        return sorted(reversed(self.jobs.items()), key=lambda item: item[1].is_over)

    def wants(self, request: Request, now: float) -> None:
        """A job asks for workers: it is new, or one of its ranks has died."""
        self.version += 1
        job = self.jobs.get(request.job)
        if job is None:
            name = request.job.rpartition("-")[0][:LONGEST]
            job = self.jobs[request.job] = JobRecord(name, request.client, now, request.attempts)
        if job.state != "waiting for workers":
            job.state, job.attempt = "waiting for workers", request.attempt + 1

    def begins(self, job_id: str, workers: Sequence[Worker], now: float) -> None:
        """A job has these workers, in rank order."""
        self.version += 1
        job = self.jobs[job_id]
        job.state, job.ranks = "starting", [Rank(worker, last_at=now) for worker in workers]

    def hear(self, kind: str, job_id: str, about: Sequence[Any], now: float) -> None:
        """Take what a rank logs, and what is said of its worker: kinds are those of `rank` and `scheduler`."""
        job = self.jobs.get(job_id)
        if job is None or job.is_over:
            return
        self.version += 1
        if kind == "gone":
            self._dies(job, about[0])
        elif kind == "row":
            row = about[0]
            if row.get("attempt") == job.attempt - 1 and row["rank"] < len(job.ranks):
                self._logs(job, row, now)
        elif about[0] == job.attempt - 1 and about[1] < len(job.ranks):
            rank = job.ranks[about[1]]
            rank.state, rank.last_at = {"began": "started", "failed": "failed"}.get(kind, rank.state), now
            if all(rank.is_at_work for rank in job.ranks):
                job.state = "running"

    def returns(self, job_id: str, attempt: int, number: int) -> None:
        """A rank has returned."""
        job = self.jobs.get(job_id)
        if job is None or attempt != job.attempt - 1 or number >= len(job.ranks):
            return
        self.version += 1
        job.ranks[number].state = "over"
        if all(rank.state == "over" for rank in job.ranks):
            job.state = "fetching its results"

    def waits(self, job_id: str, ranks: Sequence[int]) -> None:
        """Somebody who asked was told that these ranks wait for others; each does until it logs again."""
        self.version += 1
        for number, rank in enumerate(self.jobs[job_id].ranks):
            if rank.is_at_work and number in ranks:
                rank.state = "waits"

    def ends(self, job_id: str, error: str, again: bool = False) -> None:
        """An attempt is over. error: as text, "" for none. again: the next one follows."""
        job = self.jobs.get(job_id)
        if job is None or job.is_over:
            return
        self.version += 1
        for rank in job.ranks:
            if rank.is_at_work or rank.state == "starting":
                rank.state = "ended" if error or again else "over"
        job.error = "" if not error else error.splitlines()[0][:LONGEST]
        job.state = "ending its ranks" if again else "failed" if error else "finished"
        job.is_over = not again
        over = [name for name, other in self.jobs.items() if other.is_over]
        for name in over[:-ENDED]:
            del self.jobs[name]

    def loses(self, client: str) -> None:
        """A client is gone, and with it its jobs."""
        for name, job in list(self.jobs.items()):
            if job.client == client:
                self.ends(name, "Its client is gone.")

    def _dies(self, job: JobRecord, process: str) -> None:
        for number, rank in enumerate(job.ranks):
            if rank.worker.process == process and (rank.is_at_work or rank.state == "starting"):
                rank.state = "dead"
                job.deaths.append((job.attempt, number))

    def _logs(self, job: JobRecord, row: Mapping[str, Any], now: float) -> None:
        rank = job.ranks[row["rank"]]
        rank.last_at = now
        if rank.is_at_work:
            rank.state = "running"
        found = [row]
        if output := row.get("output"):
            job.is_script = True
            rank.lines.append((now, len(output)))
            rank.last_line = output[-1][1][:LONGEST]
            found = [logged for _, line in output if (logged := logged_in(line))]
        for values in found:
            numbers = {name: value for name, value in values.items() if job.shows(name, value)}
            rank.step = numbers.get("step", rank.step + 1)
            rank.values |= numbers
            if numbers:
                job.rows.append((now, job.attempt, row["rank"], rank.step, numbers))
