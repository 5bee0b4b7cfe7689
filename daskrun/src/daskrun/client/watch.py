"""What is looked after while an attempt runs: ranks that begin and end, workers that die, and silence."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from distributed import CancelledError, KilledWorker

from daskrun.client.attempt import Attempt
from daskrun.client.state import State
from daskrun.errors import JobError, SchedulerLost, own_mistake
from daskrun.protocol import Ended, Event, Failure, Function, Script
from daskrun.why.verdict import cannot_begin, diagnosed, stalled

START_S = 300  # time limit for all ranks to begin


class Watch:
    """Notes in the attempt what happens to it, and stops the job where it cannot go on."""

    def __init__(self, state: State, attempt: Attempt, program: Function | Script) -> None:
        """Introduce the submitted ranks to each other, and start watching."""
        self._state, self._attempt, self._cluster = state, attempt, state.cluster
        self._tasks: list[asyncio.Task] = []
        for rank in range(attempt.size):
            self.also(self._see_end, rank)
        self.also(self._cluster.introduce, attempt, program, state.limits)
        self.also(self._see_start)
        if state.limits.stall_after is not None:
            self.also(self._mind_silence, state.limits.stall_after)

    def also(self, work: Callable[..., Coroutine], *about: Any) -> asyncio.Task:
        """Do this beside the job. If it fails, the job fails."""

        async def guarded() -> Any:
            try:
                return await work(*about)
            except (JobError, CancelledError) as error:
                self._state.stop(error)
            except Exception as error:
                self._state.stop(own_mistake(error))
            finally:
                self._state.loop.call_soon(self._state.tell_all)

        self._tasks.append(self._state.loop.create_task(guarded()))
        return self._tasks[-1]

    def end(self) -> None:
        """Look after the attempt no longer."""
        for task in self._tasks:
            task.cancel()

    def hear(self, kind: str, *about: Any) -> None:
        """Take what ranks send, and what the scheduler says of workers."""
        attempt = self._attempt
        if kind == Event.GONE:
            self.also(self._note_death, *about)
        elif about[0] == attempt.id.number:
            _, rank, *more = about
            if kind == Event.BEGAN:
                attempt.begun.add(rank)
                if len(attempt.begun) == attempt.size:
                    self._state.doing = "running"
            elif kind == Event.FAILED:
                attempt.hear_failure(rank, Failure(*more))
            elif kind == Event.DIED:
                said, *ended = more
                attempt.hear_death(rank, Ended(*ended), said)

    async def fetch(self) -> None:
        """Bring the results of all ranks, for which their workers have to live."""
        try:
            self._attempt.results = await self._cluster.results(self._attempt)
            self._attempt.futures = []  # so that the workers need not keep them
        except SchedulerLost:
            raise
        except JobError as error:  # a worker died, which may be told later
            self._attempt.fail(None, error, may_follow=True)

    async def _see_end(self, rank: int) -> None:
        error = await self._cluster.ended(self._attempt.futures[rank])
        if isinstance(error, KilledWorker):  # Dask's word for a death, if it may not start a task again
            self._attempt.lose(rank)
            return
        self._attempt.over.add(rank)
        if error is not None:
            raise error

    async def _see_start(self) -> None:
        """Stop the job if a rank cannot begin. Also notice a worker that died before we heard its "gone"."""
        attempt, begun_by = self._attempt, self._state.loop.time() + START_S
        while len(attempt.begun) < attempt.size and not attempt.has_failed:
            await asyncio.sleep(1)
            late_s = START_S if self._state.loop.time() > begun_by else None
            for rank, worker in enumerate(await self._cluster.known(attempt.members)):
                if worker is None:
                    await self._note_death(attempt.members[rank].process)
                elif rank not in attempt.begun and not attempt.has_failed:
                    self._stop_if(cannot_begin(rank, worker, self._state.job, late_s))
            self._state.tell_all()

    def _stop_if(self, error: JobError | None) -> None:
        if error:
            self._state.stop(error)

    async def _note_death(self, process: str) -> None:
        """Record the death of this worker, unless its rank's result was moved elsewhere."""
        attempt = self._attempt
        for rank in [rank for rank, member in enumerate(attempt.members) if member.process == process]:
            if attempt.futures and not await self._cluster.is_kept(attempt.futures[rank]):
                attempt.lose(rank)

    async def _mind_silence(self, seconds: float) -> None:
        """Warn once per silence of so many seconds, saying which rank waits for which."""
        state, attempt = self._state, self._attempt
        since, warned_at = state.loop.time(), 0.0
        while True:
            await asyncio.sleep(min(seconds, 1))
            now = state.loop.time()
            is_running = len(attempt.begun) == attempt.size and not (attempt.has_failed or attempt.all_over)
            since = max(since, state.heard_at) if is_running else now
            if now - since >= seconds and warned_at < since:
                warned_at = now
                looks = await self._cluster.looks(attempt)
                state.warnings.append(diagnosed(str, stalled, now - since, *looks))
                state.tell_all()
