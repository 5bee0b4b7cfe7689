"""One job: claim workers, run an attempt on them, free them; after a death, again. `Control.run` reads from the top.

Who owns a worker? From `_claim` until `_free`, the job. When is a process killed? In `_free`, if a rank has begun in it
and the attempt has failed. Where do a timeout and a stop take effect? Wherever the job waits, which is in `until`.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from daskrun.attempt import Attempt
from daskrun.claims import KINDS, Claimed, Denied, Request
from daskrun.cluster import Cluster
from daskrun.errors import JobError, WorkerDied, add_note, listed, ranks_named
from daskrun.limits import Limits
from daskrun.rank import AttemptId
from daskrun.watch import Watch, lost_tasks
from daskrun.why.look import Look
from daskrun.why.verdict import diagnosed, timed_out

SETTLE_S = 1.0  # from a rank's error to the verdict: a worker's death, which may be the cause, can come to light later
GATHER_S = 0.1  # from a worker's death to the verdict: the message names all workers that died together
GRACE_S = 2.0  # for the other ranks to end by themselves, before their processes are replaced
POLL_S = 0.2  # between two claims


class Ended(Exception):
    """The job ends with this error, which its user is told."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Control:
    """A job's life. All of it happens on the client's event loop.

    doing: a phrase for `repr`. attempt: None until workers are claimed. size: its world size, or the last one's.
    failures: the deaths that the job survived. rows: metrics so far. warnings: for whoever launched the job.
    stopped: why the job has to end, None while it may go on. over: `results` or `error` is there, and the workers are
    free.
    """

    def __init__(self, cluster: Cluster, job: str, bootstrap: Callable, call: bytes, limits: Limits) -> None:
        self.doing = "waiting for workers"
        self.attempt: Attempt | None = None
        self.size = 0
        self.failures: list[WorkerDied] = []
        self.rows: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.stopped: BaseException | None = None
        self.results: list[bytes] = []
        self.error: BaseException | None = None
        self.over = False
        self.loop = cluster.loop
        self.cluster, self.job, self.limits = cluster, job, limits
        self._bootstrap, self._call = bootstrap, call
        self._watch: Watch | None = None
        self._news = asyncio.Event()
        self._is_ending = False  # whether the job's end is certain: it may still free its workers
        self._deadline = None if limits.timeout is None else self.loop.time() + limits.timeout

    # --- the job, from top to bottom

    async def run(self) -> None:
        """See the job through to its end; it raises nothing."""
        self.cluster.hear(self._hear)
        try:
            self.results = await self._attempts()
            self.doing = "finished"
        except Ended as ended:
            self.error = ended.error
        except JobError as error:  # the scheduler is lost, or has another version
            self.error = error.with_traceback(None)
        except asyncio.CancelledError:  # the client was closed, which ends its loop
            self.error = self.stopped or lost_tasks(self.job)
        except Exception as error:
            self.error = JobError(f"The launcher failed, which is a mistake of its own: {error!r}.")
            self.error.__cause__ = error
        finally:
            self.cluster.hear_no_more()
            self.over = True
            self.tell_all()

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
                await self._free(attempt, again)
            last, self.attempt = attempt, None

    async def _claim(self, last: Attempt | None) -> Attempt:
        """Return a new attempt, whose workers are the job's own from now on. last: the one before."""
        self.doing = "waiting for workers"
        limits, number = self.limits, last.id.number + 1 if last else 0
        if last is None:
            wanted, least, most, patience_s = limits.most, limits.fewest, limits.most, limits.wait_for_workers
        else:  # a pair grows back if more are there, and goes on with fewer if none come
            wanted, least, most = last.size, limits.fewest or last.size, max(last.size, limits.most or 0)
            patience_s = limits.wait_for_successors
        has_gpu = last.members[0].has_gpu if last else None  # after a death, the kind stays
        request = Request(self.job, self.cluster.client_id, None, most, has_gpu, enough=least, attempt=number)
        try:
            claimed = await self._claim_soon(request, wanted, self.loop.time() + patience_s)
        except BaseException:
            await self.cluster.give_back()  # the slots that it kept for this attempt
            raise
        if isinstance(claimed, Denied):
            await self.cluster.give_back()
            raise Ended(self._not_resumed(claimed.error) if last else claimed.error)
        if claimed.left_out and last is None:
            self.warnings.append(
                f"The job takes workers {KINDS[claimed.workers[0].has_gpu]} and leaves out "
                f"{listed(claimed.left_out)}: ranks have to be of one kind."
            )
        self.size = len(claimed.workers)
        return Attempt(AttemptId(self.job, number), claimed.workers)

    async def _claim_soon(self, request: Request, wanted: int | None, give_up: float) -> Claimed | Denied:
        """Claim the most while more may come, else as many as are wanted; from `give_up` on `enough`, or take a no."""
        while True:
            late = self.loop.time() >= give_up
            for fewest in [request.enough] if late else dict.fromkeys([request.most, wanted]):
                if self.stopped:
                    raise Ended(self.stopped)
                answer = await self.cluster.claim(replace(request, fewest=fewest))
                if isinstance(answer, Claimed):
                    return answer
                denied = answer
                if denied.soon:
                    break
            if late and not denied.soon:
                return denied
            if self._time_left() == 0:
                raise Ended(TimeoutError(f"The job had no workers after {self.limits.timeout} s: {denied.error}"))
            await self.until(lambda: self.stopped, POLL_S)

    async def _attempt(self, attempt: Attempt) -> WorkerDied | None:
        """Run all ranks until they have returned, and bring the results; or return the death that ended the attempt."""
        self.doing = "starting its ranks"
        self.cluster.submit(attempt, self._bootstrap, self.limits.max_restarts)
        self.tell_all()
        self._watch = Watch(self, attempt, self._call)
        await self._until_something(lambda: attempt.has_failed or attempt.all_over, attempt)
        if not attempt.has_failed:
            self.doing = "fetching its results"
            fetching = self._watch.also(self.cluster.results, attempt)
            # Of a worker that died, Dask waits for a successor.
            await self._until_something(lambda: fetching.done() or attempt.gone, attempt)
            if fetching.done():
                attempt.results = fetching.result() or []
                attempt.futures = []  # so that the workers need not keep them
                return None
        return await self._verdict(attempt)

    async def _verdict(self, attempt: Attempt) -> WorkerDied:
        """Return the death because of which the attempt failed, or end the job with the error of a rank."""
        self.doing = "looking for the cause of a failure"
        await self.until(lambda: attempt.gone or attempt.all_over or self.stopped, SETTLE_S)
        if attempt.gone:
            await asyncio.sleep(GATHER_S)
        if self.stopped:
            raise Ended(self.stopped)
        dead = sorted(attempt.gone - {attempt.failed_rank})
        if dead and attempt.is_cause:
            add_note(attempt.error, f"{ranks_named(dead).capitalize()} died after that.")
        if attempt.is_cause or not dead:
            assert attempt.error is not None
            raise Ended(attempt.error)
        ends = await self.cluster.how_they_ended([attempt.members[rank] for rank in dead])
        about = dict(zip(dead, ends, strict=True)), self.limits.max_restarts, len(self.failures)
        return diagnosed(WorkerDied, attempt.death, *about)

    def _survive(self, death: WorkerDied) -> None:
        """Go on after a death, if the job may."""
        if len(self.failures) == self.limits.max_restarts:
            raise Ended(death)
        self.failures.append(death)

    async def _free(self, attempt: Attempt, again: bool) -> None:
        """Let ranks end by themselves after a failure, and give up the workers. again: for another attempt."""
        self.doing = "ending its ranks"
        if attempt.has_failed:
            await self.until(lambda: attempt.all_over or self.stopped, GRACE_S)
        if self._watch:
            self._watch.end()
        self.warnings += await self.cluster.free(attempt, failed=not attempt.results, again=again)

    # --- its parts

    async def _until_something(self, condition: Callable[[], object], attempt: Attempt) -> None:
        """Wait until the condition holds; end the job if it is stopped before, or its time is up."""
        await self.until(lambda: condition() or self.stopped, self._time_left())
        if self.stopped and not attempt.has_failed:
            raise Ended(self.stopped)
        if not condition():
            looks = await self.cluster.looks(attempt)
            raise Ended(diagnosed(TimeoutError, timed_out, self.limits.timeout, attempt.size, *looks))

    def _time_left(self) -> float | None:
        return None if self._deadline is None else max(0, self._deadline - self.loop.time())

    def _not_resumed(self, error: JobError) -> WorkerDied:
        """Return the last death, as the end of a job that got no workers to go on with."""
        death, waited = self.failures[-1], self.limits.wait_for_successors
        death.__cause__ = error
        add_note(death, f"No worker took its place in time (wait_for_successors={waited}), so the job was not resumed.")
        return death

    def _hear(self, kind: str, *about: Any) -> None:
        """Take what ranks log, and what the scheduler says of workers."""
        if kind == "row":
            self.rows += about
        elif self._watch:
            self._watch.hear(kind, *about)
        self.tell_all()

    # --- for those who wait, on this loop or in other threads

    def stop(self, error: BaseException) -> None:
        """End the job with this error, unless its end is certain; to be called on the loop."""
        if self.stopped is None and not (self._is_ending or self.over):
            self.stopped = error
            self.tell_all()

    @property
    def traceback(self) -> Any:
        """The traceback with which the error came from its rank; None for another error."""
        is_a_ranks = self.attempt is not None and self.attempt.error is self.error
        return self.attempt.traceback if is_a_ranks else None  # type: ignore[union-attr]

    async def looks(self) -> tuple[list[Look], list[int]]:
        """Return (how each rank at work looks, ranks that are over)."""
        return await self.cluster.looks(self.attempt) if self.attempt and not self.over else ([], [])

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
