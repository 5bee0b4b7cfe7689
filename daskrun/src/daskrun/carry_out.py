"""Carry out what `decide` decides, on the client's event loop: ask Dask for it, and tell what Dask answers.

No interrupt reaches that loop; it ends with the client alone.
"""

import asyncio
import copy
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from distributed import CancelledError, Client, Future
from distributed.core import clean_exception

from daskrun.ask import LOST, ask_looks, ask_scheduler, let_ends_be_watched, lost_tasks, results_of
from daskrun.choose import choose
from daskrun.decide import Action, Choose, Decisions, Examine, Fetch, Free, Later, Limits, Phase, Start
from daskrun.errors import JobError, SchedulerLost, add_note, listed
from daskrun.explain import cannot_begin, stalled, timed_out
from daskrun.free import free, free_all_the_same
from daskrun.look import Look
from daskrun.on_scheduler import ends, known
from daskrun.owners import KINDS, Claimed, Request, Worker
from daskrun.rank import Assignment, Attempt, Meeting, deliver, run_rank

START_S = 300  # time limit for all ranks to begin
FIRST = 100  # the ranks' priority: they come before what waits on a worker


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
        self._watching: asyncio.Task | None = None  # nannies are told to remember how this attempt's workers end
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
        return await ask_looks(self._client, self._attempt, late, self._state.begun), ended

    @property
    def _attempt(self) -> Attempt:
        return Attempt(self._task.job, self._state.attempt)

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
            try:
                self._carry_out(event(*about))
            except Exception as error:
                self._give_up(error)

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
                case Free():
                    self._spawn(self._free(action))
        self._wake()

    def _spawn(self, work: Coroutine, ends_with_attempt: bool = False) -> asyncio.Task:
        """Do this in the background; where it fails, nothing else can be done for the job, and it ends."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._give_up(error)

        task = self._loop.create_task(guarded())
        for tasks in (self._background, self._watches) if ends_with_attempt else (self._background,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    def _give_up(self, error: Exception) -> None:
        wrong = JobError(f"The launcher failed, which is a mistake of its own: {error!r}.")
        known_error = error if isinstance(error, JobError) else wrong.with_traceback(error.__traceback__)
        self._state.scheduler_gone(known_error)
        self._wake()
        begun = [self._members[rank] for rank in self._state.begun]
        asyncio.ensure_future(free_all_the_same(self._client, self._task.job, begun, self.ranks))

    def _hear(self, event: tuple[float, Sequence]) -> None:
        """Take what ranks, and the scheduler, log under the job's name."""
        kind, *about = event[1]
        if kind == "row":
            self.rows += about
            self._wake()
        elif kind == "began":
            attempt, rank, _ = about
            self._tell(self._state.rank_began, rank, attempt=attempt)
        elif kind == "serves":
            attempt, host, port = about
            if attempt == self._state.attempt and not self._state.ending:
                self._spawn(self._deliver(Meeting(host, port, self._task.call)), ends_with_attempt=True)
        elif kind == "failed":
            attempt, rank, exception, traceback, note, may_follow = about
            _, error, remote = clean_exception(exception, traceback)
            assert error is not None
            add_note(error, note)
            self._tell(self._state.failed, rank, error.with_traceback(remote), may_follow, attempt=attempt)
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
        task, submit = self._task, partial(self._client.submit, pure=False, priority=FIRST)
        self.ranks = []
        for rank, worker in enumerate(self._members):
            mine = Assignment(task.job, rank, self._state.size, attempt, task.limits.max_restarts, worker.process)
            where, key = [worker.address], (task.job, attempt, rank)
            self.ranks.append(submit(run_rank, task.bootstrap, mine, workers=where, key=key))
            self._spawn(self._watch(attempt, rank, self.ranks[rank]), ends_with_attempt=True)
        self._spawn(self._mind_the_start(attempt), ends_with_attempt=True)
        self._watching = self._spawn(let_ends_be_watched(self._client, self._members), ends_with_attempt=True)
        if task.limits.stall_after is not None:
            self._spawn(self._mind_silence(task.limits.stall_after), ends_with_attempt=True)

    async def _deliver(self, meeting: Meeting) -> None:
        """Send the ranks what they wait for, once the end of their workers is watched."""
        assert self._watching
        await self._watching
        addresses = [worker.address for worker in self._members]
        with suppress(OSError):  # the scheduler is lost, which the futures tell, as they do of a dead worker
            await self._client.run(deliver, self._attempt, meeting, workers=addresses, on_error="return")

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
        begun_by = time.monotonic() + START_S
        while self._state.phase is Phase.STARTING:
            await asyncio.sleep(1)
            there = {w.process: w for w in await ask_scheduler(self._client, known, self._state.workers)}
            for rank, member in enumerate(self._members):
                worker = there.get(member.process)
                if worker is None:
                    self._tell(self._state.worker_gone, rank, attempt=attempt)
                elif rank not in self._state.begun:
                    late_s = START_S if time.monotonic() > begun_by else None
                    if error := cannot_begin(rank, worker, self._task.job, late_s):
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

    async def _free(self, how: Free) -> None:
        for watch in self._watches:
            watch.cancel()
        self.warnings += await free(self._client, self._attempt, self._members, self.ranks, self._state, how)
        if how.keep:
            self.ranks = []
        self._tell(self._state.freed)
