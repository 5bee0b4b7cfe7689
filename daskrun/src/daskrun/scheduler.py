"""What a job asks of the scheduler: workers of its own, word of their deaths, their end, and to be forgotten.

The functions run in the scheduler's process, by `client.run_on_scheduler`. Each change of `Claims` is one step of the
scheduler's event loop, which nothing interrupts: that is the lock under which a worker changes hands.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from dask.utils import format_bytes
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.scheduler import WorkerState

from daskrun.claims import Claimed, Claims, Denied, Request, Worker
from daskrun.errors import JobError, WorkersBusy, listed
from daskrun.private import forget_topic, truncate_topic
from daskrun.rank import TOPIC
from daskrun.record import Record
from daskrun.settings import has_gpu
from daskrun.why.process import ask, ask_nanny, killing

NANNY_S = 5  # how long a job's end waits for nannies; one whose host is lost gives no answer
GPU_S = 15  # how long jobs wait, in all, for a worker to say whether it sees a GPU
AT_ONCE_S = 0.1  # how long one request waits for that


class ClaimsPlugin(SchedulerPlugin):
    """Keeps the cluster's one table, and tells a job's client of a worker's death."""

    name = "daskrun"

    def __init__(self, scheduler: Scheduler) -> None:
        self.claims, self.record = Claims(), Record()
        self._scheduler = scheduler
        self._background: set[asyncio.Task] = set()
        self._gpu_asked: dict[str, tuple[float, asyncio.Task]] = {}  # since when, and the answer, by address

    def restart(self, scheduler: Scheduler) -> None:
        self.claims.release_all()

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        if finish == "memory" and type(key) is tuple and key[0] in self.record.jobs:
            self.record.returns(*key)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        for job, client, process in self.claims.owners_of(worker):
            scheduler.log_event(TOPIC + client, ("gone", job, process))
        if asked := self._gpu_asked.pop(worker, None):
            asked[1].cancel()

    def log_event(self, topic: str, msg: Any) -> None:
        if not (
            topic.startswith(TOPIC) and isinstance(msg, (list, tuple)) and len(msg) > 1 and isinstance(msg[1], str)
        ):
            return
        kind, job, *about = msg
        if kind == "began" and not self.claims.begin(job, about[0], about[-1]):  # its attempt was over before it began
            for worker in known(about[-1:], self._scheduler):
                if worker.has_nanny:
                    self.claims.renew([worker], time.monotonic())
                    self._do(ask_nanny(self._scheduler, worker, killing(worker.pid)))
        if kind == "failed":
            self.claims.expect_end(job, time.monotonic())
        truncate_topic(self._scheduler, topic)  # the client has been sent it, and nobody asks for the past
        self.record.hear(kind, job, about, time.monotonic())

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for job, begun in self.claims.of_client(client).items():
            self.claims.end_attempt(job)  # at once, as `free` starts a little later
            self._do(free(job, begun, [], False, dask_scheduler=self._scheduler))  # nobody else ends its ranks any more
        self.record.loses(client)
        forget_topic(scheduler, TOPIC + client)

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
    answer = plugin.claims.claim(request, known(plugin.asked(), dask_scheduler), time.monotonic())
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


async def free(
    job: str,
    killed: Sequence[Worker],
    dead: Sequence[Worker],
    again: bool,
    error: str = "",
    dask_scheduler: Any = None,
) -> None:
    """Kill workers through their nannies, which start successors; then give up all that the job owns.

    dead: those that died without being killed, and whose nannies may live. again: the job keeps its slots, for its next
    attempt. error: with which the attempt has ended.
    """
    claims = _claims(dask_scheduler)
    _plugin(dask_scheduler).record.ends(job, error, again)
    mine = {slot for slot, owner in claims.owned().items() if owner == job}
    claims.stay(mine)
    claims.renew((*killed, *dead), time.monotonic())
    claims.end_attempt(job)
    asked: dict[asyncio.Future, Worker] = {
        asyncio.ensure_future(ask_nanny(dask_scheduler, worker, killing(worker.pid))): worker
        for worker in (*killed, *dead)
    }
    answered, silent = await asyncio.wait(asked, timeout=NANNY_S) if asked else (set(), set())
    claims.stay([asked[answer].slot for answer in answered if not answer.result()[0]])
    if again:  # the next attempt waits for what a silent nanny may still kill
        return
    claims.stay([asked[answer].slot for answer in silent])
    for answer in silent:  # it may still kill its worker, which is nobody else's until then

        def release(answer: asyncio.Future) -> None:
            claims.renew([asked[answer]], time.monotonic())
            claims.release(job, but=mine - {asked[answer].slot})

        answer.add_done_callback(release)
    claims.release(job, but={asked[answer].slot for answer in silent})


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
        pid=state.pid,
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
