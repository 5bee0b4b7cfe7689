"""One job: claim workers, run an attempt on them, free them; after a death, again. `Control.run` reads from the top.

Who owns a worker? From `_claim` until `_free`, the job. When is a process killed? In `_free`, if a rank has begun in it
and the attempt has failed. Where does a timeout take effect? Where `_claim` and `_attempt` wait.
"""

import asyncio
import copy
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from distributed import CancelledError
from distributed.core import clean_exception

from daskrun.attempt import Attempt
from daskrun.claims import KINDS, Claimed, Denied, Request
from daskrun.cluster import LOST, Cluster
from daskrun.errors import JobError, SchedulerLost, WorkerDied, add_note, listed, ranks_named
from daskrun.limits import Limits
from daskrun.rank import AttemptId
from daskrun.why.look import Look
from daskrun.why.verdict import cannot_begin, stalled, timed_out

SETTLE_S = 1.0  # from a rank's error to the verdict: a worker's death, which may be the cause, can come to light later
GATHER_S = 0.1  # from a worker's death to the verdict: the message names all workers that died together
GRACE_S = 2.0  # for the other ranks to end by themselves, before their processes are replaced
START_S = 300  # time limit for all ranks to begin
POLL_S = 0.2  # between two claims

T = TypeVar("T")


class Ended(Exception):
    """The job ends with this error, which its user is told."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Control:
    """A job's life. All of it happens on the client's event loop.

    doing: a phrase for `repr`. attempt: None until workers are claimed. size: its world size, or the last one's.
    failures: the deaths that the job survived. rows: metrics so far. warnings: for whoever launched the job.
    over: `results` or `error` is there, and the workers are free.
    """

    def __init__(self, cluster: Cluster, job: str, bootstrap: Callable, call: bytes, limits: Limits) -> None:
        self.doing = "waiting for workers"
        self.attempt: Attempt | None = None
        self.size = 0
        self.failures: list[WorkerDied] = []
        self.rows: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.results: list[bytes] = []
        self.error: BaseException | None = None
        self.over = False
        self._cluster, self._job, self._bootstrap, self._call, self._limits = cluster, job, bootstrap, call, limits
        self.loop = cluster.loop
        self._news = asyncio.Event()
        self._stop: BaseException | None = None
        self._is_ending = False  # whether the job's end is certain: it may still free its workers
        self._watches: list[asyncio.Task] = []  # what is done beside the attempt
        self._running: asyncio.Task | None = None
        self._deadline = None if limits.timeout is None else self.loop.time() + limits.timeout

    # --- the job, from top to bottom

    async def run(self) -> None:
        """See the job through to its end; it raises nothing."""
        self._running = asyncio.current_task()
        self._cluster.hear(self._hear)
        try:
            if self._stop:  # before this began
                raise Ended(self._stop)
            self.results = await self._attempts()
            self.doing = "finished"
        except Ended as ended:
            self.error = ended.error
        except JobError as error:  # the scheduler is lost, or has another version
            self.error = error.with_traceback(None)
        except asyncio.CancelledError:  # `stop`, or the client was closed, which ends its loop
            self.error = self._stop or self._lost_tasks()
        except Exception as error:
            self.error = JobError(f"The launcher failed, which is a mistake of its own: {error!r}.")
            self.error.__cause__ = error
        finally:
            self._cluster.hear_no_more()
            self.over = True
            self._tell_all()

    async def _attempts(self) -> list[bytes]:
        last = None
        while True:
            attempt = self.attempt = await self._claim(last)
            again = False
            try:
                death = await self._attempt(attempt)
                if death is None:
                    return attempt.results
                self._survive(death)
                again = True
            finally:
                self._is_ending = not again
                try:
                    self.warnings += await _to_its_end(self._free(attempt, again))
                except asyncio.CancelledError:
                    if again:  # it has kept its slots for an attempt that will not come
                        await self._cluster.give_back()
                    raise
            last, self.attempt = attempt, None

    async def _claim(self, last: Attempt | None) -> Attempt:
        """Return a new attempt, whose workers are the job's own from now on. last: the one before."""
        limits = self._limits
        self.doing = "waiting for workers"
        if last is None:
            wanted, least, most, patience_s = limits.most, limits.fewest, limits.most, limits.wait_for_workers
        else:  # a pair grows back if more are there, and goes on with fewer if none come
            wanted, least, most = last.size, limits.fewest or last.size, max(last.size, limits.most or 0)
            patience_s = limits.wait_for_successors
        has_gpu = last.members[0].has_gpu if last else None  # after a death, the kind stays
        number = last.id.number + 1 if last else 0
        request = Request(self._job, self._cluster.client_id, most=most, enough=least, has_gpu=has_gpu, attempt=number)
        claimed = await self._claim_soon(request, wanted, self.loop.time() + patience_s)
        if isinstance(claimed, Denied):
            raise Ended(self._not_resumed(claimed.error) if last else claimed.error)
        if claimed.left_out and last is None:
            self.warnings.append(
                f"The job takes workers {KINDS[claimed.workers[0].has_gpu]} and leaves out "
                f"{listed(claimed.left_out)}: ranks have to be of one kind."
            )
        self.size = len(claimed.workers)
        return Attempt(AttemptId(self._job, number), claimed.workers)

    async def _claim_soon(self, request: Request, wanted: int | None, give_up: float) -> Claimed | Denied:
        """Claim the most while more may come, else as many as wanted; from `give_up` on `enough`, or accept a no."""
        why: object = "the scheduler has not answered"
        try:
            while True:
                late = self.loop.time() >= give_up
                for fewest in [request.enough] if late else dict.fromkeys([request.most, wanted]):
                    answer = await _to_its_end(self._cluster.claim(replace(request, fewest=fewest)))
                    if isinstance(answer, Claimed):
                        return answer
                    if answer.soon:
                        break
                if late and not answer.soon:
                    break
                why = answer.error
                if self._deadline is not None and self.loop.time() >= self._deadline:
                    raise Ended(TimeoutError(f"The job had no workers after {self._limits.timeout} s: {why}"))
                await asyncio.sleep(POLL_S)
        except SchedulerLost:
            raise
        except BaseException:
            await _to_its_end(self._cluster.give_back())
            raise
        await _to_its_end(self._cluster.give_back())  # the slots that it kept for this attempt
        return answer

    async def _attempt(self, attempt: Attempt) -> WorkerDied | None:
        """Run all ranks until they have returned, and bring the results; or return the death that ended the attempt."""
        self.doing = "starting its ranks"
        self._cluster.submit(attempt, self._bootstrap, self._limits.max_restarts)
        self._tell_all()
        beside = [self._see_end(attempt, rank) for rank in range(attempt.size)]
        beside += [self._cluster.introduce(attempt, self._call), self._see_start(attempt)]
        if self._limits.stall_after is not None:
            beside.append(self._mind_silence(attempt, self._limits.stall_after))
        self._watches = [self._watch(work) for work in beside]
        try:
            async with asyncio.timeout(None if self._deadline is None else self._deadline - self.loop.time()):
                await self.until(lambda: attempt.has_failed or attempt.all_over)
                if not attempt.has_failed:
                    self.doing = "fetching its results"
                    await self._fetch(attempt)
        except TimeoutError:
            looks = await self._cluster.looks(attempt)
            raise Ended(_diagnosed(TimeoutError, timed_out, self._limits.timeout, attempt.size, *looks)) from None
        return None if attempt.results else await self._verdict(attempt)

    async def _verdict(self, attempt: Attempt) -> WorkerDied:
        """Return the death because of which the attempt failed, or end the job with the error of a rank."""
        self.doing = "looking for the cause of a failure"
        await self.until(lambda: attempt.gone or attempt.all_over, SETTLE_S)
        if attempt.gone:
            await asyncio.sleep(GATHER_S)
        dead = sorted(attempt.gone - {attempt.failed_rank})
        if dead and attempt.is_cause:
            add_note(attempt.error, f"{ranks_named(dead).capitalize()} died after that.")
        if attempt.is_cause or not dead:
            assert attempt.error is not None
            raise Ended(attempt.error)
        ends = await self._cluster.how_they_ended([attempt.members[rank] for rank in dead])
        about = dict(zip(dead, ends, strict=True)), self._limits.max_restarts, len(self.failures)
        return _diagnosed(WorkerDied, attempt.death, *about)

    def _survive(self, death: WorkerDied) -> None:
        """Go on after a death, if the job may."""
        if len(self.failures) == self._limits.max_restarts:
            raise Ended(death)
        self.failures.append(death)

    async def _free(self, attempt: Attempt, again: bool) -> list[str]:
        """Let ranks end by themselves after a failure, and give up the workers; return warnings."""
        self.doing = "ending its ranks"
        if attempt.has_failed and not self._stop:
            await self.until(lambda: attempt.all_over or self._stop, GRACE_S)
        for watch in self._watches:
            watch.cancel()
        return await self._cluster.free(attempt, failed=not attempt.results, again=again)

    # --- its parts

    async def _fetch(self, attempt: Attempt) -> None:
        """Bring the results of all ranks, for which their workers have to live."""
        fetching = self._watch(self._cluster.results(attempt))
        self._watches.append(fetching)
        await self.until(lambda: fetching.done() or attempt.gone)  # of a worker that died, Dask waits for a successor
        if fetching.done():
            attempt.results = fetching.result() or []
            attempt.futures = []  # so that the workers need not keep them

    def _not_resumed(self, error: JobError) -> WorkerDied:
        """Return the last death, as the end of a job that got no workers to go on with."""
        death = self.failures[-1]
        death.__cause__ = error
        waited = self._limits.wait_for_successors
        add_note(
            death,
            f"No worker took its place in time (wait_for_successors={waited}), so the job was not resumed.",
        )
        return death

    def _hear(self, kind: str, *about: Any) -> None:
        """Take what ranks log, and what the scheduler says of workers."""
        if kind == "row":
            self.rows += about
        elif kind == "gone" and self.attempt:
            self._watch(self._lose(self.attempt, *about))
        elif self.attempt and about[0] == self.attempt.id.number:
            _, rank, *more = about
            if kind == "began":
                self.attempt.begun.add(rank)
                if len(self.attempt.begun) == self.attempt.size:
                    self.doing = "running"
            elif kind == "failed":
                exception, traceback, note, may_follow = more
                _, error, remote = clean_exception(exception, traceback)
                assert error is not None
                add_note(error, note)
                self.attempt.fail(rank, error, remote, may_follow)
        self._tell_all()

    async def _see_end(self, attempt: Attempt, rank: int) -> None:
        future = attempt.futures[rank]
        try:
            error, remote = await self._cluster.ended(future)
        except CancelledError:  # by somebody else: `free` ends this watch before it cancels
            self.stop(SchedulerLost(LOST) if self._cluster.is_lost else self._lost_tasks())
            return
        attempt.over.add(rank)
        if error is not None:
            with suppress(Exception):  # not every exception can be copied
                # The future holds the original, whose traceback would hold the future.
                error = copy.copy(error)
            attempt.fail(rank, error, remote, may_follow=True)
        self._tell_all()

    async def _see_start(self, attempt: Attempt) -> None:
        """End the job if a rank cannot begin, and notice a worker that died before the scheduler was asked to tell."""
        begun_by = self.loop.time() + START_S
        while len(attempt.begun) < attempt.size and not attempt.has_failed:
            await asyncio.sleep(1)
            late_s = START_S if self.loop.time() > begun_by else None
            for rank, worker in enumerate(await self._cluster.known(attempt.members)):
                if worker is None:
                    await self._lose(attempt, attempt.members[rank].address)
                elif not (rank in attempt.begun or attempt.has_failed) and (
                    error := cannot_begin(rank, worker, self._job, late_s)
                ):
                    self.stop(error)
            self._tell_all()

    async def _lose(self, attempt: Attempt, address: str) -> None:
        """Take the death of the worker at this address; a worker may also go once its rank's result is elsewhere."""
        ranks = [rank for rank, member in enumerate(attempt.members) if member.address == address]
        for rank in ranks:
            if attempt.futures and not await self._cluster.is_kept(attempt.futures[rank]):
                attempt.gone.add(rank)
        self._tell_all()

    async def _mind_silence(self, attempt: Attempt, seconds: float) -> None:
        """Warn, each time that no rank has logged anything for so long, of who waits for whom."""
        seen, since = -1, 0.0
        while True:
            await asyncio.sleep(min(seconds, 1))
            if len(self.rows) != seen or len(attempt.begun) < attempt.size or attempt.has_failed:
                seen, since = len(self.rows), self.loop.time()
            elif self.loop.time() - since >= seconds:
                looks = await self._cluster.looks(attempt)
                self.warnings.append(_diagnosed(str, stalled, self.loop.time() - since, *looks))
                self._tell_all()
                since = float("inf")  # once, until something is logged

    def _watch(self, work: Coroutine) -> asyncio.Task:
        """Do this beside the job; where it fails, so does the job."""

        async def guarded() -> Any:
            try:
                return await work
            except JobError as error:
                self.stop(error)
            except Exception as error:
                self.stop(JobError(f"The launcher failed, which is a mistake of its own: {error!r}."))
            finally:
                self.loop.call_soon(self._tell_all)

        return self.loop.create_task(guarded())

    def _lost_tasks(self) -> CancelledError:
        return CancelledError(f"{self._job} lost its tasks to client.cancel(), client.restart() or client.close().")

    # --- for those who wait, on this loop or in other threads

    def stop(self, error: BaseException) -> None:
        """End the job with this error, where `run` waits, unless its end is certain; to be called on the loop."""
        if self._stop is None and not (self._is_ending or self.over):
            self._stop = error
            if self._running:
                self._running.cancel()
            self._tell_all()  # `_free` waits no longer

    @property
    def traceback(self) -> Any:
        """The traceback with which the error came from its rank; None for another error."""
        is_a_ranks = self.attempt is not None and self.attempt.error is self.error
        return self.attempt.traceback if is_a_ranks else None  # type: ignore[union-attr]

    async def looks(self) -> tuple[list[Look], list[int]]:
        """Return (how each rank at work looks, ranks that are over)."""
        return await self._cluster.looks(self.attempt) if self.attempt and not self.over else ([], [])

    async def until(self, condition: Callable[[], object], seconds: float | None = None) -> None:
        """Wait until the condition holds, or for so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._news.wait()

    def _tell_all(self) -> None:
        """Let all who wait look again whether their condition holds."""
        self._news.set()
        self._news = asyncio.Event()


def _diagnosed(kind: Callable[[str], T], describe: Callable[..., T], *about: Any) -> T:
    """Return what a diagnosis makes of this; what it raises becomes its text, as it must not end a job."""
    try:
        return describe(*about)
    except Exception as error:
        return kind(f"This cannot be explained ({describe.__name__}): {error!r}.")


async def _to_its_end(work: Coroutine) -> Any:
    """Return what the work returns; a cancellation takes effect after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
