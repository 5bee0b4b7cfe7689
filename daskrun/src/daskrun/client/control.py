"""One job: claim workers, run an attempt on them, free them; after a death, start again. Read `Control.run` first.

Who owns a worker? The job, from `_claim` until `_free`; the table is in `claims`, on the scheduler. When does a rank's
process end? By itself, or in `_free`. (If the client is gone, or a rank begins when its attempt is over,
`scheduler.ClaimsPlugin` ends it.) Where does a stop take effect? In `until`, wherever the job waits. Where does the
time limit? While workers are claimed, ranks run and results are fetched.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from signal import Signals
from types import TracebackType
from typing import Any

from distributed import CancelledError, KilledWorker

from daskrun.claims import Claimed, Denied, Request
from daskrun.client.attempt import Attempt
from daskrun.client.cluster import Cluster, tasks_lost
from daskrun.client.limits import Limits
from daskrun.errors import (
    JobError,
    RankExited,
    ScriptFailed,
    WorkerDied,
    add_note,
    own_mistake,
    ranks_do,
    ranks_named,
)
from daskrun.protocol import AttemptId, Event, Failure, Function, JobState, Script, places
from daskrun.protocol import Ended as EndedProcess
from daskrun.why.look import Look
from daskrun.why.verdict import check_can_begin, diagnosed, stalled, timed_out
from daskrun.worker.output import Lines

SETTLE_S = 1.0  # wait after a rank's error: the death that caused it may be reported later
GATHER_S = 0.1  # wait after a death, so that one message names all workers that died together
POLL_S = 0.2  # poll interval while claiming
CLOSE_S = 7.0  # wait for the ranks of workers that are being closed, which have a little less
START_S = 300  # time limit for all ranks to begin


class Ended(Exception):
    """The job ends with this error, which its user is told."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def _text(error: BaseException) -> str:
    """Return an error in a line."""
    with suppress(Exception):  # not every error has a text
        said = error.summary if isinstance(error, JobError) else str(error)
        last = error.output.rpartition("\n")[2] if isinstance(error, ScriptFailed) else ""  # its error itself
        return " ".join(filter(None, [f"{type(error).__name__}: {said.partition(chr(10))[0]}", last]))
    return type(error).__name__


class Control:
    """A job's life. All of it happens on the client's event loop.

    Attributes:
        doing: A phrase for ``repr``.
        attempt: None until workers are claimed.
        size: Its world size, or the last one's.
        failures: That the job survived.
        rows: Metrics so far.
        output: What ranks have printed and nothing has shown, as (rank, attempt, lines).
        warnings: For the job's caller.
        replies: To requests, by rank and number of the request.
        prompts: (place, text) of each rank whose debugger waits for a line.
        debugged: Ranks that are in the debugger.
        stopped: Why the job has to end, None while it may go on.
        stop_signal: With which its user stopped it, 0 for none.
        traceback: Of the error, as it came from its rank.
        is_over: Whether ``results`` or ``error`` is there, and the workers are free.
    """

    def __init__(self, cluster: Cluster, job: str, program: Function | Script, limits: Limits) -> None:
        self.cluster, self.job, self.limits, self.loop = cluster, job, limits, cluster.loop
        self.doing, self.size, self.stop_signal, self.is_over = "waiting for workers", 0, 0, False
        self.attempt: Attempt | None = None
        self.failures: list[BaseException] = []
        self.rows: list[dict[str, Any]] = []
        self.output: deque[tuple[int, int, Lines]] = deque()
        self.warnings: list[str] = []
        self.replies: dict[tuple[int, int], bytes] = {}
        self.prompts: dict[int, tuple[str, str]] = {}
        self.debugged: set[int] = set()
        self.stopped: BaseException | None = None
        self.results: list[bytes] = []
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None
        self._program, self._heard_at, self._news = program, 0.0, asyncio.Event()
        self._deadline = None if limits.time_limit is None else self.loop.time() + limits.time_limit
        self._tasks: list[asyncio.Task] = []  # what is done beside the job while an attempt runs

    def stop(self, error: BaseException) -> None:
        """End the job with this error, or now if its end is certain; to be called on the loop."""
        if self.stopped is None and not self.is_over:
            self.stopped = error
            self.tell_all()

    async def until(self, condition: Callable[[], object], seconds: float | None = None) -> None:
        """Wait until the condition holds, or for so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._news.wait()

    def tell_all(self) -> None:
        """Let all who wait look again whether their condition holds."""
        self._news.set()
        self._news = asyncio.Event()

    # --- the job, from top to bottom

    async def run(self) -> None:
        """See the job through to its end; it raises nothing."""
        try:
            self.cluster.hear(self._hear)
            self.results = await self._attempts()
            self.doing = "finished"
        except Ended as ended:
            self.error, self.traceback = ended.error, ended.error.__traceback__
        except JobError as error:  # the scheduler is lost, or has another version
            self.error = error.with_traceback(None)
        except asyncio.CancelledError:  # the client was closed, which ends its loop
            self.error = self.stopped or tasks_lost(self.job)
        except Exception as error:
            self.error = own_mistake(error)
        finally:
            self.cluster.hear_no_more()
            self.is_over = True
            self.tell_all()

    async def _attempts(self) -> list[bytes]:
        last = None
        while True:
            attempt = self.attempt = await self._claim(last)
            ended = JobState.FINISHED, ""
            try:
                failure = await self._attempt(attempt)
                if failure is None:
                    return [attempt.results[rank] for rank in range(attempt.size)]
                if self.stop_signal or len(self.failures) == self.limits.max_restarts:
                    raise Ended(failure)
                self.failures.append(failure)
                self._tell_of(failure)
                ended = JobState.ENDING, _text(failure)
            except BaseException as error:
                ended = self._ending(error)
                raise
            finally:
                await self._free(attempt, *ended)
            last, self.attempt = attempt, None

    def _tell_of(self, failure: BaseException) -> None:
        """Have the user told at once of a failure that the job survives: the next row may be minutes away."""
        limits, n = self.limits, len(self.failures)
        said = failure.summary if isinstance(failure, JobError) else _text(failure)
        text = f"{said} Starting again ({n} of max_restarts={limits.max_restarts})"
        if self.attempt and self.attempt.gone:
            text += f", once another worker is there (wait_for_successors={limits.wait_for_successors:g})"
        self.warnings.append(f"{text}.")

    async def _claim(self, last: Attempt | None) -> Attempt:
        """Return a new attempt, whose workers are the job's own from now on. last: the one before."""
        self.doing = "waiting for workers"
        limits = self.limits
        number = last.id.number + 1 if last else 0
        if last is None:
            wanted, minimum, most = limits.most, limits.fewest, limits.most
            patience_s = limits.wait_for_workers
        else:  # with n_workers=(fewest, most), take more workers if there are any, and fewer once the wait is over
            wanted, minimum, most = last.size, limits.fewest or last.size, max(last.size, limits.most or 0)
            patience_s = limits.wait_for_successors
        named = last.members if last and limits.names else ()
        request = Request(
            job=self.job,
            client=self.cluster.client_id,
            most=most,
            among=(*limits.names, *(member.slot for member in named)),  # which a successor has, too
            attempt=number,
            attempts=limits.max_restarts + 1,
        )
        try:
            if last and self.stop_signal:  # since the last attempt's death
                raise Ended(self.failures.pop())
            claimed = await self._claim_patiently(request, minimum, wanted, self.loop.time() + patience_s)
            if isinstance(claimed, Denied):
                raise Ended(self._not_resumed(claimed.error) if last else claimed.error)
        except BaseException as error:
            # Slots kept from the last attempt, or just claimed.
            await self.cluster.give_back(*self._ending(error))
            raise
        self.size = len(claimed.workers)
        hosts = [
            f"{worker.host} {worker.address}" if limits.virtual_local_rank else worker.host
            for worker in claimed.workers
        ]
        return Attempt(AttemptId(self.job, number), claimed.workers, places(hosts))

    async def _claim_patiently(
        self, request: Request, minimum: int | None, wanted: int | None, give_up: float
    ) -> Claimed | Denied:
        """Ask for the most, else for as many as are wanted, until `give_up`; then for the minimum, and return a no."""
        while True:
            late = self.loop.time() >= give_up
            sizes = [minimum] if late else list(dict.fromkeys([request.most, wanted]))
            for fewest in sizes:
                if self.stopped:
                    raise Ended(self.stopped)
                answer = await self.cluster.claim(replace(request, fewest=fewest))
                if isinstance(answer, Claimed):
                    return answer
                denied = answer
                if denied.may_change:
                    break
            if late and (request.attempt or not denied.may_change):
                return denied
            if self._time_left() == 0:
                raise Ended(TimeoutError(f"The job had no workers after {self.limits.time_limit:g} s: {denied.error}"))
            await self.until(lambda: self.stopped, POLL_S)

    async def _attempt(self, attempt: Attempt) -> BaseException | None:
        """Run all ranks until they have returned, and bring the results; or return why to start again."""
        self.doing = "starting its ranks"
        self.cluster.submit(attempt, self.limits)
        self.tell_all()
        for rank in range(attempt.size):
            self._also(self._see_end, attempt, rank)
        self._also(self._see_start, attempt)
        if self.limits.stall_after:
            self._also(self._mind_silence, attempt, self.limits.stall_after)
        await self._until_or_end(lambda: attempt.has_failed or attempt.all_over, attempt)
        if not attempt.has_failed and len(attempt.results) < attempt.size:
            error = JobError("A rank's result was lost with its worker while it was fetched: launch the job again.")
            attempt.fail(None, error, may_follow=True)  # a death may be told later
        return await self._verdict(attempt) if attempt.has_failed else None

    async def _verdict(self, attempt: Attempt) -> BaseException:
        """Return the failure after which the job may start again, or end the job with the error of a rank."""
        self.doing = "looking for the cause of a failure"
        await self.until(lambda: not self.debugged - attempt.dead or self.stopped)  # other ranks are looked at
        await self.until(lambda: attempt.cause is not None or self.stopped, SETTLE_S)
        if attempt.dead:
            await asyncio.sleep(GATHER_S)
        if self.stopped:
            raise Ended(self.stopped)
        told = sorted(rank for rank, (how, _) in attempt.died.items() if how.code == -self.stop_signal)
        if self.stop_signal and told:
            name = Signals(self.stop_signal).name
            raise Ended(JobError(f"The job was stopped, and {ranks_do(told, 'has', 'have')} ended with {name}."))
        if self.stop_signal and isinstance(attempt.error, RankExited):
            how = f"rank {attempt.error.rank} ended with sys.exit({attempt.error.code!r})"
            raise Ended(JobError(f"The job was stopped, and {how}."))
        dead = sorted(attempt.dead - {attempt.failed_rank})  # a rank that raised and then died: its error counts
        error = attempt.error
        if error is None or (dead and attempt.cause != attempt.failed_rank):
            gone = sorted(attempt.gone)
            ends = await self.cluster.worker_ends([attempt.members[rank] for rank in gone]) if gone else []
            closing = {attempt.members[rank].process for rank, (why, _) in zip(gone, ends, strict=True) if why}
            await self.until(lambda: closing <= attempt.closed or self.stopped, CLOSE_S)  # for the last rows
            workers = dict(zip(gone, ends, strict=True))
            return diagnosed(WorkerDied, attempt.death, workers, self.limits.max_restarts, len(self.failures))
        if dead:
            add_note(error, f"{ranks_named(dead).capitalize()} died after that.")
        if isinstance(error, (*self.limits.retried, ScriptFailed)):
            return error
        if self.limits.max_restarts and not self.stop_signal:
            add_note(error, "It was not started again: max_restarts is for deaths; set retry for exceptions.")
        raise Ended(error)

    async def _free(self, attempt: Attempt, state: JobState, error: str) -> None:
        """End what is left of an attempt, and give up the workers. state: ENDING if another attempt follows."""
        self.doing = "ending its ranks"
        for task in self._tasks:
            task.cancel()
        # Who cancels waits for no rank; a rank that has hung up before needs no time either.
        grace_s = 0 if self.stopped or state is JobState.FINISHED else self.limits.shutdown_timeout
        await self.cluster.free(attempt, state, error, grace_s)
        self._tasks = []
        self.prompts.clear()
        self.debugged.clear()

    # --- its parts

    def _ending(self, error: BaseException) -> tuple[JobState, str]:
        """Return what the job has come to with an error, and a text for it."""
        error = error.error if isinstance(error, Ended) else error
        if error is self.stopped and isinstance(error, CancelledError):  # and no rank's own
            return JobState.CANCELLED, _text(error)
        return JobState.STOPPED if self.stop_signal else JobState.FAILED, _text(error)

    async def _until_or_end(self, condition: Callable[[], object], attempt: Attempt) -> None:
        """Wait until the condition holds; end the job if it is stopped before, or its time is up."""
        await self.until(lambda: condition() or self.stopped, self._time_left())
        if self.stopped:
            raise Ended(self.stopped)
        if not condition():
            looks = await self.cluster.looks(attempt)
            raise Ended(diagnosed(TimeoutError, timed_out, self.limits.time_limit, attempt.size, *looks))

    def _time_left(self) -> float | None:
        return None if self._deadline is None else max(0, self._deadline - self.loop.time())

    def _not_resumed(self, error: JobError) -> BaseException:
        """Return the last failure, as the end of a job that got no workers to go on with."""
        death, waited = self.failures[-1], self.limits.wait_for_successors
        death.__cause__ = error
        add_note(death, f"No worker took its place in time (wait_for_successors={waited:g}), so it was not resumed.")
        return death

    def _hear(self, kind: str, *about: Any) -> None:
        """Take what ranks send, and what the scheduler says of workers."""
        attempt = self.attempt
        if kind == Event.ROW:
            self.rows.extend(about)
        elif kind == Event.OUTPUT:
            number, rank, lines = about
            self.output.append((rank, number, lines))
        elif kind == Event.NOTICE:
            self.warnings.extend(about)
        elif kind == Event.GONE and attempt:
            attempt.lose_worker(*about)
        elif kind == Event.CLOSED and attempt:
            attempt.closed.update(about)
        elif attempt and kind != Event.USAGE and about[0] == attempt.id.number:
            self._hear_rank(kind, attempt, *about[1:])
        if kind in (Event.ROW, Event.OUTPUT):
            self._heard_at = self.loop.time()
        if kind != Event.USAGE:
            self.tell_all()

    def _hear_rank(self, kind: str, attempt: Attempt, rank: int, *about: Any) -> None:
        if kind == Event.BEGAN:
            attempt.begun.add(rank)
            if rank == 0:  # it listens for the others
                self._also(self.cluster.introduce, attempt, self._program, *about[1:])
            if len(attempt.begun) == attempt.size:
                self.doing = "running"
        elif kind == Event.FAILED:
            attempt.hear_failure(rank, Failure(*about))
        elif kind == Event.REPLY:
            number, answer = about
            self.replies[rank, number] = answer
            self.debugged.discard(rank)
        elif kind == Event.PROMPT:
            self.prompts[rank] = about[0], about[1]
            self.debugged.add(rank)
        elif kind == Event.RESUMED:
            self.debugged.discard(rank)
            self.prompts.pop(rank, None)
            if lines := "".join(about).splitlines():
                self.output.append((rank, attempt.id.number, [(False, line.encode()) for line in lines]))
        elif kind == Event.DIED:
            said, *ended = about
            attempt.hear_death(rank, EndedProcess(*ended), said)

    async def looks(self) -> tuple[list[Look], list[int]]:
        """Return (how each rank at work looks, ranks that are over)."""
        return await self.cluster.looks(self.attempt) if self.attempt and not self.is_over else ([], [])

    # --- beside the job

    def _also(self, work: Callable[..., Coroutine], *about: Any) -> None:
        """Do this beside the job. If it fails, the job fails."""

        async def guarded() -> None:
            try:
                await work(*about)
            except (JobError, CancelledError) as error:
                self.stop(error)
            except Exception as error:
                self.stop(own_mistake(error))
            finally:
                self.loop.call_soon(self.tell_all)

        self._tasks.append(self.loop.create_task(guarded()))

    async def _see_end(self, attempt: Attempt, rank: int) -> None:
        try:
            result = await self.cluster.result(attempt.futures[rank])
        except KilledWorker:  # Dask's word for a death, if it may not start a task again
            attempt.lose(rank)
            return
        if result is not None:
            attempt.results[rank] = result
        attempt.over.add(rank)

    async def _see_start(self, attempt: Attempt) -> None:
        """Stop the job if a rank cannot begin. Also notice a worker that died before we heard its "gone"."""
        begun_by = self.loop.time() + START_S
        while len(attempt.begun) < attempt.size and not attempt.has_failed:
            await asyncio.sleep(1)
            late_s = START_S if self.loop.time() > begun_by else None
            for rank, worker in enumerate(await self.cluster.known(attempt.members)):
                if worker is None:
                    attempt.lose_worker(attempt.members[rank].process)
                elif rank not in attempt.begun and not attempt.has_failed:
                    check_can_begin(rank, worker, self.job, late_s)
            self.tell_all()

    async def _mind_silence(self, attempt: Attempt, seconds: float) -> None:
        """Warn once per silence of so many seconds, saying which rank waits for which."""
        since, warned_at = self.loop.time(), 0.0
        while True:
            await asyncio.sleep(min(seconds, 1))
            now = self.loop.time()
            is_running = len(attempt.begun) == attempt.size and not (attempt.has_failed or attempt.all_over)
            since = max(since, self._heard_at) if is_running else now
            if now - since >= seconds and warned_at < since:
                warned_at = now
                looks = await self.cluster.looks(attempt)
                self.warnings.append(diagnosed(str, stalled, now - since, *looks))
                self.tell_all()
