"""One start of a job's ranks, on the client: choose workers, submit, watch, fetch, and set the workers free."""

import asyncio
import pickle
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from distributed import CancelledError, Client, Future
from distributed.comm import get_address_host
from distributed.core import clean_exception

from workshop_utils.job.errors import JobError, SchedulerLost, Stopped, WorkerDied
from workshop_utils.job.rank import SETTLE_S, Place, run_rank, serve_store
from workshop_utils.job.workers import alone, choose, kill, listed, process_of, stacks_of, workers_of

HEARTBEAT_S = 2.0  # between two looks at the workers where nothing is heard; of a death, the scheduler tells at once
GRACE_S = 2.0  # for the other ranks to end by themselves, before their workers are restarted
INFINITE = float("inf")
AGAIN_S = 0.1  # between two questions to the scheduler where it has no event to tell of


class Call:
    """What a job is to run, until when, and the news of it, which wake its thread and all who wait for it.

    bootstrap, function: as in `Job`, the latter pickled with its arguments. timeout: seconds, None for no limit.
    """

    def __init__(self, client: Client, name: str, bootstrap: Callable, function: bytes, max_restarts: int,
                 timeout: float | None) -> None:  # fmt: skip
        self.client, self.name, self.bootstrap, self.function = client, name, bootstrap, function
        self.max_restarts, self.timeout, self.deadline = max_restarts, timeout, time.monotonic() + (timeout or INFINITE)
        self.changed, self.cancelled, self._news = threading.Condition(), False, False

    def listen(self, topic: str, method: Callable[[Any], object]) -> None:
        """Have a method called at each event of a topic, as long as its object is there."""
        weak: Any = weakref.WeakMethod(method)  # a client never forgets a handler, but must let the job go
        self.client.subscribe_topic(topic, lambda event: (known := weak()) and known(event))

    def notice(self, *_: object) -> None:
        """Say that there is news."""
        with self.changed:
            self._news = True
            self.changed.notify_all()

    def await_news(self, seconds: float) -> None:
        """Return at the next news, at the latest after so many seconds; for the job's own thread."""
        with self.changed:
            self.changed.wait_for(lambda: self._news, max(0.0, seconds))
            self._news = False


class Attempt:
    """One start of a job's ranks; `number` of them came before. All but `hear` and `standing` is for the job's thread.

    members: what the scheduler knew of each worker, by address, in rank order. ranks: their futures.
    """

    def __init__(self, call: Call, number: int) -> None:
        self.call, self.client, self.number = call, call.client, number
        self.members: dict[str, dict[str, Any]] = {}
        self.ranks: list[Future] = []
        self._tasks: list[Future] = []
        self._store: Future | None = None  # its release closes its server
        self._failed: tuple[int, BaseException, float] | None = None  # rank, its error, when it was heard of

    def start(self, fewest: int | None, most: int | None, patience: float, gone: list[dict[str, Any]]) -> None:
        """Return once each rank is with its worker. All but patience, seconds to wait for `most`, is as in `choose`."""
        give_up = min(time.monotonic() + patience, self.call.deadline)
        while True:
            self._raise_for_cancelled()
            late = time.monotonic() >= give_up
            with alone(self.client):
                try:
                    chosen = choose(self.client, fewest, most, gone)
                except JobError as error:
                    if late or isinstance(error, SchedulerLost):
                        raise
                else:
                    if late or len(chosen) >= (most or 1):
                        self.members = chosen
                        self._submit()
                        return
            self._pause(AGAIN_S)

    def results(self) -> list[Any]:
        """Return what the ranks returned, in rank order; raise the reason where they do not."""
        self._watch(self._tasks)
        gathering, loop = self.client.gather(self.ranks, asynchronous=True), self.client.loop
        fetched = asyncio.run_coroutine_threadsafe(gathering, loop.asyncio_loop)  # type: ignore[union-attr]
        try:
            self._watch([fetched])  # likewise: a worker may die while it sends
        finally:
            fetched.cancel()  # does nothing once it is done
            self._store = None
        return [pickle.loads(result) for result in fetched.result()]

    def hear(self, failure: dict[str, Any]) -> None:
        """Take note of a rank's failure, as `rank.run_rank` tells of it."""
        if failure["attempt"] == self.number and not self._failed:
            _, error, remote = clean_exception(failure["exception"], failure["traceback"])
            assert error is not None
            self._failed = failure["failed"], error.with_traceback(remote), time.monotonic()
            self.call.notice()

    def standing(self) -> list[tuple[int, str, str]]:
        """Return (rank, place, stack) of each rank that is at work: see `workers.stacks_of`."""
        found = stacks_of(self.client, list(self.members), (self.call.name, self.number))
        return [(rank, *found[address]) for rank, address in enumerate(self.members) if address in found]

    def free(self) -> list[dict[str, Any]]:
        """Return when no rank is at work any more, and what the scheduler knew of the workers that ended, or had to."""
        self._store = None
        grace_ends = time.monotonic() + (0 if self.call.cancelled else GRACE_S)
        while any(task.status == "pending" for task in self._tasks) and time.monotonic() < grace_ends:
            self.call.await_news(grace_ends - time.monotonic())
        tasks, dead = dict(zip(self.members, self._tasks, strict=False)), self._dead()
        busy = {address for address, task in tasks.items() if task.status not in ("finished", "error")} - set(dead)
        self.client.cancel([task for task in self._tasks if not task.done()])  # whose threads may still run
        if immortal := [address for address in busy if not self.members[address]["nanny"]]:
            warnings.warn(f"Worker {listed(immortal)} has no nanny to restart it, and stays busy until its rank "
                          "returns: end that process, and start workers with nannies.", stacklevel=2)  # fmt: skip
        # Where one rank died while they connected, gloo in the others is broken: their next launches hung or failed.
        restart = {a for a in (self.members if dead else busy) if self.members[a]["nanny"] and a not in dead}
        kill(self.client, list(restart))  # a thread cannot be stopped, a process can
        return [self.members[address] for address in {*dead, *restart}]

    def _submit(self) -> None:
        for address in self.members:  # under this topic the scheduler tells of the worker's end
            self.call.listen(address, self.call.notice)
        self.call.notice()  # there are workers now
        call, first, submit = self.call, next(iter(self.members)), partial(self.client.submit, pure=False)
        host = get_address_host(first)
        self._store = submit(serve_store, host, workers=[first], key=f"store-{uuid.uuid4().hex}")
        port = submit(getattr, self._store, "port", workers=[first])  # the store itself stays where it is
        self._tasks = [port]
        self._watch(self._tasks)
        for rank, (address, worker) in enumerate(self.members.items()):
            key, size, process = (call.name, self.number, rank), len(self.members), process_of(worker)
            place = Place(call.name, rank, size, self.number, call.max_restarts, process, host, port.result())
            self.ranks.append(submit(run_rank, call.bootstrap, call.function, place, workers=[address], key=key))
        self._tasks = self.ranks
        self.call.notice()
        while not self._are_assigned():
            self._pause(AGAIN_S / 10)
            self._look()

    def _are_assigned(self) -> bool:
        assigned = {key for keys in self.client.processing().values() for key in keys}
        return all(rank.key in assigned or rank.done() for rank in self.ranks)

    def _watch(self, awaited: list[Any]) -> None:
        """Return when all of these futures are done, and no task failed; raise the reason why they will not be."""
        for future in awaited:
            future.add_done_callback(self.call.notice)
        while not all(future.done() for future in awaited):
            self._pause(HEARTBEAT_S)
            self._look()
        if any(task.status != "finished" for task in self._tasks):
            self._look()

    def _look(self) -> None:
        """Raise the reason why the ranks will not all finish, if there is one by now."""
        self._raise_for_cancelled()
        rank, error, heard = self._failed or (None, None, INFINITE)
        workers, dead = list(self.members), self._dead()
        if others := [address for address in dead if workers.index(address) != rank]:  # its error is a consequence
            raise WorkerDied(f"Rank {listed(map(workers.index, others))} died: worker {listed(others)} was killed, ran "
                             "out of memory, or was lost with its machine. To go on after that, give launch "
                             "max_restarts, and let the function resume from a checkpoint.")  # fmt: skip
        over = all(task.done() for task in self._tasks)
        if error and (over or dead or time.monotonic() > heard + SETTLE_S):
            raise error
        if over and (failed := [task for task in self._tasks if task.status == "error"]):  # before it was a rank
            task = min(failed, key=lambda task: isinstance(task.exception(), Stopped))
            raise task.exception().with_traceback(task.traceback())
        if time.monotonic() > self.call.deadline:
            raise self._timed_out()

    def _timed_out(self) -> TimeoutError:
        late = [rank for rank, task in enumerate(self._tasks) if not task.done()]
        standing = self.standing()
        where = "; ".join(f"rank {rank}: {place}" for rank, place, _ in standing) or "no rank is at work"
        error = TimeoutError(f"Rank {listed(late)} had not returned after {self.call.timeout} s ({where}): give the "
                             "job a longer timeout, or see there who waits for whom.")  # fmt: skip
        error.add_note("\n".join(f"Rank {rank}:\n{stack}" for rank, _, stack in standing))
        return error

    def _raise_for_cancelled(self) -> None:
        if self.call.cancelled:
            raise CancelledError(f"{self.call.name} was cancelled.")
        if self.client.status == "connecting":  # it will look for one at the same address for a while
            raise SchedulerLost("The connection to the scheduler is lost, and with it the job: its process has ended, "
                                "or the network to it. Start or join a cluster, and launch again.")  # fmt: skip
        if any(task.status == "cancelled" for task in self._tasks):
            by = "client.cancel(), client.restart() or client.close()"
            raise CancelledError(f"{self.call.name} lost its tasks to {by}.")

    def _dead(self) -> list[str]:
        alive = {process_of(worker) for worker in workers_of(self.client).values()}
        gone = {address for address, worker in self.members.items() if process_of(worker) not in alive}
        # An adaptive cluster retires a worker whose rank has returned before others, and moves the result: no death.
        moved = self.client.who_has(self.ranks) if gone and self.ranks else {}
        ranks = dict(zip(self.members, self.ranks, strict=False))
        return [a for a in self.members if a in gone and not (a in ranks and moved.get(ranks[a].key))]

    def _pause(self, seconds: float) -> None:
        """Return at the next news, at the latest after so many seconds."""
        settled = self._failed[2] + SETTLE_S if self._failed else INFINITE
        until = min(time.monotonic() + seconds, self.call.deadline, settled)
        self.call.await_news(until - time.monotonic())
