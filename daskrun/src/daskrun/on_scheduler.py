"""What a job asks of the scheduler: workers of its own, word of their deaths, their end, and to be forgotten.

The functions run in the scheduler's process, by `client.run_on_scheduler`. Each change of `Owners` is one step of the
scheduler's event loop, which nothing interrupts: that is the lock under which a worker changes hands.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

from dask.utils import format_bytes
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol import deserialize
from distributed.protocol.serialize import Serialized
from distributed.scheduler import WorkerState

from daskrun.errors import JobError
from daskrun.explain import how_it_ended
from daskrun.nanny import End, Process, killing, looking, remembering, watching
from daskrun.owners import Claimed, Denied, Owners, Request, Worker
from daskrun.private import forget_topic, truncate_topic

NANNY_S = 5  # how long a job's end waits for nannies; one whose host is lost gives no answer
FORGET_S = 2  # from a job's end until its messages are dropped
FROM_RANKS = ("row", "began", "serves", "failed")  # what ranks log under the job's name
JOB = re.compile("-[0-9a-f]{32}$")  # the name of a job


class OwnersPlugin(SchedulerPlugin):
    """Keeps the cluster's one table, and tells a job of a worker's death under the topic of the job's name."""

    name = "workshop-owners"

    def __init__(self, scheduler: Scheduler) -> None:
        self.owners = Owners()
        self._scheduler = scheduler
        self._background: set[asyncio.Task] = set()

    def restart(self, scheduler: Scheduler) -> None:
        self.owners.free_all()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        for job in self.owners.owners_of(worker):
            scheduler.log_event(job, ("gone", worker))

    def log_event(self, topic: str, msg: Any) -> None:
        kind = msg[0] if isinstance(msg, (list, tuple)) and msg else None
        if kind == "began" and JOB.search(topic) and not self.owners.begin(topic, msg[-1]):
            self._end(topic, [msg[-1]])  # its client was lost before it began
        if kind == "failed":
            self.owners.expect_end(topic, time.monotonic())
        if kind in FROM_RANKS and JOB.search(topic) and topic not in self.owners.owned().values():
            forget_topic(self._scheduler, topic)  # the rank of a job that is over still runs: it has no nanny

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for job, begun in self.owners.of_client(client).items():
            self._end(job, begun)

    def _end(self, job: str, begun: Sequence[str]) -> None:
        """Kill the workers on which the job's ranks have begun, as nobody else ends these any more."""
        work = asyncio.ensure_future(replace(job, known(begun, self._scheduler), [], False, self._scheduler))
        self._background.add(work)
        work.add_done_callback(self._background.discard)


def claim(request: Request, dask_scheduler: Any = None) -> Claimed | Denied:
    """Return the workers that belong to the job from now on, or why it gets none."""
    if request.client not in dask_scheduler.clients:
        return Denied(JobError("The job's client is gone."))
    workers = [_known(state) for state in dask_scheduler.workers.values()]
    return _owners(dask_scheduler).claim(request, workers, time.monotonic())


def known(addresses: Sequence[str], dask_scheduler: Any = None) -> list[Worker]:
    """Return what is known of those of these workers that are there."""
    return [_known(dask_scheduler.workers[a]) for a in addresses if a in dask_scheduler.workers]


def give_back(job: str, dask_scheduler: Any = None) -> None:
    """Give up all workers that the job owns."""
    _owners(dask_scheduler).free(job)


async def replace(
    job: str, killed: Sequence[Worker], dead: Sequence[Worker], keep: bool, dask_scheduler: Any = None
) -> None:
    """Kill workers through their nannies, which start successors; then give up all that the job owns, and forget it.

    dead: those that died without being killed, and whose nannies may live. keep: whether the job keeps its slots and
    its messages, for its next attempt.
    """
    orders = [(worker, killing(worker.address)) for worker in killed]
    orders += [(worker, killing(None)) for worker in dead]
    asked = {asyncio.ensure_future(_ask_nanny(dask_scheduler, *order)): order[0] for order in orders}
    answered, silent = await asyncio.wait(asked, timeout=NANNY_S) if asked else (set(), set())
    owners = _owners(dask_scheduler)
    owners.replace([asked[answer] for answer in answered if answer.result()[0]], time.monotonic())
    if not keep:
        for answer in silent:  # it may still kill its worker, which is nobody else's until then
            answer.add_done_callback(lambda answer: owners.free_slot(asked[answer].slot, job))
        owners.free(job, but={asked[answer].slot for answer in silent})
        # Later, as the last messages of ended ranks may still be on their way.
        asyncio.get_running_loop().call_later(FORGET_S, forget_topic, dask_scheduler, job)


async def watch_ends(workers: Sequence[Worker], dask_scheduler: Any = None) -> None:
    """Let nannies remember how their workers end."""
    await _ask_nannies(dask_scheduler, [(worker, watching()) for worker in workers])


async def processes(workers: Sequence[Worker], dask_scheduler: Any = None) -> list[Process | None]:
    """Return how the nannies of these workers see their processes; None for one that does not answer."""
    answers = await _ask_nannies(dask_scheduler, [(worker, looking(worker.address)) for worker in workers])
    return [Process(*found) if there and found else None for there, found in answers]


async def ends(workers: Sequence[Worker], dask_scheduler: Any = None) -> list[tuple[str, str, bool]]:
    """Return how these workers' processes ended, what to do (see `explain.how_it_ended`), if their nannies live."""
    orders = [(worker, remembering(worker.address)) for worker in workers]
    answers = await _ask_nannies(dask_scheduler, orders)
    events = [event for _, event in dask_scheduler.get_events("worker-restart-memory")]
    by_dask = {(event["worker"], event["pid"]): event["rss"] for event in events}
    said = []
    for worker, (there, known) in zip(workers, answers, strict=True):
        end = End(*known) if known else None
        rss = by_dask.get((worker.address, end.pid)) if end else None
        said.append((*how_it_ended(end, worker.has_nanny, there, rss), there))
    return said


def drop_events(topic: str, dask_scheduler: Any = None) -> None:
    """Drop what was logged under a topic, which the scheduler would keep for good; subscribers stay."""
    truncate_topic(dask_scheduler, topic)


def owned(dask_scheduler: Any = None) -> dict[str, str]:
    """Return the job that owns each worker, by its nanny's address or, without one, its own."""
    return _owners(dask_scheduler).owned()


def _owners(scheduler: Scheduler) -> Owners:
    if OwnersPlugin.name not in scheduler.plugins:
        scheduler.add_plugin(OwnersPlugin(scheduler))
    return scheduler.plugins[OwnersPlugin.name].owners  # type: ignore[attr-defined]


def _known(state: WorkerState) -> Worker:
    return Worker(
        address=state.address,
        process=state.server_id,
        slot=state.nanny or state.address,
        host=state.host,
        name=str(state.name),
        has_nanny=state.nanny is not None,
        has_gpu="gpu" in state.extra,
        status=state.status.name,
        memory=f"{format_bytes(state.memory.process)} of {format_bytes(state.memory_limit)}",
        tasks=tuple(task_name(task.key) for task in state.processing),
    )


def task_name(key: Any) -> str:
    """Return the name of a task for a message; the key of a rank's is (job, attempt, rank)."""
    return str(key[0] if isinstance(key, tuple) else key)


async def _ask_nannies(scheduler: Scheduler, orders: Sequence[tuple[Worker, bytes]]) -> list[tuple[bool, Any]]:
    """Return what `_ask_nanny` returns for each order; one that does not answer in time is not there."""

    async def ask(worker: Worker, function: bytes) -> tuple[bool, Any]:
        try:
            return await asyncio.wait_for(_ask_nanny(scheduler, worker, function), NANNY_S)
        except TimeoutError:
            return False, None

    return await asyncio.gather(*(ask(*order) for order in orders))


async def _ask_nanny(scheduler: Scheduler, worker: Worker, function: bytes) -> tuple[bool, Any]:
    """Return (whether the worker's nanny is there, what a function of `nanny` returned on it).

    Client.restart_workers first waits for threads to end, and a rank's may never end.
    """
    if not worker.has_nanny:
        return False, None
    try:
        answer = await scheduler.rpc(worker.slot).run(function=function)
    except Exception:  # each way of being away has its own
        return False, None
    result = answer.get("result")  # none where the function failed
    if isinstance(result, Serialized):  # a scheduler passes on unread what it is sent
        result = deserialize(result.header, result.frames)
    return True, result
