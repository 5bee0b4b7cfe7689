"""One start of a job's program on all ranks, and what is known of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import cloudpickle
from distributed import Future

from daskrun.claims import Worker
from daskrun.errors import GO_ON, JobError, WorkerDied, add_note, ranks_named
from daskrun.protocol import AttemptId, Ended, Failure, Place
from daskrun.why.verdict import how_it_ended, how_worker_ended

ABORT = -6  # exit code of a process that NCCL or gloo aborts, as where another rank is gone


@dataclass
class Attempt:
    """One start of a job's program on all ranks, and what is known of them. Ranks are numbered from 0.

    Attributes:
        members: Workers, in rank order.
        places: Of the ranks.
        results: Pickled, by rank.
        over: Ranks whose task has ended.
        gone: Ranks whose worker has died, or is being closed.
        closed: Ids of the processes of workers whose rank has ended since Dask began to close them.
        died: How the processes of the other dead ranks ended, with the last lines that each had printed.
        error: The first that a rank told, with failed_rank; one that can't come of another rank's end takes the place
            of one that can.
        cause: The rank that failed or died first, as far as that is sure.
    """

    id: AttemptId
    members: tuple[Worker, ...]
    places: list[Place]
    futures: list[Future] = field(default_factory=list)
    results: dict[int, bytes] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    died: dict[int, tuple[Ended, str]] = field(default_factory=dict)
    error: BaseException | None = None
    failed_rank: int | None = None
    error_may_follow: bool = False
    cause: int | None = None

    @property
    def size(self) -> int:
        """The world size."""
        return len(self.members)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has told an error, or it or its worker has died."""
        return self.error is not None or bool(self.dead)

    @property
    def dead(self) -> set[int]:
        """The ranks that have died."""
        return self.gone | self.died.keys()

    @property
    def all_over(self) -> bool:
        """Whether no rank runs any more."""
        return len(self.over | self.gone) == self.size

    def fail(self, rank: int | None, error: BaseException, may_follow: bool) -> None:
        """Take what a rank raised. may_follow: whether that may come of another rank's end."""
        if self.error is None or (self.error_may_follow and not may_follow):
            self.failed_rank, self.error, self.error_may_follow = rank, error, may_follow
        if not may_follow:
            self._set_cause(rank)

    def hear_failure(self, rank: int, failure: Failure) -> None:
        """Take what a rank has sent of its failure."""
        try:
            error = cloudpickle.loads(failure.error)
        except Exception:  # its module, for one, is not here
            error = JobError(f"Rank {rank} raised what cannot be read here:\n{failure.text}")
        note = f"From rank {rank} of {self.size}, on worker {self.members[rank].address}."
        if failure.last_collective:
            note += f" Its last collective was {failure.last_collective}."
        if failure.returned:
            note += (
                f" {ranks_named(failure.returned).capitalize()} had returned by then, and called no more collectives."
            )
        add_note(error, note)
        self.fail(rank, error, failure.may_follow)

    def hear_death(self, rank: int, ended: Ended, said: str) -> None:
        """Take how the process of a rank ended."""
        self.died[rank] = ended, said
        if ended.code != ABORT:
            self._set_cause(rank)

    def lose_worker(self, process: str) -> None:
        """A worker's process is gone."""
        for rank, member in enumerate(self.members):
            if member.process == process and rank not in self.over:
                self.lose(rank)

    def lose(self, rank: int) -> None:
        """A rank's worker has died."""
        self.gone.add(rank)
        self._set_cause(rank)

    def death(self, workers: Mapping[int, tuple[str, int | None]], max_restarts: int, n_survived: int) -> WorkerDied:
        """Return the error that tells how the dead ranks ended, and what to do.

        workers: of each rank whose worker has died, what `how_worker_ended` takes. n_survived: failures that the job
        has survived before this one.
        """
        said, cures, printed = [], [], ""
        for rank in sorted(self.dead):
            address = self.members[rank].address
            if rank in self.died:
                ended, printed = self.died[rank]
                how, cure = how_it_ended(ended)
                said.append(f"its process on worker {address} {how}")
            else:
                how, cure = how_worker_ended(*workers[rank])
                said.append(f"worker {address} {how}")
            cures.append(cure)
        if max_restarts:
            cures = [cure for cure in cures if cure != GO_ON]
            if n_survived == max_restarts:
                cures.append(f"The job had been started again as often as max_restarts={max_restarts} allows.")
        who = ranks_named(sorted(self.dead)).capitalize()
        text = " ".join([f"{who} died: {'; '.join(said)}.", *filter(None, dict.fromkeys(cures))])
        deaths = {rank: self.died[rank][0] if rank in self.died else None for rank in sorted(self.dead)}
        error = WorkerDied(text, deaths, printed)
        for note in getattr(self.error, "__notes__", ()):  # of a rank that failed because of the death
            add_note(error, f"Another rank failed because of it. {note}")
        return error

    def _set_cause(self, rank: int | None) -> None:
        if self.cause is None:
            self.cause = rank
