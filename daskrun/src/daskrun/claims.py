"""Who owns which worker: the table that all jobs of a cluster share.

It is plain data without Dask: `scheduler` keeps the one table of a cluster and tells it what the workers do.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from daskrun.errors import JobError, WorkersBusy, listed

SUCCESSOR_S = 30.0  # how long a launch waits for the successor of a worker that has died


@dataclass(frozen=True)
class Worker:
    """What the scheduler knows of a worker.

    process: an id that its successor does not share. slot: its nanny's address, which its successor does share; its own
    without a nanny. status: Dask's, such as "running" or "paused". memory: for a message. tasks: names of those that
    the scheduler has given it.
    """

    address: str
    process: str
    slot: str
    host: str
    name: str
    status: str = "running"
    memory: str = ""
    tasks: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What a job may call it."""
        return self.address, self.name, self.host, self.slot


@dataclass(frozen=True)
class Request:
    """Which workers a job wants.

    Attributes:
        client: Its id; a job ends with its client.
        fewest, most: How many; None for all.
        among: Addresses, names, hosts or slots of those that it may have, none for any.
        attempt: From 0, of at most `attempts`.
        stuck: Why a worker can't be had, though the scheduler takes it for idle, by address.
    """

    job: str
    client: str
    fewest: int | None = None
    most: int | None = None
    among: tuple[str, ...] = ()
    attempt: int = 0
    attempts: int = 1
    stuck: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Claimed:
    """The job owns these workers, in rank order."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class Denied:
    """The job gets no worker now. may_change: workers that it needs are starting."""

    error: JobError
    may_change: bool = False


@dataclass
class _Slot:
    """A worker's place, which its successor takes over: the job that owns it, and in which attempt, None between two.

    begun: whether the job's rank has begun there. is_ending: whether the job is over, and its rank is being ended.
    """

    job: str
    client: str
    worker: Worker
    attempt: int | None
    begun: bool = False
    is_ending: bool = False


class Claims:
    """Each slot that is not free. Times are seconds on one clock."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        self._lost: dict[str, float] = {}  # slots whose worker has died, and when

    def claim(self, request: Request, workers: Sequence[Worker], now: float) -> Claimed | Denied:
        """Make idle workers the job's own, by host and name; or say why not, and change nothing.

        workers: all of the cluster.
        """
        ready = [worker for worker in workers if worker.status != "init"]
        there = {worker.slot for worker in ready}
        self._lost = {slot: at for slot, at in self._lost.items() if slot not in there and now < at + SUCCESSOR_S}
        present = [one for one in ready if not request.among or {*request.among} & {*one.names}]
        wanted = request.fewest or len(present)
        reasons = {worker.address: self._unfit(worker, request) for worker in present}
        idle = sorted((worker for worker in present if not reasons[worker.address]), key=_by_host_and_name)
        starting = [*self._lost, *(worker.slot for worker in workers if worker.status == "init")]
        if starting and (request.fewest is None or len(idle) < wanted):
            return Denied(WorkersBusy(f"Workers are starting: {listed(dict.fromkeys(starting))}."), may_change=True)
        if len(present) < max(wanted, 1):
            return Denied(JobError(_too_few(len(present), request)))
        if len(idle) < wanted:
            soon = any(slot.is_ending for slot in self._slots.values())
            return Denied(WorkersBusy(_busy(wanted, reasons)), may_change=soon)
        self.release(request.job)
        chosen = idle[: request.most]
        self._slots |= {worker.slot: _Slot(request.job, request.client, worker, request.attempt) for worker in chosen}
        return Claimed(tuple(chosen))

    def begin(self, job: str, attempt: int, address: str) -> bool:
        """A rank has begun on the worker at this address. Return whether the worker belongs to its job and attempt."""
        mine = [slot for slot in self._slots.values() if slot.job == job and slot.worker.address == address]
        for slot in mine:
            slot.begun = True
        return any(slot.attempt == attempt for slot in mine)

    def end_attempt(self, job: str, for_good: bool = False) -> None:
        """The job's attempt is over: a rank of it that begins from now on is nobody's.

        for_good: whether the job is, too, and is about to be released.
        """
        for slot in self._slots.values():
            if slot.job == job:
                slot.attempt, slot.is_ending = None, for_good

    def lose(self, slot: str, now: float) -> None:
        """A worker has died, and its nanny starts another one in its place."""
        self._lost[slot] = now

    def lost(self) -> list[str]:
        """Return the slots whose worker has died, and whose successor isn't there."""
        return list(self._lost)

    def give_up(self, slot: str) -> None:
        """No successor comes to this slot."""
        self._lost.pop(slot, None)

    def release(self, job: str) -> None:
        """Give up all that the job owns."""
        self._slots = {name: slot for name, slot in self._slots.items() if slot.job != job}

    def release_all(self) -> None:
        """Give up what all jobs own: every worker has been restarted."""
        self._slots = {}

    def of_client(self, client: str) -> dict[str, list[Worker]]:
        """Return, for each job of this client, the workers on which its ranks have begun."""
        jobs: dict[str, list[Worker]] = {}
        for slot in self._slots.values():
            if slot.client == client:
                jobs.setdefault(slot.job, []).extend([slot.worker] * slot.begun)
        return jobs

    def attempt_of(self, job: str) -> int | None:
        """Return the attempt that the job is in."""
        return next((slot.attempt for slot in self._slots.values() if slot.job == job), None)

    def owners_of(self, address: str) -> list[tuple[str, str]]:
        """Return (job, id of the worker's process) of those that own the worker at this address."""
        return [(slot.job, slot.worker.process) for slot in self._slots.values() if slot.worker.address == address]

    def _unfit(self, worker: Worker, request: Request) -> str:
        """Return why the job cannot have this worker now; empty if it can."""
        slot = self._slots.get(worker.slot)
        if slot and slot.job != request.job:
            return f"belongs to the job {slot.job}"
        return unfit(worker) or request.stuck.get(worker.address, "")


def unfit(worker: Worker) -> str:
    """Return why a worker can begin no rank now, as far as the scheduler knows; empty if it can."""
    if worker.status == "paused":
        return (
            f"is paused: it uses {worker.memory} of memory, and Dask lets it begin nothing above 80 % (free memory "
            f"there, restart it with client.restart_workers([{worker.address!r}]), or give workers more memory)"
        )
    if worker.status != "running":
        return f"has the status {worker.status}"
    return busy_with(worker.tasks) if worker.tasks else ""


def busy_with(tasks: Iterable[str]) -> str:
    """Return what to say of a worker that runs these tasks."""
    return f"is busy with {sorted(set(tasks))}"


def _by_host_and_name(worker: Worker) -> tuple[str, int, str]:
    return worker.host, len(worker.name), worker.name  # 9 before 10


def _too_few(there: int, request: Request) -> str:
    fewest = request.fewest or 1
    needed = f"{fewest} workers" if fewest > 1 else "1 or more workers"
    of = f" of {listed(request.among)}" if request.among else ""
    return (
        f"The job needs {needed}, one for each rank, but the cluster has {there}{of}: ask for fewer ranks, or start "
        "more workers (an adaptive cluster starts them for tasks, not for ranks: write "
        f"cluster.adapt(minimum={fewest}) there) and set wait_for_workers to a minute."
    )


def _busy(wanted: int, reasons: Mapping[str, str]) -> str:
    named = "; ".join(f"{address} {why}" for address, why in reasons.items() if why)
    return (
        f"The job needs {wanted} idle workers, but {named}. "
        "Wait for that to end, end it (Ctrl-C where it runs, job.cancel(), ranks.close(), client.cancel(futures) or "
        "client.restart()), or set wait_for_workers."
    )
