"""One job: claim workers, run an attempt on them, free them; after a death, start again. Read `Control.run` first.

Who owns a worker? The job, from `_claim` until `_free`; the table is in `claims`, on the scheduler. When does a rank's
process end? By itself, or in `_free`. (If the client is gone, or a rank begins when its attempt is over,
`scheduler.ClaimsPlugin` ends it.) Where does a stop take effect? In `until`, wherever the job waits. Where does the
time limit? While workers are claimed, ranks run and results are fetched.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from signal import Signals
from typing import Any

from distributed import CancelledError

from daskrun.claims import Claimed, Denied, Request
from daskrun.client.attempt import Attempt
from daskrun.client.cluster import Cluster, tasks_lost
from daskrun.client.limits import Limits
from daskrun.client.state import State
from daskrun.client.watch import Watch
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
from daskrun.protocol import AttemptId, Event, Function, JobState, Script
from daskrun.why.look import Look
from daskrun.why.verdict import diagnosed, timed_out

SETTLE_S = 1.0  # wait after a rank's error: the death that caused it may be reported later
GATHER_S = 0.1  # wait after a death, so that one message names all workers that died together
POLL_S = 0.2  # poll interval while claiming


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


class Control(State):
    """A job's life. All of it happens on the client's event loop."""

    def __init__(self, cluster: Cluster, job: str, program: Function | Script, limits: Limits) -> None:
        super().__init__(cluster, job, limits)
        self._program = program
        self._watch: Watch | None = None
        self._deadline = None if limits.time_limit is None else self.loop.time() + limits.time_limit

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
                    return attempt.results
                if self.is_last or len(self.failures) == self.limits.max_restarts:
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
            text += (
                f"; another worker has wait_for_successors={limits.wait_for_successors:g} seconds to take the place of "
                "one that died"
            )
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
        named = last.members if last and limits.workers else ()
        request = Request(
            job=self.job,
            client=self.cluster.client_id,
            most=most,
            among=(*limits.workers, *(member.slot for member in named)),  # which a successor has, too
            attempt=number,
            attempts=limits.max_restarts + 1,
        )
        try:
            if last and self.is_last:  # since the last attempt's death
                raise Ended(self.failures.pop())
            claimed = await self._claim_patiently(request, minimum, wanted, self.loop.time() + patience_s)
            if isinstance(claimed, Denied):
                raise Ended(self._not_resumed(claimed.error) if last else claimed.error)
        except BaseException as error:
            # Slots kept from the last attempt, or just claimed.
            await self.cluster.give_back(*self._ending(error))
            raise
        self.size = len(claimed.workers)
        return Attempt(AttemptId(self.job, number), claimed.workers)

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
        self._watch = Watch(self, attempt, self._program)
        await self._until_or_end(lambda: attempt.has_failed or attempt.all_over, attempt)
        if not attempt.has_failed:
            self.doing = "fetching its results"
            self._watch.also(self._watch.fetch)
            # If a worker has died, Dask's gather waits for a successor; we do not.
            await self._until_or_end(lambda: attempt.results or attempt.has_failed, attempt)
        return None if attempt.results else await self._verdict(attempt)

    async def _verdict(self, attempt: Attempt) -> BaseException:
        """Return the failure after which the job may start again, or end the job with the error of a rank."""
        self.doing = "looking for the cause of a failure"
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
            workers = dict(zip(gone, ends, strict=True))
            return diagnosed(WorkerDied, attempt.death, workers, self.limits.max_restarts, len(self.failures))
        if dead:
            add_note(error, f"{ranks_named(dead).capitalize()} died after that.")
        if isinstance(error, (*self.limits.retry, ScriptFailed)):
            return error
        if self.limits.max_restarts and not self.is_last:
            add_note(error, "It was not started again: max_restarts is for deaths; set retry for exceptions.")
        raise Ended(error)

    async def _free(self, attempt: Attempt, state: JobState, error: str) -> None:
        """End what is left of an attempt, and give up the workers. state: ENDING if another attempt follows."""
        self.doing = "ending its ranks"
        if self._watch:
            self._watch.end()
        # Who cancels waits for no rank; a rank that has hung up before needs no time either.
        grace_s = 0 if self.stopped or attempt.results else self.limits.shutdown_timeout
        await self.cluster.free(attempt, state, error, grace_s)
        self._watch = None

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
        if kind == Event.ROW:
            self.rows.extend(about)
        elif kind == Event.OUTPUT:
            attempt, rank, lines = about
            self.output.append((rank, attempt, lines))
        elif kind == Event.NOTICE:
            self.warnings.extend(about)
        elif self._watch:
            self._watch.hear(kind, *about)
        if kind in (Event.ROW, Event.OUTPUT):
            self.heard_at = self.loop.time()
        if kind != Event.USAGE:
            self.tell_all()

    async def looks(self) -> tuple[list[Look], list[int]]:
        """Return (how each rank at work looks, ranks that are over)."""
        return await self.cluster.looks(self.attempt) if self.attempt and not self.is_over else ([], [])
