"""Who owns which worker: the table that all jobs of a cluster share.

It is plain data without Dask: `on_scheduler` keeps the one table of a cluster and tells it what the workers do.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from daskrun.errors import JobError, WorkersBusy, listed

REPLACED_S = 30.0  # how long a launch waits for a killed worker's successor, or for the end of a job that has failed
KINDS = {True: "with a GPU", False: "without a GPU"}


@dataclass(frozen=True)
class Worker:
    """What the scheduler knows of a worker.

    process: an id that its successor does not share. slot: its nanny's address, which its successor does share; its
    own without a nanny. status: Dask's, such as "running" or "paused". memory: for a message. tasks: names of those
    that the scheduler has given it.
    """

    address: str
    process: str
    slot: str
    host: str
    name: str
    has_nanny: bool = True
    has_gpu: bool = False
    status: str = "running"
    memory: str = ""
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """Which workers a job wants.

    fewest, most: how many; None for all of a kind. client: its id; a job ends with its client. has_gpu: the kind, None
    for workers with a GPU where there are `enough`, else without. stuck: tasks of workers that the scheduler takes for
    idle, by address.
    """

    job: str
    client: str
    fewest: int | None = None
    most: int | None = None
    has_gpu: bool | None = None
    enough: int | None = None
    stuck: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Claimed:
    """The job owns these workers, in rank order. left_out: addresses of those of the other kind."""

    workers: tuple[Worker, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Denied:
    """The job gets no worker now. soon: it needs workers that are being replaced, or that an ending job gives up."""

    error: JobError
    soon: bool = False


@dataclass
class _Claim:
    job: str
    client: str
    address: str
    begun: bool = False  # whether its rank has
    ends_by: float = 0.0  # until when an ending job is waited for


class Owners:
    """Which job owns which worker, and which workers are being replaced."""

    def __init__(self) -> None:
        self._claims: dict[str, _Claim] = {}  # by slot
        self._replaced: dict[str, tuple[Worker, float]] = {}  # slot: (the old worker, until when another is awaited)

    def claim(self, request: Request, workers: Sequence[Worker], now: float) -> Claimed | Denied:
        """Make idle workers the job's own, by host and name; or say why not, and change nothing.

        workers: all of the cluster. now: seconds on the clock of `replace` and `expect_end`.
        """
        present = self._without_the_killed(workers, now)
        coming = [old for slot, (old, _) in self._replaced.items() if self._is_open(slot, request)]
        of_kind = _of_one_kind(present, coming, request)
        awaited = [old.slot for old in coming]
        awaited += [slot for slot, claim in self._claims.items() if claim.job != request.job and now < claim.ends_by]
        wanted = request.fewest or len(of_kind)
        reasons = {worker.address: self._unfit(worker, request) for worker in of_kind}
        idle = sorted((worker for worker in of_kind if not reasons[worker.address]), key=_by_host_and_name)
        if awaited and (request.fewest is None or len(idle) < wanted):
            return Denied(WorkersBusy(f"Workers are being freed: {listed(awaited)}."), soon=True)
        if len(of_kind) < max(wanted, 1):
            return Denied(JobError(_too_few(present, request)))
        if len(idle) < wanted:
            return Denied(WorkersBusy(_busy(wanted, reasons)))
        chosen = idle[: request.most]
        self.free(request.job)
        for worker in chosen:
            self._claims[worker.slot] = _Claim(request.job, request.client, worker.address)
        left_out = sorted({worker.address for worker in present} - {worker.address for worker in of_kind})
        return Claimed(tuple(chosen), tuple(left_out))

    def replace(self, ended: Sequence[Worker], now: float) -> None:
        """Await successors of these killed or dead workers."""
        self._replaced |= {worker.slot: (worker, now + REPLACED_S) for worker in ended}

    def begin(self, job: str, address: str) -> bool:
        """The job's rank on the worker at this address has begun. Return whether the worker is the job's."""
        mine = [claim for claim in self._claims.values() if claim.job == job and claim.address == address]
        for claim in mine:
            claim.begun = True
        return bool(mine)

    def expect_end(self, job: str, now: float) -> None:
        """Let launches wait for the workers of this job: one of its ranks has failed, so it is about to end."""
        for claim in self._claims.values():
            if claim.job == job:
                claim.ends_by = now + REPLACED_S

    def free(self, job: str, but: Collection[str] = ()) -> None:
        """Give up all that the job owns, except these slots."""
        self._claims = {slot: claim for slot, claim in self._claims.items() if claim.job != job or slot in but}

    def free_slot(self, slot: str, job: str) -> None:
        """Give up this slot, if it is the job's."""
        if slot in self._claims and self._claims[slot].job == job:
            del self._claims[slot]

    def free_all(self) -> None:
        """Give up what all jobs own: every worker has been restarted."""
        self._claims = {}

    def of_client(self, client: str) -> dict[str, list[str]]:
        """Return, for each job of this client, the addresses of the workers on which its ranks have begun."""
        jobs: dict[str, list[str]] = {}
        for claim in self._claims.values():
            if claim.client == client:
                jobs.setdefault(claim.job, []).extend([claim.address] * claim.begun)
        return jobs

    def owners_of(self, address: str) -> list[str]:
        """Return the jobs that own the worker at this address."""
        return [claim.job for claim in self._claims.values() if claim.address == address]

    def owned(self) -> dict[str, str]:
        """Return the job that owns each slot."""
        return {slot: claim.job for slot, claim in self._claims.items()}

    def _without_the_killed(self, workers: Sequence[Worker], now: float) -> list[Worker]:
        """Return the workers without those that were killed, which the scheduler may still list, or that only start."""
        self._replaced = {slot: (old, until) for slot, (old, until) in self._replaced.items() if now < until}
        killed = {old.process for old, _ in self._replaced.values()}
        present = [worker for worker in workers if worker.process not in killed and worker.status != "init"]
        for worker in present:
            self._replaced.pop(worker.slot, None)  # the successor is here
        return present

    def _is_open(self, slot: str, request: Request) -> bool:
        return slot not in self._claims or self._claims[slot].job == request.job

    def _unfit(self, worker: Worker, request: Request) -> str:
        """Return why the job cannot have this worker now; empty if it can."""
        if not self._is_open(worker.slot, request):
            return f"belongs to the job {self._claims[worker.slot].job}"
        return unfit(worker, request.stuck.get(worker.address, ()))


def unfit(worker: Worker, stuck: Sequence[str] = ()) -> str:
    """Return why a worker can begin no rank now; empty if it can. stuck: tasks that the scheduler does not know of."""
    if worker.status == "paused":
        return (
            f"is paused: it uses {worker.memory} of memory, and Dask lets it begin nothing above 80 % (free memory "
            f"there, restart it with client.restart_workers([{worker.address!r}]), or give workers more memory)"
        )
    if worker.status != "running":
        return f"has the status {worker.status}"
    tasks = sorted({*worker.tasks, *stuck})
    return f"is busy with {tasks}" if tasks else ""


def _of_one_kind(workers: Sequence[Worker], coming: Sequence[Worker], request: Request) -> list[Worker]:
    """Return the workers of the first kind that has enough, with those that are coming; of no kind if none has."""
    kinds = KINDS if request.has_gpu is None else [request.has_gpu]
    for has_gpu in kinds:
        of_kind = [worker for worker in workers if worker.has_gpu == has_gpu]
        n_coming = sum(worker.has_gpu == has_gpu for worker in coming)
        if len(of_kind) + n_coming >= (request.enough or request.fewest or 1):
            return of_kind
    return []


def _by_host_and_name(worker: Worker) -> tuple[str, int, str]:
    return worker.host, len(worker.name), worker.name  # 9 before 10


def _too_few(workers: Sequence[Worker], request: Request) -> str:
    fewest = request.fewest or 1
    counts = {kind: sum(worker.has_gpu == has_gpu for worker in workers) for has_gpu, kind in KINDS.items()}
    if all(counts.values()):
        needed, there = f"{fewest} workers of one kind", " and ".join(f"{n} {kind}" for kind, n in counts.items())
    else:
        needed, there = f"{fewest} workers" if fewest > 1 else "1 or more workers", str(len(workers))
    return (
        f"The job needs {needed}, one for each rank, but the cluster has {there}: ask for fewer ranks, or start more "
        "workers (an adaptive cluster starts them for tasks, not for ranks: write "
        f"cluster.adapt(minimum={fewest}) there) and give launch wait_for_workers=60."
    )


def _busy(wanted: int, reasons: Mapping[str, str]) -> str:
    named = "; ".join(f"{address} {why}" for address, why in reasons.items() if why)
    return (
        f"The job needs {wanted} idle workers, but {named}. "
        "Wait for that to end, end it with job.cancel(), client.cancel(futures) or client.restart(), or give launch "
        "wait_for_workers."
    )
