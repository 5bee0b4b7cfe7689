"""What is looked after while an attempt runs: ranks that begin and end, workers that die, and silence."""

import asyncio
import copy
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed import CancelledError
from distributed.core import clean_exception

from daskrun.attempt import Attempt
from daskrun.cluster import LOST
from daskrun.errors import JobError, SchedulerLost, add_note
from daskrun.why.verdict import cannot_begin, diagnosed, stalled

if TYPE_CHECKING:
    from daskrun.control import Control

START_S = 300  # time limit for all ranks to begin


class Watch:
    """Notes in the attempt what happens to it, and stops the job where it cannot go on."""

    def __init__(self, control: "Control", attempt: Attempt, call: bytes) -> None:
        """Introduce the ranks to each other, which are submitted, and begin to look after them."""
        self._control, self._attempt, self._cluster = control, attempt, control.cluster
        self._tasks: list[asyncio.Task] = []
        for rank in range(attempt.size):
            self.also(self._see_end, rank)
        self.also(self._cluster.introduce, attempt, call)
        self.also(self._see_start)
        if control.limits.stall_after is not None:
            self.also(self._mind_silence, control.limits.stall_after)

    def also(self, work: Callable[..., Coroutine], *about: Any) -> asyncio.Task:
        """Do this beside the job; where it fails, so does the job."""

        async def guarded() -> Any:
            try:
                return await work(*about)
            except JobError as error:
                self._control.stop(error)
            except Exception as error:
                self._control.stop(JobError(f"The launcher failed, which is a mistake of its own: {error!r}."))
            finally:
                self._control.loop.call_soon(self._control.tell_all)

        self._tasks.append(self._control.loop.create_task(guarded()))
        return self._tasks[-1]

    def end(self) -> None:
        """Look after the attempt no longer."""
        for task in self._tasks:
            task.cancel()

    def hear(self, kind: str, *about: Any) -> None:
        """Take what ranks log, and what the scheduler says of workers."""
        attempt = self._attempt
        if kind == "gone":
            self.also(self._lose, *about)
        elif about[0] == attempt.id.number:
            _, rank, *more = about
            if kind == "began":
                attempt.begun.add(rank)
                if len(attempt.begun) == attempt.size:
                    self._control.doing = "running"
            elif kind == "failed":
                exception, traceback, note, may_follow = more
                _, error, remote = clean_exception(exception, traceback)
                assert error is not None
                add_note(error, note)
                attempt.fail(rank, error, remote, may_follow)

    async def _see_end(self, rank: int) -> None:
        try:
            error, remote = await self._cluster.ended(self._attempt.futures[rank])
        except CancelledError:  # by somebody else: the job ends this watch before it cancels
            self._control.stop(SchedulerLost(LOST) if self._cluster.is_lost else lost_tasks(self._control.job))
            return
        self._attempt.over.add(rank)
        if error is not None:
            with suppress(Exception):  # not every exception can be copied
                # The future holds the original, whose traceback would hold the future.
                error = copy.copy(error)
            self._attempt.fail(rank, error, remote, may_follow=True)

    async def _see_start(self) -> None:
        """Stop the job if a rank cannot begin, and notice a worker that died before the scheduler was asked to tell."""
        attempt, begun_by = self._attempt, self._control.loop.time() + START_S
        while len(attempt.begun) < attempt.size and not attempt.has_failed:
            await asyncio.sleep(1)
            late_s = START_S if self._control.loop.time() > begun_by else None
            for rank, worker in enumerate(await self._cluster.known(attempt.members)):
                if worker is None:
                    await self._lose(attempt.members[rank].address)
                    continue
                error = cannot_begin(rank, worker, self._control.job, late_s)
                if error and rank not in attempt.begun and not attempt.has_failed:
                    self._control.stop(error)
            self._control.tell_all()

    async def _lose(self, address: str) -> None:
        """Take the death of the worker at this address; a worker may also go once its rank's result is elsewhere."""
        attempt = self._attempt
        for rank in [rank for rank, member in enumerate(attempt.members) if member.address == address]:
            if attempt.futures and not await self._cluster.is_kept(attempt.futures[rank]):
                attempt.gone.add(rank)

    async def _mind_silence(self, seconds: float) -> None:
        """Warn, each time that no rank has logged anything for so long, of who waits for whom."""
        control, attempt = self._control, self._attempt
        seen, since = -1, 0.0
        while True:
            await asyncio.sleep(min(seconds, 1))
            if len(control.rows) != seen or len(attempt.begun) < attempt.size or attempt.has_failed:
                seen, since = len(control.rows), control.loop.time()
            elif control.loop.time() - since >= seconds:
                looks = await self._cluster.looks(attempt)
                control.warnings.append(diagnosed(str, stalled, control.loop.time() - since, *looks))
                control.tell_all()
                since = float("inf")  # once, until something is logged


def lost_tasks(job: str) -> CancelledError:
    """Return the error of a job whose tasks were cancelled, and not by the job."""
    return CancelledError(f"{job} lost its tasks to client.cancel(), client.restart() or client.close().")
