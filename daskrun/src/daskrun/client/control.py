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

from daskrun.claims import KINDS, Claimed, Denied, Request
from daskrun.client.attempt import Attempt
from daskrun.client.cluster import Cluster, tasks_lost
from daskrun.client.limits import Limits
from daskrun.client.state import State
from daskrun.client.watch import Watch
from daskrun.errors import (
    ITS_LAST_LINES,
    JobError,
    RankExited,
    ScriptFailed,
    WorkerDied,
    add_note,
    listed,
    own_mistake,
    ranks_do,
    ranks_named,
    without_lines,
)
from daskrun.protocol import AttemptId, Event, Function, Script
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


def _in_a_line(error: BaseException) -> str:
    """Return how an attempt has ended, as text."""
    error = error.error if isinstance(error, Ended) else error
    with suppress(Exception):  # not every error has a text
        said, _, printed = str(error).partition(ITS_LAST_LINES)
        first, last = said.partition("\n")[0], printed.rstrip().rpartition("\n")[2]  # of a script, its error itself
        last = "" if isinstance(error, WorkerDied) else last
        said = f"{first} Its last line: {last}" if last else first
        return f"{type(error).__name__}: {said}".rstrip()
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
            again, ended = False, ""
            try:
                failure = await self._attempt(attempt)
                if failure is None:
                    return attempt.results
                if self.is_last or len(self.failures) == self.limits.max_restarts:
                    raise Ended(failure)
                self.failures.append(failure)
                self._tell_of(failure)
                again, ended = True, _in_a_line(failure)
            except BaseException as error:
                ended = _in_a_line(error)
                raise
            finally:
                await self._free(attempt, again, ended)
            last, self.attempt = attempt, None

    def _tell_of(self, failure: BaseException) -> None:
        """Have the user told at once of a failure that the job survives: the next row may be minutes away."""
        limits, n = self.limits, len(self.failures)
        said = without_lines(failure) if isinstance(failure, JobError) else _in_a_line(failure)
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
        has_gpu = last.members[0].has_gpu if last else None  # after a death, the kind stays
        request = Request(
            job=self.job,
            client=self.cluster.client_id,
            most=most,
            minimum=minimum,
            has_gpu=has_gpu,
            attempt=number,
            attempts=limits.max_restarts + 1,
        )
        try:
            if last and self.is_last:  # since the last attempt's death
                raise Ended(self.failures.pop())
            claimed = await self._claim_patiently(request, wanted, self.loop.time() + patience_s)
            if isinstance(claimed, Denied):
                raise Ended(self._not_resumed(claimed.error) if last else claimed.error)
        except BaseException as error:
            # Slots kept from the last attempt, or just claimed.
            await self.cluster.give_back(_in_a_line(error))
            raise
        if claimed.left_out and last is None:
            self.warnings.append(
                f"The job takes workers {KINDS[claimed.workers[0].has_gpu]} and leaves out "
                f"{listed(claimed.left_out)}: ranks have to be of one kind."
            )
        self.size = len(claimed.workers)
        return Attempt(AttemptId(self.job, number), claimed.workers)

    async def _claim_patiently(self, request: Request, wanted: int | None, give_up: float) -> Claimed | Denied:
        """Ask for the most, else for as many as are wanted, until `give_up`; then for the minimum, and return a no."""
        while True:
            late = self.loop.time() >= give_up
            sizes = [request.minimum] if late else list(dict.fromkeys([request.most, wanted]))
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
            add_note(error, "It was not started again: max_restarts is for deaths; give launch retry for exceptions.")
        raise Ended(error)

    async def _free(self, attempt: Attempt, again: bool, error: str) -> None:
        """End what is left of an attempt, and give up the workers. again: for another attempt."""
        self.doing = "ending its ranks"
        if self._watch:
            self._watch.end()
        # Who cancels waits for no rank; a rank that has hung up before needs no time either.
        grace_s = 0 if self.stopped or attempt.results else self.limits.shutdown_timeout
        await self.cluster.free(attempt, again, error, grace_s)
        self._watch = None

    # --- its parts

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
