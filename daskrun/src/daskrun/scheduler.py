"""What a job asks of the scheduler: workers of its own, word of their deaths, their end, and to be forgotten.

The functions run in the scheduler's process, by `client.run_on_scheduler`. Each change of `Claims` is one step of the
scheduler's event loop, which nothing interrupts: that is the lock under which a worker changes hands.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from dask.utils import format_bytes
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol import deserialize
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialize, Serialized
from distributed.scheduler import WorkerState

from daskrun.claims import Claimed, Claims, Denied, Request, Worker
from daskrun.errors import JobError, WorkersBusy, listed
from daskrun.private import forget_topic, truncate_topic
from daskrun.protocol import TOPIC, AttemptId, Event
from daskrun.record import Record
from daskrun.settings import has_gpu
from daskrun.worker.rank import end

END_S = 10  # how long the end of a client's jobs waits for workers; one whose host is lost gives no answer
GPU_S = 15  # how long jobs wait, in all, for a worker to say whether it sees a GPU
NANNY_S = 2  # how long a launch waits for the answer of a nanny whose worker is gone
AT_ONCE_S = 0.1  # how long one request waits for that


class ClaimsPlugin(SchedulerPlugin):
    """Keeps the cluster's one table, and tells a job's client of a worker's death."""

    name = "daskrun"

    def __init__(self, scheduler: Scheduler) -> None:
        self.claims, self.record = Claims(), Record()
        self._scheduler = scheduler
        self._known: dict[str, Worker] = {}  # by address, as of the last claim
        self._background: set[asyncio.Task] = set()
        self._gpu_asked: dict[str, tuple[float, asyncio.Task]] = {}  # since when, and the answer, by address

    def restart(self, scheduler: Scheduler) -> None:
        self.claims.release_all()

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        if finish == "memory" and type(key) is tuple and key[0] in self.record.jobs:
            self.record.returns(*key)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        for job, client, process in self.claims.owners_of(worker):
            scheduler.log_event(TOPIC + client, (str(Event.GONE), job, process))
        gone = self._known.pop(worker, None)
        if gone and gone.has_nanny and not why_closed(scheduler, worker):
            self.claims.lose(gone, time.monotonic())
        if asked := self._gpu_asked.pop(worker, None):
            asked[1].cancel()

    def log_event(self, topic: str, msg: Any) -> None:
        if not (
            topic.startswith(TOPIC) and isinstance(msg, (list, tuple)) and len(msg) > 1 and isinstance(msg[1], str)
        ):
            return
        kind, job, *about = msg
        if kind == Event.BEGAN and not self.claims.begin(job, about[0], about[-1]):  # its attempt was over before it
            self.end_rank(AttemptId(job, about[0]), about[-1])
        truncate_topic(self._scheduler, topic)  # the client has been sent it, and nobody asks for the past
        self.record.hear(kind, job, about, time.monotonic())

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for job, begun in self.claims.of_client(client).items():
            attempt = self.claims.attempt_of(job)
            self.claims.end_attempt(job, for_good=True)
            self._do(self._end(job, attempt, begun))  # nobody else ends its ranks any more
        self.record.loses(client)
        forget_topic(scheduler, TOPIC + client)

    async def _end(self, job: str, attempt: int | None, workers: Sequence[Worker]) -> None:
        """End the ranks of a job on these workers, and give up all that it owns."""
        if attempt is not None:
            asked = [self.end_rank(AttemptId(job, attempt), worker.address) for worker in workers]
            if asked:
                await asyncio.wait(asked, timeout=END_S)
        self.claims.release(job)

    def end_rank(self, attempt: AttemptId, address: str) -> asyncio.Task:
        """End the rank of an attempt on a worker, as soon as that answers."""
        return self._do(ask(self._scheduler, address, dumps(partial(end, attempt, 0))))

    async def ask_for_gpus(self) -> list[str]:
        """Ask each worker, once, whether it sees a GPU. Return the addresses of those that are still to answer.

        What a worker announces to Dask does not say so: that was written before NVML was asked, whatever
        CUDA_VISIBLE_DEVICES hides.
        """
        now = time.monotonic()
        for address in self._scheduler.workers:
            if address not in self._gpu_asked:
                self._gpu_asked[address] = now, self._do(ask(self._scheduler, address, dumps(has_gpu)))
        asked = {address: answer for address, (since, answer) in self._gpu_asked.items() if now - since < GPU_S}
        if waiting := [answer for answer in asked.values() if not answer.done()]:
            await asyncio.wait(waiting, timeout=AT_ONCE_S)
        return [address for address, answer in asked.items() if not answer.done()]

    async def give_up_lost_nannies(self) -> None:
        """Await no successors of workers whose nannies are gone, too, as after Ctrl-C or the loss of a host."""

        async def ask(slot: str) -> None:
            try:
                await asyncio.wait_for(self._scheduler.rpc(slot).identity(), NANNY_S)
            except Exception:  # each way of being away has its own
                self.claims.give_up(slot)

        await asyncio.gather(*map(ask, self.claims.lost()))

    def remember(self, workers: Sequence[Worker]) -> None:
        """Note what is known of workers, for the day when they die."""
        self._known |= {worker.address: worker for worker in workers}

    def asked(self) -> list[str]:
        """Return the addresses of the workers that have been asked: one that has just joined is not there yet."""
        return [address for address in self._scheduler.workers if address in self._gpu_asked]

    def has_gpu(self, address: str) -> bool:
        """Return whether a worker has said that it sees a GPU; one that does not answer counts as without."""
        _, answer = self._gpu_asked.get(address, (0, None))
        return answer is not None and answer.done() and not answer.cancelled() and answer.result() == (True, True)

    def _do(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def claim(request: Request, dask_scheduler: Any = None) -> Claimed | Denied:
    """Return the workers that belong to the job from now on, or why it gets none."""
    plugin = _plugin(dask_scheduler)
    silent = await plugin.ask_for_gpus()
    if request.client not in dask_scheduler.clients:
        return Denied(JobError("The job's client is gone."))
    plugin.record.wants(request, time.monotonic())
    if silent:
        return Denied(WorkersBusy(f"Workers are still to say whether they see a GPU: {listed(silent)}."), True)
    await plugin.give_up_lost_nannies()
    workers = known(plugin.asked(), dask_scheduler)
    plugin.remember(workers)
    answer = plugin.claims.claim(request, workers, time.monotonic())
    if isinstance(answer, Claimed):
        plugin.record.begins(request.job, answer.workers)
    return answer


async def with_gpu(dask_scheduler: Any = None) -> set[str]:
    """Return the addresses of the workers that see a GPU."""
    plugin = _plugin(dask_scheduler)
    while await plugin.ask_for_gpus():
        pass
    return {address for address in dask_scheduler.workers if plugin.has_gpu(address)}


def known(addresses: Sequence[str], dask_scheduler: Any = None) -> list[Worker]:
    """Return what is known of those of these workers that are there."""
    states, has_gpu = dask_scheduler.workers, _plugin(dask_scheduler).has_gpu
    return [_known(states[address], has_gpu(address)) for address in addresses if address in states]


def free(attempt: AttemptId, again: bool, error: str, silent: Sequence[str] = (), dask_scheduler: Any = None) -> None:
    """The job's attempt is over: give up what it owns.

    Args:
        again: Whether the job keeps its slots, for its next attempt.
        error: With which the attempt has ended.
        silent: The addresses of workers that haven't answered: their ranks end when they do.
    """
    plugin, job = _plugin(dask_scheduler), attempt.job
    for address in silent:
        plugin.end_rank(attempt, address)
    plugin.record.ends(job, error, again)
    plugin.claims.end_attempt(job)
    if not again:
        plugin.claims.release(job)


def worker_ends(workers: Sequence[Worker], dask_scheduler: Any = None) -> list[tuple[str, int | None]]:
    """Return of each dead worker (why Dask closed it, "" if it didn't; its bytes if a nanny ended it for those)."""
    events = [event for _, event in dask_scheduler.get_events("worker-restart-memory")]
    ended = {event["worker"]: event["rss"] for event in events}
    return [(why_closed(dask_scheduler, worker.address), ended.get(worker.address)) for worker in workers]


def why_closed(scheduler: Scheduler, address: str) -> str:
    """Return the reason for which the last worker of this address was closed, "" if it was not."""
    for _, event in reversed(scheduler.get_events(address)):
        action = event.get("action") if isinstance(event, dict) else None
        if action in ("closing-worker", "add-worker"):
            return event.get("reason", "")
    return ""


def stops(job: str, signal: str, dask_scheduler: Any = None) -> None:
    """Note that a job's user has a signal passed on to its scripts."""
    _plugin(dask_scheduler).record.stops(job, signal)


def give_back(job: str, error: str = "", dask_scheduler: Any = None) -> None:
    """Give up all workers that the job owns; none of its ranks was sent to them.

    error: with which the job has ended, "" if it has not.
    """
    _claims(dask_scheduler).release(job)
    if error:
        _plugin(dask_scheduler).record.ends(job, error)


def drop_events(topic: str, dask_scheduler: Any = None) -> None:
    """Drop what was logged under a topic, which the scheduler would keep for good; subscribers stay."""
    truncate_topic(dask_scheduler, topic)


def owned(dask_scheduler: Any = None) -> dict[str, str]:
    """Return the job that owns each worker, by its nanny's address or, without one, its own."""
    return _claims(dask_scheduler).owned()


def record_of(scheduler: Scheduler) -> Record:
    """Return what the cluster's jobs have done so far."""
    return _plugin(scheduler).record


async def ask(scheduler: Scheduler, address: str, function: bytes) -> tuple[bool, Any]:
    """Return (whether the worker at this address answers, what the function returned there)."""
    try:
        answer = await scheduler.rpc(address).run(function=function)
    except Exception:  # each way of being away has its own
        return False, None
    result = answer.get("result")  # none where the function failed
    if isinstance(result, Serialized):  # a scheduler passes on unread what it is sent
        result = deserialize(result.header, result.frames)
    if isinstance(result, Serialize):  # from a worker in the scheduler's process
        result = result.data
    return True, result


def _claims(scheduler: Scheduler) -> Claims:
    return _plugin(scheduler).claims


def _plugin(scheduler: Scheduler) -> ClaimsPlugin:
    if ClaimsPlugin.name not in scheduler.plugins:
        scheduler.add_plugin(ClaimsPlugin(scheduler))
    return scheduler.plugins[ClaimsPlugin.name]  # type: ignore[return-value]


def _known(state: WorkerState, has_gpu: bool) -> Worker:
    return Worker(
        address=state.address,
        process=state.server_id,
        slot=state.nanny or state.address,
        host=state.host,
        name=str(state.name),
        has_nanny=state.nanny is not None,
        has_gpu=has_gpu,
        status=state.status.name,
        memory=f"{format_bytes(state.memory.process)} of {format_bytes(state.memory_limit)}",
        tasks=tuple(task_name(task.key) for task in state.processing),
    )


def task_name(key: Any) -> str:
    """Return the name of a task for a message; the key of a rank's is (job, attempt, rank)."""
    return str(key[0] if isinstance(key, tuple) else key)
