"""One job: claim workers, run an attempt on them, free them; after a death, start again. Read `Control.run` first.

Who owns a worker? The job, from `_claim` until `_free`; the table is in `claims`, on the scheduler. When is a process
killed? In `_free`, if a rank began in it and the attempt brought no results: after an error, a death, a timeout or a
stop. (Where the client is gone, or a rank begins when its attempt is over, `scheduler.ClaimsPlugin` does it.) Where
does a stop take effect? In `until`, wherever the job waits. Where does the timeout? While workers are claimed, ranks
run and results are fetched.
"""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from daskrun.attempt import Attempt
from daskrun.claims import KINDS, Claimed, Denied, Request
from daskrun.cluster import Cluster, tasks_lost
from daskrun.errors import (
    ITS_LAST_LINES,
    JobError,
    WorkerDied,
    add_note,
    listed,
    own_mistake,
    ranks_named,
    without_lines,
    without_ours,
)
from daskrun.limits import Limits
from daskrun.rank import AttemptId
from daskrun.state import State
from daskrun.watch import Watch
from daskrun.why.look import Look
from daskrun.why.verdict import diagnosed, timed_out

SETTLE_S = 1.0  # wait after a rank's error: the death that caused it may be reported later
GATHER_S = 0.1  # wait after a death, so that one message names all workers that died together
GRACE_S = 2.0  # time for the other ranks to end by themselves before we kill them
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

    def __init__(self, cluster: Cluster, job: str, bootstrap: Callable, call: bytes, limits: Limits) -> None:
        super().__init__(cluster, job, limits)
        self._bootstrap, self._call = bootstrap, call
        self._watch: Watch | None = None
        self._deadline = None if limits.timeout is None else self.loop.time() + limits.timeout

    # --- the job, from top to bottom

    async def run(self) -> None:
        """See the job through to its end; it raises nothing."""
        try:
            self.cluster.hear(self._hear)
            self.results = await self._attempts()
            self.doing = "finished"
        except Ended as ended:
            self.error = ended.error
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
                death = await self._attempt(attempt)
                if death is None:
                    return attempt.results
                if self.is_last or len(self.failures) == self.limits.max_restarts:
                    raise Ended(death)
                self.failures.append(death)
                self._tell_of(death)
                again, ended = True, _in_a_line(death)
            except BaseException as error:
                ended = _in_a_line(error)
                raise
            finally:
                await self._free(attempt, again, ended)
            last, self.attempt = attempt, None

    def _tell_of(self, death: WorkerDied) -> None:
        """Have the user told at once of a death that the job survives: the next row may be minutes away."""
        limits, n = self.limits, len(self.failures)
        self.warnings.append(
            f"{without_lines(death)} Starting again ({n} of max_restarts={limits.max_restarts}); another "
            f"worker has wait_for_successors={limits.wait_for_successors:g} seconds to take its place."
        )

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
                if denied.being_renewed:
                    break
            if late and not denied.being_renewed:
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
        await self._until_or_end(lambda: attempt.has_failed or attempt.all_over, attempt)
        if not attempt.has_failed:
            self.doing = "fetching its results"
            self._watch.also(self._watch.fetch)
            # If a worker has died, Dask's gather waits for a successor; we do not.
            await self._until_or_end(lambda: attempt.results or attempt.has_failed, attempt)
        return None if attempt.results else await self._verdict(attempt)

    async def _verdict(self, attempt: Attempt) -> WorkerDied:
        """Return the death because of which the attempt failed, or end the job with the error of a rank."""
        self.doing = "looking for the cause of a failure"
        if isinstance(attempt.error, WorkerDied):  # of a script's process, as its worker has told
            return attempt.error
        is_ranks = attempt.failed_rank is not None  # else results were lost, though all ranks are over
        await self.until(lambda: attempt.gone or (is_ranks and attempt.all_over) or self.stopped, SETTLE_S)
        if attempt.gone:
            await asyncio.sleep(GATHER_S)
        if self.stopped:
            raise Ended(self.stopped)
        dead = sorted(attempt.gone - {attempt.failed_rank})  # a rank that raised and then died: its error counts
        if dead and attempt.error_is_cause:
            add_note(attempt.error, f"{ranks_named(dead).capitalize()} died after that.")
        if attempt.error_is_cause or not dead:
            assert attempt.error is not None
            if self.limits.max_restarts and not self.is_last:
                add_note(attempt.error, "It was not started again: max_restarts is for deaths, and this is none.")
            raise Ended(attempt.error)
        ends = await self.cluster.how_they_ended([attempt.members[rank] for rank in dead])
        deaths = dict(zip(dead, ends, strict=True))
        return diagnosed(WorkerDied, attempt.death, deaths, self.limits.max_restarts, len(self.failures))

    async def _free(self, attempt: Attempt, again: bool, error: str) -> None:
        """Let ranks end by themselves after a failure, and give up the workers. again: for another attempt."""
        self.doing = "ending its ranks"
        if attempt.has_failed:
            if self.limits.shutdown_timeout:
                await self.cluster.signal_scripts(attempt, signal.SIGTERM)
            await self.until(lambda: attempt.all_over or self.stopped, self.limits.shutdown_timeout or GRACE_S)
        if self._watch:
            self._watch.end()
        self.warnings += await self.cluster.free(attempt, kill=not attempt.results, again=again, error=error)
        self._watch = None  # not before: a rank that is heard to have begun meanwhile is to be killed

    # --- its parts

    async def _until_or_end(self, condition: Callable[[], object], attempt: Attempt) -> None:
        """Wait until the condition holds; end the job if it is stopped before, or its time is up."""
        await self.until(lambda: condition() or self.stopped, self._time_left())
        if self.stopped:
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
            self.rows.extend(about)
            self.last_row_at = self.loop.time()
        elif self._watch:
            self._watch.hear(kind, *about)
        self.tell_all()

    @property
    def traceback(self) -> Any:
        """The traceback with which the error came from its rank, from the function on; None for another error."""
        is_a_ranks = self.attempt is not None and self.attempt.error is self.error
        return without_ours(self.attempt.traceback) if is_a_ranks else None  # type: ignore[union-attr]

    async def looks(self) -> tuple[list[Look], list[int]]:
        """Return (how each rank at work looks, ranks that are over)."""
        return await self.cluster.looks(self.attempt) if self.attempt and not self.is_over else ([], [])
