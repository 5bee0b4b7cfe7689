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
from daskrun.errors import JobError
from daskrun.history import History
from daskrun.private import forget_topic, truncate_topic
from daskrun.protocol import TOPIC, AttemptId, Event, JobState
from daskrun.worker.rank import end

END_S = 10  # how long the end of a client's jobs waits for workers; one whose host is lost gives no answer
NANNY_S = 2  # how long a launch waits for the answer of a nanny whose worker is gone


class ClaimsPlugin(SchedulerPlugin):
    """Keeps the cluster's one table, and tells a job's client of a worker's death."""

    name = "daskrun"

    def __init__(self, scheduler: Scheduler) -> None:
        self.claims, self.history = Claims(), History()
        self._scheduler = scheduler
        self._nannies = {address: state.nanny for address, state in scheduler.workers.items()}
        self._background: set[asyncio.Task] = set()

    def restart(self, scheduler: Scheduler) -> None:
        self.claims.release_all()

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        if finish == "memory" and type(key) is tuple and key[0] in self.history.jobs:
            self.history.returns(*key)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._nannies[worker] = scheduler.workers[worker].nanny

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        for job, process in self.claims.owners_of(worker):
            scheduler.log_event(TOPIC + job, (str(Event.GONE), process))
        nanny = self._nannies.pop(worker, None)
        if nanny and not why_closed(scheduler, worker):
            self.claims.lose(nanny, time.monotonic())

    def log_event(self, topic: str, msg: Any) -> None:
        job = topic.removeprefix(TOPIC)
        if job not in self.history.jobs:  # or it's over: nobody asks for it
            return
        kind, *about = msg
        if kind == Event.BEGAN and not self.claims.begin(job, about[0], about[2]):  # its attempt was over before it
            self.end_rank(AttemptId(job, about[0]), about[2])
        truncate_topic(self._scheduler, topic)  # the client has been sent it, and nobody asks for the past
        self.history.hears(kind, job, about, time.monotonic())

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for job, begun in self.claims.of_client(client).items():
            attempt = self.claims.attempt_of(job)
            self.claims.end_attempt(job, for_good=True)
            self._do(self._end(job, attempt, begun))  # nobody else ends its ranks any more
        self.history.loses(client)

    async def _end(self, job: str, attempt: int | None, workers: Sequence[Worker]) -> None:
        """End the ranks of a job on these workers, and give up all that it owns."""
        if attempt is not None:
            asked = [self.end_rank(AttemptId(job, attempt), worker.address) for worker in workers]
            if asked:
                await asyncio.wait(asked, timeout=END_S)
        self.forget(job)

    def forget(self, job: str) -> None:
        """Give up all that a job owns, and what was logged about it."""
        self.claims.release(job)
        forget_topic(self._scheduler, TOPIC + job)

    def end_rank(self, attempt: AttemptId, address: str) -> asyncio.Task:
        """End the rank of an attempt on a worker, as soon as that answers."""
        return self._do(ask(self._scheduler, address, dumps(partial(end, attempt, 0))))

    async def give_up_lost_nannies(self) -> None:
        """Await no successors of workers whose nannies are gone, too, as after Ctrl-C or the loss of a host."""

        async def ask(slot: str) -> None:
            try:
                await asyncio.wait_for(self._scheduler.rpc(slot).identity(), NANNY_S)
            except Exception:  # each way of being away has its own
                self.claims.give_up(slot)

        await asyncio.gather(*map(ask, self.claims.lost()))

    def _do(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def claim(request: Request, dask_scheduler: Any = None) -> Claimed | Denied:
    """Return the workers that belong to the job from now on, or why it gets none."""
    plugin = _plugin(dask_scheduler)
    if request.client not in dask_scheduler.clients:
        return Denied(JobError("The job's client is gone."))
    plugin.history.asks(request)
    await plugin.give_up_lost_nannies()
    workers = known(list(dask_scheduler.workers), dask_scheduler)
    answer = plugin.claims.claim(request, workers, time.monotonic())
    if isinstance(answer, Claimed):
        plugin.history.begins(request.job, answer.workers)
    return answer


def known(addresses: Sequence[str], dask_scheduler: Any = None) -> list[Worker]:
    """Return what is known of those of these workers that are there."""
    states = dask_scheduler.workers
    return [_known(states[address]) for address in addresses if address in states]


def free(
    attempt: AttemptId, state: JobState, error: str, silent: Sequence[str] = (), dask_scheduler: Any = None
) -> None:
    """The job's attempt is over: give up what it owns.

    Args:
        state: Of the job; with ENDING, it keeps its slots for its next attempt.
        error: With which the attempt has ended.
        silent: The addresses of workers that haven't answered: their ranks end when they do.
    """
    plugin, job = _plugin(dask_scheduler), attempt.job
    for address in silent:
        plugin.end_rank(attempt, address)
    plugin.history.ends(job, state, error)
    plugin.claims.end_attempt(job)
    if state is not JobState.ENDING:
        plugin.forget(job)


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
    _plugin(dask_scheduler).history.stops(job, signal)


def give_back(job: str, state: JobState | None = None, error: str = "", dask_scheduler: Any = None) -> None:
    """Give up all workers that the job owns; none of its ranks was sent to them.

    Args:
        state: To which the job has come, None if it goes on.
        error: With which it has ended.
    """
    plugin = _plugin(dask_scheduler)
    plugin.claims.release(job)
    if state:
        plugin.history.ends(job, state, error)


def history_of(scheduler: Scheduler) -> History:
    """Return what the cluster's jobs have done so far."""
    return _plugin(scheduler).history


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


def _plugin(scheduler: Scheduler) -> ClaimsPlugin:
    if ClaimsPlugin.name not in scheduler.plugins:
        scheduler.add_plugin(ClaimsPlugin(scheduler))
    return scheduler.plugins[ClaimsPlugin.name]  # type: ignore[return-value]


def _known(state: WorkerState) -> Worker:
    return Worker(
        address=state.address,
        process=state.server_id,
        slot=state.nanny or state.address,
        host=state.host,
        name=str(state.name),
        status=state.status.name,
        memory=f"{format_bytes(state.memory.process)} of {format_bytes(state.memory_limit)}",
        tasks=tuple(task_name(task.key) for task in state.processing),
    )


def task_name(key: Any) -> str:
    """Return the name of a task for a message; the key of a rank's is (job, attempt, rank)."""
    return str(key[0] if isinstance(key, tuple) else key)
