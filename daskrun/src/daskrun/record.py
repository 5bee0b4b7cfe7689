"""What jobs have done so far: plain data without Dask, which `scheduler` is told and `page` shows.

It is bounded: ENDED jobs beside those that run; of each metric about POINTS points, in the last ATTEMPTS attempts;
texts of at most LONGEST characters, errors of ERROR.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import inf, isfinite
from statistics import median_low
from typing import Any

from daskrun.claims import Request, Worker
from daskrun.errors import ranks_do
from daskrun.progress import LATE, Line, Rank
from daskrun.protocol import Event
from daskrun.series import Lines, Moment, Point, Series

ENDED, LONGEST, ERROR = 10, 200, 600
POINTS, OF_A_LINE, ATTEMPTS = 2_000, 50, 10  # each line has some, however many there are
NAMES = 50  # metrics of one job that can be shown
ENDING = "ending its ranks"
OF_EACH_ROW = ("rank", "attempt", "time", "worker", "step")  # what rows hold beside metrics


@dataclass
class JobRecord:
    """A job. since, launched: when that was, by two clocks. attempt: from 0, of `attempts`. wanted: the one that asks.
    error: its first line, of the last attempt that ended with one; "" if none did.

    curves: of each metric, the Series of each (attempt, rank). waiting: ranks that wait in a collective; mute: those
    that do not answer; both as somebody who asked was told, until one of them logs, or the attempt ends. starts: the
    first step and the time of attempts; deaths: of ranks. stopped_by: the signal that its user had passed on to its
    scripts, such as "SIGINT".
    """

    name: str
    client: str
    since: float
    attempts: int
    attempt: int = 0
    wanted: int = 0
    state: str = "waiting for workers"
    error: str = ""
    ranks: list[Rank] = field(default_factory=list)
    curves: dict[str, dict[tuple[int, int], Series]] = field(default_factory=lambda: defaultdict(dict))
    names: dict[str, None] = field(default_factory=dict)  # of metrics, as they were first seen
    has_steps: bool = False  # whether a rank has logged one
    starts: dict[int, Moment] = field(default_factory=dict)  # of attempts
    deaths: dict[tuple[int, int], Moment] = field(default_factory=dict)  # of (attempt, rank)
    waiting: frozenset[int] = frozenset()
    mute: frozenset[int] = frozenset()
    stopped_by: str = ""
    is_over: bool = False
    has_output: bool = False
    launched: datetime = field(default_factory=datetime.now)

    @property
    def unit(self) -> str:
        """What its ranks' steps are: "step", or "row" where none is logged and rows are counted."""
        return "step" if self.has_steps else "row"

    @property
    def is_finished(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_over and self.state.startswith("finished")

    @property
    def error_is_old(self) -> bool:
        """Whether its error is that of an attempt before, and not why it has ended."""
        return not self.is_over or self.is_finished or self.state == "cancelled"

    @property
    def doing(self) -> str:
        """Its state, and where it ends its ranks, which of them were the first to end."""
        for state, ended in (("dead", "died"), ("failed", "failed")):
            those = [number for number, rank in enumerate(self.ranks) if rank.state == state]
            if those and self.state == ENDING:
                return f"{ranks_do(those, 'has', 'have')} {ended}; {ENDING}"
        return self.state

    def gone_on(self, waiting: frozenset[int], since: float) -> list[int]:
        """Return the ranks that have logged or printed something since; none while all that waited still do."""
        ranks = [number for number, rank in enumerate(self.ranks) if rank.has_gone_on(since)]
        return ranks if not waiting or waiting.intersection(ranks) else []

    def shows(self, name: str, value: Any) -> bool:
        """Return whether a metric's value can be shown; its name is kept."""
        if name in OF_EACH_ROW or not isinstance(value, int | float):
            return False
        if len(self.names) < NAMES and len(name) <= LONGEST:
            self.names.setdefault(name)
        return name in self.names

    def table(self, metric: str, now: float) -> list[Line]:
        """Return what to show of each rank, in their order, with the last value of a metric."""
        silent = [rank.silent_s(now) for rank in self.ranks]
        nobody_logs = all(rank.last_at is None for rank in self.ranks)
        known = [(rank, seconds) for rank, seconds in zip(self.ranks, silent, strict=True) if seconds is not None]
        all_hang = all(rank.hangs(seconds) for rank, seconds in known)
        usual = median_low([seconds for rank, seconds in known if rank.step is not None] or [0.0])

        def is_late(rank: Rank, seconds: float | None) -> bool:
            if seconds is None or rank.step is None:  # lines that a rank prints need not go on while others' do
                return seconds is not None and all_hang
            return rank.hangs(seconds) or seconds > LATE * max(1.0, usual)

        most = max((rank.step or 0 for rank in self.ranks), default=0)
        return [
            Line(
                state=self._shown_state(number),
                step=rank.step,
                share=max(0.0, (rank.step or 0) / most) if most > 0 else 0.0,
                silent_s=seconds,
                is_late=is_late(rank, seconds),
                ago_s=rank.ago_s(now, nobody_logs),
                value=rank.values.get(metric),
                cpu=rank.cpu if rank.is_at_work else None,
                memory_bytes=rank.memory_bytes if rank.is_at_work else None,
                worker=rank.worker,
                printed=rank.last_line,
            )
            for number, (rank, seconds) in enumerate(zip(self.ranks, silent, strict=True))
        ]

    def is_silent(self, now: float) -> bool:
        """Return whether all ranks that are at work, and that have an age, are late."""
        at_work = [line.is_late for line in self.table("", now) if line.silent_s is not None]
        return bool(at_work) and all(at_work)

    def _shown_state(self, number: int) -> str:
        state, is_at_work = self.ranks[number].state, self.ranks[number].is_at_work
        if state == "failed" and self.state == ENDING and any(rank.state == "dead" for rank in self.ranks):
            return "stopped"  # in a collective with the rank that has died, it seems
        if is_at_work and number in self.mute:
            return "does not answer"
        if not (self.waiting and is_at_work):
            return state
        return "waits" if number in self.waiting else "does not wait"

    def stride(self, metric: str) -> int:
        """Return of how many rows one is kept, in the line where that is most."""
        return max((series.stride for series in self.curves.get(metric, {}).values()), default=1)

    def lines(self, metric: str, by_step: bool) -> Lines:
        """Return (attempt, rank, xs, ys) of one metric, for each rank of each attempt that has logged it.

        xs: steps, or seconds since the launch. ys: see `Series.line`.
        """
        of_ranks = sorted(self.curves.get(metric, {}).items())
        return [(attempt, rank, *series.line(by_step, self.since)) for (attempt, rank), series in of_ranks]


class Record:
    """The jobs of a cluster, by their ids. `now` is in seconds, and its clock is one for all calls."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self.version = 0  # grows with each change

    def in_order(self) -> list[tuple[str, JobRecord]]:
        """Return (id, job): those that have ranks, those that wait for them, those that are over; the newest first."""
        return sorted(reversed(self.jobs.items()), key=lambda item: (item[1].is_over, not item[1].ranks))

    def newest(self) -> str:
        """Return the id of the job that was launched last, of those that have had ranks; it may be over."""
        with_ranks = [name for name, job in self.jobs.items() if job.ranks]
        return (with_ranks or list(self.jobs))[-1]

    def wants(self, request: Request, now: float) -> None:
        """A job asks for workers: it is new, or one of its ranks has died."""
        self.version += 1
        job = self.jobs.get(request.job)
        if job is None:
            name = _shortened(request.job.rpartition("-")[0])
            job = self.jobs[request.job] = JobRecord(name, request.client, now, request.attempts)
        if job.state != "waiting for workers" and not job.is_over:
            job.state, job.wanted = "waiting for workers", request.attempt

    def begins(self, job_id: str, workers: Sequence[Worker]) -> None:
        """A job has these workers, in rank order."""
        self.version += 1
        if (job := self.jobs.get(job_id)) and not job.is_over:
            job.state, job.attempt = "starting", job.wanted
            job.ranks, job.waiting, job.mute = [Rank(worker) for worker in workers], frozenset(), frozenset()
            too_old = job.attempt - ATTEMPTS
            job.starts.pop(too_old, None)
            job.deaths = {whose: death for whose, death in job.deaths.items() if whose[0] > too_old}
            for lines in job.curves.values():
                for line in [line for line in lines if line[0] <= too_old]:
                    del lines[line]

    def hear(self, kind: str, job_id: str, about: Sequence[Any], now: float) -> None:
        """Take what a rank logs, and what is said of its worker: kinds are those of `rank` and `scheduler`."""
        job = self.jobs.get(job_id)
        if job is None or job.is_over:
            return
        self.version += 1
        if kind == Event.GONE:
            for number, rank in enumerate(job.ranks):
                if rank.worker.process == about[0] and (rank.is_at_work or rank.state == "starting"):
                    self._dies(job, number, now)
        elif kind == Event.ROW:
            row = about[0]
            if row.get("attempt") == job.attempt and row["rank"] < len(job.ranks):
                self._logs(job, row, now)
        elif kind != Event.NOTICE and about[0] == job.attempt and about[1] < len(job.ranks):
            rank = job.ranks[about[1]]
            if kind == Event.OUTPUT:
                job.has_output = True
                self._sends(job, about[1], now).last_line = _shortened(about[2][-1][1])
            elif kind == Event.USAGE:
                rank.cpu, rank.memory_bytes = about[2:]
            elif kind == Event.BEGAN and rank.state == "starting":
                rank.state, rank.begun_at = "running", now
                job.starts.setdefault(job.attempt, Moment(None, now))
                if all(rank.state != "starting" for rank in job.ranks):
                    job.state = "running"
            elif kind == Event.FAILED:
                rank.state, job.state = "stopped" if job.stopped_by else "failed", ENDING
            elif kind == Event.DIED:
                self._dies(job, about[1], now)

    def stops(self, job_id: str, signal: str) -> None:
        """A job's user has a signal passed on to its scripts: no rank that then ends has failed."""
        if (job := self.jobs.get(job_id)) and not job.is_over:
            self.version += 1
            job.stopped_by, job.state = signal, ENDING

    def returns(self, job_id: str, attempt: int, number: int) -> None:
        """A rank has returned."""
        job = self.jobs.get(job_id)
        if job is None or attempt != job.attempt or number >= len(job.ranks):
            return
        self.version += 1
        if not job.ranks[number].is_at_work:  # it has failed, or died
            return
        job.ranks[number].state = "finished"
        if all(rank.state == "finished" for rank in job.ranks):
            job.state = "fetching its results"

    def waits(self, job_id: str, attempt: int, waiting: frozenset[int], mute: frozenset[int], since: float) -> None:
        """Somebody who asked at a time was told that ranks of an attempt wait for others, or do not answer."""
        job = self.jobs.get(job_id)
        if job and job.attempt == attempt:
            self.version += 1
            is_old = any(job.ranks[number].has_gone_on(since) for number in waiting | mute)
            job.waiting, job.mute = (frozenset(), frozenset()) if is_old else (waiting, mute)

    def ends(self, job_id: str, error: str, again: bool = False) -> None:
        """An attempt is over. error: as text, "" for none. again: the next one follows."""
        job = self.jobs.get(job_id)
        if job is None or job.is_over:
            return
        self.version += 1
        for rank in job.ranks:
            lost_another = rank.state == "failed" and error.startswith("WorkerDied")  # in a collective with it
            if rank.is_at_work or rank.state == "starting" or lost_another:
                rank.state = "stopped" if error or again else "finished"
        how = "cancelled" if error.startswith("CancelledError") else "failed" if error else "finished"
        if how == "failed":  # else the error of an attempt before stays
            failed = [number for number, rank in enumerate(job.ranks) if rank.state == "failed"]
            whose = f"rank {failed[0]}: " if len(failed) == 1 and "Rank " not in error else ""
            job.error = whose + _shortened(error.splitlines()[0], ERROR)
        if job.stopped_by:
            how = f"stopped by {job.stopped_by}" if error else f"finished after {job.stopped_by}"
        job.state, job.waiting, job.mute = ENDING if again else how, frozenset(), frozenset()
        job.is_over = not again
        over = [name for name, other in self.jobs.items() if other.is_over]
        for name in over[:-ENDED]:
            del self.jobs[name]

    def loses(self, client: str) -> None:
        """A client is gone, and with it its jobs."""
        for name, job in list(self.jobs.items()):
            if job.client == client:
                self.ends(name, "Its client is gone.")

    def _dies(self, job: JobRecord, number: int, now: float) -> None:
        rank = job.ranks[number]
        rank.state, job.state = "dead", ENDING
        job.deaths[job.attempt, number] = Moment(rank.step, now)

    def _sends(self, job: JobRecord, number: int, now: float) -> Rank:
        """A rank has logged or printed something."""
        rank = job.ranks[number]
        if number in job.waiting | job.mute or not job.waiting:
            job.waiting = job.mute = frozenset()
        if rank.last_at is not None:  # its first row is late where it loads what it needs
            rank.longest_s = max(rank.longest_s or 0.0, now - rank.last_at)
        rank.last_at = now
        return rank

    def _logs(self, job: JobRecord, row: Mapping[str, Any], now: float) -> None:
        rank: Any = self._sends(job, row["rank"], now)
        if _is_finite(row.get("step")):
            rank.step, rank.has_steps, job.has_steps = row["step"], True, True
        elif not rank.has_steps:
            rank.step = (rank.step or 0) + 1
        at = rank.logged_at(row["time"], now) if _is_finite(row.get("time")) else now
        if rank.first_step is None and rank.has_steps == job.has_steps:
            rank.first_step = rank.step
            start = job.starts.get(job.attempt, Moment(None, at))
            firsts = [rank.step] if start.step is None else [rank.step, start.step]
            job.starts[job.attempt] = start._replace(step=min(firsts))
        numbers = {name: _as_float(value) for name, value in row.items() if job.shows(name, value)}
        rank.values |= numbers
        for name, value in numbers.items():
            lines = job.curves[name]
            series = lines.setdefault((job.attempt, row["rank"]), Series())
            series.add(Point(rank.step, at, value), max(OF_A_LINE, POINTS // len(lines)))


def _shortened(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 2]} …"


def _as_float(value: float) -> float:
    """Return a number as a float: infinity for an int that is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(_as_float(value))
