"""Decide what a job does next: events come in as calls, actions go out as what they return.

Nothing here does I/O, waits, or reads a clock, so every order of events is a test of a millisecond. `carry_out` makes
the calls of what Dask tells, and carries the actions out.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from daskrun.errors import GO_ON, Stopped, WorkerDied, add_note, ranks_named

SETTLE_S = 1.0  # from a rank's error to the verdict: a worker's death, which may be the cause, can come to light later
GATHER_S = 0.1  # from a worker's death to the verdict: the message names all workers that died together
GRACE_S = 2.0  # for the other ranks to end by themselves, before their workers are killed


class Phase(Enum):
    """What a job is doing; the values are what its `repr` shows."""

    CHOOSING = "waiting for a worker"
    STARTING = "starting its ranks"
    RUNNING = "running"
    JUDGING = "looking for the cause of a failure"
    FETCHING = "fetching its results"
    ENDING = "ending its ranks"
    FREEING = "freeing its workers"
    FINISHED = "finished"
    FAILED = "failed"


class Limits(NamedTuple):
    """What a job may take: see `daskrun.launch`. fewest, most: of its n_workers, None for all of a kind."""

    fewest: int | None = None
    most: int | None = None
    timeout: float | None = None
    max_restarts: int = 0
    wait_for_workers: float = 0
    wait_for_successors: float = 30
    stall_after: float | None = None


class Choose(NamedTuple):
    """Make workers the job's own, and call `chosen` or `refused`: `most` of them, after `patience_s` also `fewest`."""

    fewest: int | None
    most: int | None
    patience_s: float


class Start(NamedTuple):
    """Submit a task for each rank."""


class Later(NamedTuple):
    """Call this method in so many seconds."""

    seconds: float
    method: Callable


class Examine(NamedTuple):
    """Find out of what these ranks' workers died, and call `examined`."""

    ranks: tuple[int, ...]


class Fetch(NamedTuple):
    """Bring the results of all ranks to the client; call `fetched`, or `failed` without a rank."""


class Free(NamedTuple):
    """Kill the workers of these ranks, give up all workers of the job unless `keep`, and call `freed`.

    Of the others, none may begin any more.
    """

    kill: tuple[int, ...]
    keep: bool


Action = Choose | Start | Later | Examine | Fetch | Free


class Decisions:
    """The state of a job. Each method is an event, and returns what to do now; what comes too late changes nothing.

    attempt: its number, from 0; callers leave out what belongs to an earlier one.
    workers: addresses in rank order, of this attempt. size: how many it has, or the one before had. begun, gone: ranks
    that have begun, and whose worker has died. lost: of these, those whose nanny gives no answer either. failures: the
    deaths that the job survived. error: what the job ends with, None while it runs and where it succeeds.
    """

    def __init__(self, limits: Limits) -> None:
        self.phase = Phase.CHOOSING
        self.attempt = self.size = 0
        self.workers: tuple[str, ...] = ()
        self.failures: list[WorkerDied] = []
        self.error: BaseException | None = None
        self._limits = limits
        self._failed_rank: int | None = None
        self._first_error: BaseException | None = None
        self._time_error: TimeoutError | None = None
        self._again = False  # whether another attempt follows
        self._kept = False  # whether the job has kept its workers for it
        self._forget_ranks()

    @property
    def over(self) -> bool:
        """Whether the job has ended, well or not."""
        return self.phase in (Phase.FINISHED, Phase.FAILED)

    @property
    def ending(self) -> bool:
        """Whether no rank of this attempt is wanted any more."""
        return self.over or self.phase in (Phase.ENDING, Phase.FREEING)

    def begin(self) -> list[Action]:
        """The job is launched."""
        return [Choose(self._limits.fewest, self._limits.most, self._limits.wait_for_workers)]

    def chosen(self, workers: Sequence[str]) -> list[Action]:
        """The job owns these workers now; their addresses, in rank order."""
        if self.over:
            return []
        if self.phase is not Phase.CHOOSING:  # it was stopped meanwhile
            return self._free()
        self.workers, self.size, self.phase = tuple(workers), len(workers), Phase.STARTING
        return [Start()]

    def refused(self, error: Exception) -> list[Action]:
        """There are not enough free workers, and the job has waited as long as it may."""
        if self.over:
            return []
        if self.phase is Phase.CHOOSING and self.failures:
            self.error = self.failures[-1]
            self.error.__cause__ = error
            add_note(
                self.error,
                f"No worker took its place in time (wait_for_successors={self._limits.wait_for_successors}), so the "
                "job was not resumed.",
            )
        elif self.phase is Phase.CHOOSING:
            self.error = error
        return self._free()

    def rank_began(self, rank: int) -> list[Action]:
        """A rank's task runs on its worker."""
        self.begun.add(rank)
        if self.phase is Phase.STARTING and len(self.begun) == self.size:
            self.phase = Phase.RUNNING
        return []

    def failed(self, rank: int | None, error: BaseException, may_follow: bool = True) -> list[Action]:
        """A rank raised, as it tells before its task is over; or, rank None, the results could not be fetched.

        may_follow: whether the error may come of another rank's death.
        """
        if self.ending or self.phase is Phase.CHOOSING:
            return []
        if self._first_error is None or (isinstance(self._first_error, Stopped) and not isinstance(error, Stopped)):
            self._failed_rank, self._first_error = rank, error
            self._is_cause = not may_follow and not self.gone
        judging, self.phase = self.phase is Phase.JUDGING, Phase.JUDGING
        if rank is not None and self._all_over():
            return self.judge()
        return [] if judging else [Later(SETTLE_S, self.judge)]

    def rank_ended(self, rank: int, error: BaseException | None = None) -> list[Action]:
        """A rank's task is over, with an error or without."""
        self._ended.add(rank)
        if self.phase is Phase.ENDING:
            return self.grace_over() if self._all_over() else []
        if error is not None:
            return self.failed(rank, error)
        if self.phase is Phase.JUDGING:
            return self.judge() if self._all_over() else []
        if self.phase in (Phase.STARTING, Phase.RUNNING) and len(self._ended) == self.size:
            self.phase = Phase.FETCHING
            return [Fetch()]
        return []

    def worker_gone(self, rank: int) -> list[Action]:
        """The process of a rank's worker has ended, or its host is lost."""
        if self.phase is Phase.CHOOSING:
            return []
        self.gone.add(rank)
        if self.phase is Phase.ENDING:
            return self.grace_over() if self._all_over() else []
        if self.ending:
            return []
        self.phase = Phase.JUDGING
        return [Later(GATHER_S, self.judge)]

    def judge(self) -> list[Action]:
        """Name the cause of a failure: the first error, where no death of another rank caused it; else the death."""
        if self.phase is not Phase.JUDGING:
            return []
        dead = sorted(self.gone - {self._failed_rank})
        if dead and self._is_cause:
            add_note(self._first_error, f"{ranks_named(dead).capitalize()} died after that.")
        if not dead or self._is_cause:
            return self._end_ranks(self._first_error)
        if unknown := [rank for rank in dead if rank not in self._ends]:
            return [Examine(tuple(unknown))]
        ends = "; ".join(f"worker {self.workers[rank]} {self._ends[rank][0]}" for rank in dead)
        death = WorkerDied(" ".join([f"{ranks_named(dead).capitalize()} died: {ends}.", *self._cures(dead)]))
        for note in getattr(self._first_error, "__notes__", ()):  # of a rank that failed because of the death
            add_note(death, note)
        if len(self.failures) == self._limits.max_restarts:
            return self._end_ranks(death)
        self.failures.append(death)
        if self._time_error:  # the time was up while the death was judged
            return self._end_ranks(self._time_error)
        self._again = True
        return self._end_ranks(None)

    def examined(self, ends: Mapping[int, tuple[str, str, bool]]) -> list[Action]:
        """It is known how these ranks' workers ended: ("was killed" or the like, what to do, if its nanny lives)."""
        self._ends |= ends
        self.lost |= {rank for rank, (_, _, has_nanny) in ends.items() if not has_nanny}
        return self.judge()

    def fetched(self) -> list[Action]:
        """The results of all ranks are here."""
        succeeded = self.phase is Phase.FETCHING or (self.phase is Phase.JUDGING and self._first_error is None)
        return self._free() if succeeded else []

    def grace_over(self) -> list[Action]:
        """The ranks have had their time to end by themselves."""
        return self._free() if self.phase is Phase.ENDING else []

    def freed(self) -> list[Action]:
        """The workers are free; before another attempt, they are being replaced."""
        if self.phase is not Phase.FREEING:
            return []
        if self._again:
            self.attempt, self.phase, self.workers = self.attempt + 1, Phase.CHOOSING, ()
            self._forget_ranks()
            return [Choose(self._limits.fewest or self.size, self.size, self._limits.wait_for_successors)]
        if self._kept:  # the job was stopped meanwhile, and has kept its workers for nothing
            self._kept = False
            return [Free((), keep=False)]
        self.phase = Phase.FINISHED if self.error is None else Phase.FAILED
        return []

    def time_is_up(self, error: TimeoutError) -> list[Action]:
        """The job has had its time; the cause of a failure, if there is one, comes first."""
        if self.phase is Phase.JUDGING:
            self._time_error = error  # for a death that the job would survive otherwise
            return []
        return self.stop(error)

    def stop(self, error: BaseException) -> list[Action]:
        """The job has to end: it was cancelled, or it cannot start."""
        choosing = self.phase is Phase.CHOOSING
        if self.ending and self._again:
            self._again, self.error = False, error
        if self.ending:
            return []
        self.error, self.phase = error, Phase.ENDING
        return [] if choosing else self._free()  # whoever chooses has to answer first: it may own workers already

    def scheduler_gone(self, error: BaseException) -> list[Action]:
        """The job cannot go on, nor end in order: the scheduler is lost, the client closed, or the launcher failed."""
        if not self.over:
            self.phase, self.error = Phase.FAILED, error
        return []

    def _cures(self, dead: Sequence[int]) -> list[str]:
        """Return what to do about deaths, each cure once."""
        cures = [cure for cure in dict.fromkeys(self._ends[rank][1] for rank in dead) if cure]
        allowed = self._limits.max_restarts
        if not allowed:
            return cures
        if len(self.failures) == allowed:
            cures.append(f"The job had been started again as often as max_restarts={allowed} allows.")
        return [cure for cure in cures if cure != GO_ON]

    def _forget_ranks(self) -> None:
        self.begun: set[int] = set()
        self.gone: set[int] = set()
        self.lost: set[int] = set()
        self._ended: set[int] = set()
        self._ends: dict[int, tuple[str, str, bool]] = {}  # of dead workers
        self._failed_rank = self._first_error = None
        self._is_cause = False
        self._again = self._kept = False

    def _end_ranks(self, error: BaseException | None) -> list[Action]:
        self.error, self.phase = error, Phase.ENDING
        return self._free() if self._all_over() else [Later(GRACE_S, self.grace_over)]

    def _free(self) -> list[Action]:
        # A thread cannot be stopped, a process can. One in which a failed attempt began also holds what that has left
        # behind: tensors, and a gloo that is broken for good where a rank died while all were connecting.
        failed = self._again or self.error is not None
        kill = self.begun - self.gone if failed else set()
        self.phase, self._kept = Phase.FREEING, self._again
        return [Free(tuple(sorted(kill)), keep=self._kept)]

    def _all_over(self) -> bool:
        return len(self._ended | self.gone) == self.size
