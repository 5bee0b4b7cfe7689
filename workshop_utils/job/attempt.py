"""One start of a job's ranks, on the client: choose workers, submit, watch, fetch, and set the workers free."""

import asyncio
import pickle
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from distributed import CancelledError, Client, Future
from distributed.comm import get_address_host
from distributed.core import clean_exception

from workshop_utils.job.errors import JobError, SchedulerLost, Stopped, WorkerDied
from workshop_utils.job.rank import SETTLE_S, Place, run_rank, serve_store
from workshop_utils.job.stacks import Standing, stacks_of
from workshop_utils.job.workers import alone, await_successors, choose, kill, listed, process_of, workers_of

HEARTBEAT_S = 2.0  # between two looks at the workers where nothing is heard; of a death, the scheduler tells at once
GRACE_S = 2.0  # for the other ranks to end by themselves, before their workers are restarted
AGAIN_S = 0.1  # between two questions to the scheduler where it has no event to tell of


class Attempt:
    """One start of a job's ranks; `number` of them came before. All but `cancel` and `hear` run in the job's thread."""

    def __init__(self, client: Client, name: str, number: int, changed: threading.Condition) -> None:
        self.client, self.name, self.number = client, name, number
        self.members: dict[str, dict[str, Any]] = {}  # what the scheduler knew of each worker, in rank order
        self.ranks: list[Future] = []
        self._tasks: list[Future] = []
        self._failed: tuple[int, BaseException, float] | None = None  # rank, its error, when it was heard of
        self._changed, self._news, self._cancelled = changed, False, False
        self._timeout: float | None = None
        self._deadline = float("inf")
        self._store: Future | None = None  # its release closes the server

    def start(self, bootstrap: Callable, call: bytes, *, n_workers: int | None, max_restarts: int, patience: float,
              timeout: float | None, deadline: float) -> None:  # fmt: skip
        """Return once each rank is with its worker. patience: seconds to wait for idle workers."""
        self._timeout, self._deadline = timeout, deadline
        give_up = time.monotonic() + patience
        while not self.members:
            with alone(self.client):
                try:
                    self.members = choose(self.client, n_workers)
                except JobError as error:
                    if time.monotonic() > give_up or isinstance(error, SchedulerLost):
                        raise
                else:
                    self._submit(bootstrap, call, max_restarts)
                    return
            self._pause(AGAIN_S)
            self._raise_for_cancelled()

    def results(self) -> list[Any]:
        """Return what the ranks returned, in rank order; raise the reason where they do not."""
        self._watch(self._tasks)
        # Fetched under the same watch: a worker may die while it sends.
        gathering = self.client.gather(self.ranks, asynchronous=True)
        loop = self.client.loop.asyncio_loop  # type: ignore[union-attr]
        fetched = asyncio.run_coroutine_threadsafe(gathering, loop)
        try:
            self._watch([fetched])
        finally:
            fetched.cancel()  # does nothing once it is done
        return [pickle.loads(result) for result in fetched.result()]

    def hear(self, failure: dict[str, Any]) -> None:
        """Take note of a rank's failure, as `rank.run_rank` tells of it."""
        if failure["attempt"] == self.number and not self._failed:
            _, error, remote = clean_exception(failure["exception"], failure["traceback"])
            assert error is not None
            self._failed = failure["failed"], error.with_traceback(remote), time.monotonic()
            self._notice()

    def cancel(self) -> None:
        """Have the ranks ended."""
        self._cancelled = True
        self._notice()

    def standing(self) -> dict[int, Standing]:
        """Return where each rank that is at work stands, by rank."""
        found = stacks_of(self.client, list(self.members), (self.name, self.number))
        return {rank: found[address] for rank, address in enumerate(self.members) if address in found}

    def free(self) -> None:
        """Return when no rank is at work any more, and restarted workers are back."""
        self._store = None
        grace_ends = time.monotonic() + (0 if self._cancelled else GRACE_S)
        while any(task.status == "pending" for task in self._tasks) and time.monotonic() < grace_ends:
            self._pause(grace_ends - time.monotonic())
        dead = self._dead()
        status = dict(zip(self.members, [task.status for task in self._tasks], strict=False))
        self.client.cancel([task for task in self._tasks if not task.done()])
        busy = {a for a in status if status[a] not in ("finished", "error")}  # a cancelled task's thread may still run
        # Where one rank died while they connected, gloo in the others is broken: their next launches hung or failed.
        stuck = [address for address in (self.members if dead else busy) if address not in dead]
        if immortal := [address for address in stuck if not self.members[address]["nanny"] and address in busy]:
            warnings.warn(f"Worker {listed(immortal)} has no nanny to restart it, and stays busy until its rank "
                          "returns: end that process, and start workers with nannies.", stacklevel=2)  # fmt: skip
        stuck = [address for address in stuck if self.members[address]["nanny"]]
        kill(self.client, stuck)  # a thread cannot be stopped, a process can
        await_successors(self.client, [self.members[address] for address in {*dead, *stuck}])

    def _submit(self, bootstrap: Callable, call: bytes, max_restarts: int) -> None:
        for address in self.members:  # under this topic the scheduler tells of the worker's end
            self.client.subscribe_topic(address, self._notice)
        self._notice()  # there are members now
        workers = list(self.members)
        host, world_size = get_address_host(workers[0]), len(workers)
        submit = partial(self.client.submit, pure=False, allow_other_workers=False)
        self._store = submit(serve_store, host, workers=workers[:1], key=f"store-{uuid.uuid4().hex}")
        port = submit(getattr, self._store, "port", workers=workers[:1])  # the store itself stays where it is
        self._tasks = [port]
        self._watch(self._tasks)
        places = [
            Place(self.name, rank, world_size, self.number, max_restarts, process_of(self.members[address]))
            for rank, address in enumerate(workers)
        ]
        ranks = [
            submit(run_rank, bootstrap, call, place, host, port.result(),
                   workers=[address], key=(self.name, self.number, place.rank))
            for address, place in zip(workers, places, strict=True)
        ]  # fmt: skip
        with self._changed:
            self._tasks = self.ranks = ranks
            self._changed.notify_all()
        while not self._are_assigned():
            self._pause(AGAIN_S / 10)
            self._look()

    def _are_assigned(self) -> bool:
        assigned = {key for keys in self.client.processing().values() for key in keys}
        return all(rank.key in assigned or rank.done() for rank in self.ranks)

    def _watch(self, awaited: list[Any]) -> None:
        """Return when all of these futures are done, and none failed; raise the reason why they will not be."""
        for future in awaited:
            future.add_done_callback(self._notice)
        while not all(future.done() for future in awaited):
            self._pause(HEARTBEAT_S)
            self._look()
        if any(task.status != "finished" for task in self._tasks):
            self._look()

    def _look(self) -> None:
        """Raise the reason why the ranks will not all finish, if there is one by now."""
        self._raise_for_cancelled()
        rank, error, heard = self._failed or (None, None, float("inf"))
        own = list(self.members)[rank] if rank is not None else None
        dead = self._dead()
        if others := [address for address in dead if address != own]:  # of which a rank's error is a consequence
            raise WorkerDied(
                f"Rank {listed(sorted(map(list(self.members).index, others)))} died: worker {listed(others)} was "
                "killed, ran out of memory, or was lost with its machine. To go on after that, give launch "
                "max_restarts, and let the function resume from a checkpoint."
            )
        over = all(task.done() for task in self._tasks)
        if error and (over or dead or time.monotonic() > heard + SETTLE_S):
            raise error
        if over and (failed := [task for task in self._tasks if task.status == "error"]):  # before it was a rank
            task = min(failed, key=lambda task: isinstance(task.exception(), Stopped))
            raise task.exception().with_traceback(task.traceback())
        if time.monotonic() > self._deadline:
            late = [rank for rank, task in enumerate(self._tasks) if not task.done()]
            standing = self.standing()
            where = "; ".join(f"rank {rank}: {one.place}" for rank, one in standing.items()) or "no rank has started"
            timed_out = TimeoutError(f"Rank {listed(late)} had not returned after {self._timeout} s ({where}): give "
                                     "the job a longer timeout, or see there who waits for whom.")  # fmt: skip
            timed_out.add_note("\n".join(f"Rank {rank}:\n{one.stack}" for rank, one in standing.items()))
            raise timed_out

    def _raise_for_cancelled(self) -> None:
        if self._cancelled:
            raise CancelledError(f"{self.name} was cancelled.")
        if self.client.status == "connecting":  # it will look for one at the same address for a while
            raise SchedulerLost("The connection to the scheduler is lost, and with it the job: its process has ended, "
                                "or the network to it. Start or join a cluster, and launch again.")  # fmt: skip
        if any(task.status == "cancelled" for task in self._tasks):
            raise CancelledError(f"{self.name} lost its tasks to client.cancel(), client.restart() or client.close().")

    def _dead(self) -> list[str]:
        alive = {process_of(worker) for worker in workers_of(self.client).values()}
        return [address for address, worker in self.members.items() if process_of(worker) not in alive]

    def _pause(self, seconds: float) -> None:
        """Return at the next news, at the latest after so many seconds."""
        now = time.monotonic()
        settled = self._failed[2] + SETTLE_S if self._failed else float("inf")
        with self._changed:
            self._changed.wait_for(lambda: self._news, max(0.0, min(seconds, self._deadline - now, settled - now)))
            self._news = False

    def _notice(self, *_: object) -> None:
        with self._changed:
            self._news = True
            self._changed.notify_all()
