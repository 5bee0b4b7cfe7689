"""Carry out what `decide` decides, on the client's event loop: ask Dask for it, and tell what Dask answers.

No interrupt reaches that loop; it ends with the client alone.
"""

import asyncio
import copy
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from distributed import CancelledError, Client, Future
from distributed.comm import get_address_host
from distributed.core import clean_exception

from workshop_utils.job.ask import LOST, ask_looks, ask_scheduler, let_ends_be_watched, lost_tasks, results_of
from workshop_utils.job.choose import choose
from workshop_utils.job.decide import Action, Choose, Decisions, Examine, Fetch, Free, Later, Limits, Phase, Start
from workshop_utils.job.errors import JobError, SchedulerLost, listed
from workshop_utils.job.explain import cannot_begin, stalled, timed_out
from workshop_utils.job.look import Look
from workshop_utils.job.on_scheduler import ends, known, replace
from workshop_utils.job.owners import KINDS, Claimed, Request, Worker
from workshop_utils.job.rank import REACH_S, Assignment, arrange_meeting, run_rank, serve_store

START_S = 300  # time limit for all ranks to begin: rank 0's worker imports PyTorch first
SLOWEST_BYTES_PER_S = 10**7  # of a network that is taken to work: a function with large arguments takes its time


class Task(NamedTuple):
    """What a job runs. job: its name. call: (function, args, kwargs), pickled."""

    job: str
    bootstrap: Callable
    call: bytes
    limits: Limits


class Shell:
    """What stands between the decisions of a job and Dask.

    rows: metrics so far. ranks: the futures of the latest attempt, none once their results are here. packed: these
    results, pickled. warnings: for whoever launched the job.
    """

    def __init__(self, client: Client, state: Decisions, task: Task) -> None:
        self.rows: list[dict[str, Any]] = []
        self.ranks: list[Future] = []
        self.packed: list[bytes] = []
        self.warnings: list[str] = []
        self._client, self._state, self._task = client, state, task
        self._loop = client.loop.asyncio_loop  # type: ignore[union-attr]
        self._news = asyncio.Event()
        self._members: tuple[Worker, ...] = ()
        self._denied: JobError | None = None  # the last reason why there were no workers yet
        self._meeting: list[Future] = []  # released, they close rank 0's store
        self._background: set[asyncio.Task] = set()
        self._watches: set[asyncio.Task] = set()  # those of them that end with the attempt
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Return whether the condition holds, after so many seconds at the latest; for threads but the loop's.

        condition: may ask for anything here or in the job's state.
        """
        if condition():
            return True
        reached = asyncio.run_coroutine_threadsafe(self._reach(condition), self._loop)
        try:
            reached.result(seconds)
        except TimeoutError:
            reached.cancel()
        except CancelledError:  # the client was closed, and its loop ends
            self._running.result()
        return bool(condition())

    def stop(self, error: BaseException) -> None:
        """End the job with this error, unless it is over; return at once."""
        with suppress(RuntimeError):  # the client is closed and its loop has ended, and so has the job
            self._loop.call_soon_threadsafe(self._tell, self._state.stop, error)

    async def looks(self) -> tuple[list[Look], list[int]]:
        """Return (how each rank at work looks, ranks that have returned or raised an error)."""
        ended = [rank for rank, future in enumerate(self.ranks) if future.done()]
        late = {rank: self._members[rank] for rank in range(len(self.ranks)) if rank not in ended}
        return await ask_looks(self._client, self._task.job, self._state.attempt, late), ended

    # --- the job's life

    async def _run(self) -> None:
        self._client.subscribe_topic(self._task.job, self._hear)
        if self._task.limits.timeout is not None:
            self._spawn(self._end_in_time(self._task.limits.timeout))
        try:
            self._carry_out(self._state.begin())
            await self._reach(lambda: self._state.over)
        except asyncio.CancelledError:  # the client was closed, which ends its loop
            self._state.scheduler_gone(lost_tasks(self._task.job))
        finally:
            for task in self._background:
                task.cancel()
            with suppress(Exception):  # the scheduler may be lost
                self._client.subscribe_topic(self._task.job, lambda _: None)  # a client keeps its last handler for good
                self._client.unsubscribe_topic(self._task.job)
            self._wake()

    async def _reach(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._news.wait()

    def _wake(self) -> None:
        """Let all who wait look again whether their condition holds."""
        self._news.set()
        self._news = asyncio.Event()

    def _tell(self, event: Callable[..., list[Action]], *about: Any, attempt: int | None = None) -> None:
        """Tell the decisions of an event, unless it comes too late."""
        if not self._state.over and attempt in (None, self._state.attempt):
            self._carry_out(event(*about))

    def _carry_out(self, actions: list[Action]) -> None:
        attempt = self._state.attempt
        for action in actions:
            match action:
                case Choose():
                    self._spawn(self._choose(action))
                case Start():
                    self._start(attempt)
                case Later(seconds, event):
                    self._loop.call_later(seconds, partial(self._tell, event, attempt=attempt))
                case Examine(ranks):
                    self._spawn(self._examine(ranks, attempt), ends_with_attempt=True)
                case Fetch():
                    self._spawn(self._fetch(attempt), ends_with_attempt=True)
                case Free(kill, keep):
                    self._spawn(self._free(kill, keep))
        self._wake()

    def _spawn(self, work: Coroutine, ends_with_attempt: bool = False) -> None:
        """Do this in the background; where it fails, nothing else can be done for the job, and it ends."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                wrong = JobError(f"The launcher failed, which is a mistake of its own: {error!r}.")
                known_error = error if isinstance(error, JobError) else wrong.with_traceback(error.__traceback__)
                self._tell(self._state.scheduler_gone, known_error)
                asyncio.ensure_future(self._free_all_the_same())

        task = self._loop.create_task(guarded())
        for tasks in (self._background, self._watches) if ends_with_attempt else (self._background,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _hear(self, event: tuple[float, Sequence]) -> None:
        """Take what ranks, and the scheduler, log under the job's name."""
        kind, *about = event[1]
        if kind == "row":
            self.rows += about
            self._wake()
        elif kind in ("began", "joined"):
            attempt, rank = about
            self._tell(self._state.rank_began if kind == "began" else self._state.rank_joined, rank, attempt=attempt)
        elif kind == "failed":
            attempt, rank, exception, traceback, note = about
            _, error, remote = clean_exception(exception, traceback)
            assert error is not None
            with suppress(Exception):  # not every exception takes a note
                error.add_note(note)
            self._tell(self._state.failed, rank, error.with_traceback(remote), attempt=attempt)
        elif kind == "gone":
            self._spawn(self._lose(self._state.attempt, *about))

    async def _choose(self, action: Choose) -> None:
        has_gpu = self._members[0].has_gpu if self._members else None  # after a death, the kind stays
        request = Request(self._task.job, self._client.id, most=action.most, has_gpu=has_gpu, enough=action.fewest)
        ending, deny = lambda: self._state.ending, partial(setattr, self, "_denied")
        answer = await choose(self._client, request, action, ending, deny)
        if not isinstance(answer, Claimed):
            self._tell(self._state.refused, answer)
            return
        if answer.left_out and not self._members:
            self.warnings.append(
                f"The job takes workers {KINDS[answer.workers[0].has_gpu]} and leaves out {listed(answer.left_out)}: "
                "ranks have to be of one kind."
            )
        self._members = answer.workers
        self._tell(self._state.chosen, [worker.address for worker in answer.workers])

    def _start(self, attempt: int) -> None:
        task, first = self._task, self._members[0].address
        submit = partial(self._client.submit, pure=False)
        store = submit(serve_store, get_address_host(first), workers=[first], key=f"store-{uuid.uuid4().hex}")
        meeting = submit(arrange_meeting, store, task.call, workers=[first], key=f"meeting-{uuid.uuid4().hex}")
        self._meeting = [store, meeting]
        self.ranks = []
        for rank, worker in enumerate(self._members):
            mine = Assignment(task.job, rank, self._state.size, attempt, task.limits.max_restarts, worker.process)
            where, key = [worker.address], (task.job, attempt, rank)
            self.ranks.append(submit(run_rank, task.bootstrap, meeting, mine, workers=where, key=key))
            self._spawn(self._watch(attempt, rank, self.ranks[rank]), ends_with_attempt=True)
        self._spawn(self._mind_the_start(attempt), ends_with_attempt=True)
        self._spawn(let_ends_be_watched(self._client, self._members), ends_with_attempt=True)
        if task.limits.stall_after is not None:
            self._spawn(self._mind_silence(task.limits.stall_after), ends_with_attempt=True)

    async def _watch(self, attempt: int, rank: int, future: Future) -> None:
        # Not distributed.wait, which waits in the loop of the client that was made last.
        error = await future.exception()
        if future.cancelled():
            self._tell(*self._who_cancelled(), attempt=attempt)
        elif error is None:
            self._tell(self._state.rank_ended, rank, attempt=attempt)
        else:
            with suppress(Exception):  # not every exception can be copied
                # The client keeps the original with the future. Raised, it would keep the future, through the frames
                # of its traceback, and nothing of the job would ever be released.
                error = copy.copy(error)
            error = error.with_traceback(await future.traceback())
            self._tell(self._state.rank_ended, rank, error, attempt=attempt)

    def _who_cancelled(self) -> tuple[Callable, BaseException]:
        """Return the event that it is when the tasks were cancelled, and not by the job."""
        if self._client.status == "connecting":  # it tries for a while to connect to the same address
            return self._state.scheduler_gone, SchedulerLost(LOST)
        closed = self._client.status in ("closing", "closed")
        return self._state.scheduler_gone if closed else self._state.stop, lost_tasks(self._task.job)

    async def _mind_the_start(self, attempt: int) -> None:
        """End the job if a rank cannot begin. Deaths are told by the scheduler, but for one before it was asked to."""
        now, call = time.monotonic, self._task.call
        begun_by = fetched_by = now() + START_S
        while self._state.phase is Phase.STARTING:
            await asyncio.sleep(1)
            if self._meeting[-1].status == "finished":  # from now on, workers fetch it from rank 0's
                fetched_by = min(fetched_by, now() + REACH_S + len(call) / SLOWEST_BYTES_PER_S)
            there = {w.process: w for w in await ask_scheduler(self._client, known, self._state.workers)}
            for rank, member in enumerate(self._members):
                worker = there.get(member.process)
                if worker is None:
                    self._tell(self._state.worker_gone, rank, attempt=attempt)
                elif rank not in self._state.begun:
                    late_s = START_S if now() > begun_by else None
                    if error := cannot_begin(rank, worker, self._state.workers[0], late_s, now() > fetched_by):
                        self._tell(self._state.stop, error, attempt=attempt)

    async def _lose(self, attempt: int, address: str) -> None:
        if address not in self._state.workers:
            return
        rank = self._state.workers.index(address)
        returned = self.ranks and self.ranks[rank].status == "finished"
        if returned and any((await self._client.who_has([self.ranks[rank]])).values()):
            return  # an adaptive cluster retires a worker whose rank has returned, and moves the result: no death
        self._tell(self._state.worker_gone, rank, attempt=attempt)

    async def _mind_silence(self, seconds: float) -> None:
        """Warn, each time that no rank has logged anything for so long, of who waits for whom."""
        seen, since = 0, time.monotonic()
        while True:
            await asyncio.sleep(min(seconds, 1))
            if len(self.rows) > seen or self._state.phase is not Phase.RUNNING:
                seen, since = len(self.rows), time.monotonic()
            elif time.monotonic() - since >= seconds:
                self.warnings.append(stalled(time.monotonic() - since, *await self.looks()))
                since = float("inf")  # once, until something is logged

    async def _examine(self, ranks: tuple[int, ...], attempt: int) -> None:
        found = await ask_scheduler(self._client, ends, [self._members[rank] for rank in ranks])
        self._tell(self._state.examined, dict(zip(ranks, found, strict=True)), attempt=attempt)

    async def _fetch(self, attempt: int) -> None:
        try:
            # Without their futures, the workers need not keep the results.
            self.packed, self.ranks = await results_of(self._client, self.ranks), []
        except Exception as error:  # a worker may die while it sends
            self._tell(self._state.failed, None, error, attempt=attempt)
        else:
            self._tell(self._state.fetched, attempt=attempt)

    async def _end_in_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._state.phase is Phase.CHOOSING:
            why = self._denied or "the scheduler has not answered"
            self._tell(self._state.time_is_up, TimeoutError(f"The job had no workers after {seconds} s: {why}"))
            return
        self._tell(self._state.time_is_up, timed_out(seconds, self._state.size, *await self.looks()))

    # --- freeing

    async def _free(self, kill: tuple[int, ...], keep: bool) -> None:
        for watch in self._watches:
            watch.cancel()
        self._meeting = []
        if unfinished := [future for future in self.ranks if not future.done()]:
            await self._client.cancel(unfinished)  # their threads may still run
        if keep:  # or a rank's error, and with it all that its function held, would stay in a process that goes on
            self.ranks = []
        killed = [self._members[rank] for rank in kill]
        if immortal := [worker.address for worker in killed if not worker.has_nanny]:
            self.warnings.append(
                f"Worker {listed(immortal)} has no nanny to restart it, and stays busy until its rank returns: end "
                "that process, and start workers with nannies."
            )
        dead = [self._members[rank] for rank in self._state.gone - self._state.lost]
        await ask_scheduler(self._client, replace, self._task.job, killed, dead, keep)
        self._tell(self._state.freed)

    async def _free_all_the_same(self) -> None:
        """Free the workers of a job that ended by a failure of the launcher, or because the scheduler was too slow."""
        with suppress(Exception):  # the scheduler is lost, and with it all that the job owned
            await self._client.cancel(self.ranks)
            await self._client.run_on_scheduler(replace, self._task.job, list(self._members), [], False)
