"""One start of a job's function on all ranks, and what is known of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Future

from daskrun.claims import Worker
from daskrun.errors import GO_ON, Stopped, WorkerDied, add_note, ranks_named
from daskrun.rank import AttemptId
from daskrun.why.process import Death
from daskrun.why.verdict import how_it_ended


@dataclass
class Attempt:
    """One start of a job's function on all ranks, and what is known of them. Ranks are numbered from 0.

    members: workers, in rank order. over: ranks whose task has ended. gone: ranks whose worker has died.
    without_nanny: of these, those whose nanny gives no answer either. results: pickled, once all are here.
    error: the first that a rank told, with failed_rank and the traceback that came with it; error_is_cause: it cannot
    come of another rank's death.
    """

    id: AttemptId
    members: tuple[Worker, ...]
    futures: list[Future] = field(default_factory=list)
    results: list[bytes] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    without_nanny: set[int] = field(default_factory=set)
    error: BaseException | None = None
    traceback: Any = None
    failed_rank: int | None = None
    error_is_cause: bool = False

    @property
    def size(self) -> int:
        """The world size."""
        return len(self.members)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has told an error, or its worker has died."""
        return self.error is not None or bool(self.gone)

    @property
    def all_over(self) -> bool:
        """Whether no rank runs any more."""
        return len(self.over | self.gone) == self.size

    def fail(self, rank: int | None, error: BaseException, traceback: Any, may_follow: bool) -> None:
        """Take what a rank raised; the first one counts, but for a Stopped. traceback: as it was there.

        may_follow: whether the error may come of another rank's death.
        """
        if self.error is None or (isinstance(self.error, Stopped) and not isinstance(error, Stopped)):
            self.failed_rank, self.error, self.traceback = rank, error, traceback
            self.error_is_cause = not may_follow and not self.gone

    def death(self, deaths: Mapping[int, Death], max_restarts: int, n_survived: int) -> WorkerDied:
        """Return the error that tells how these ranks' workers ended, and what to do.

        deaths: of each rank. n_survived: deaths that the job has survived before this one.
        """
        said, cures = [], []
        for rank, death in deaths.items():
            worker = self.members[rank]
            how, cure = how_it_ended(death, worker.has_nanny)
            said.append(f"worker {worker.address} {how}")
            cures.append(cure)
            if not death.nanny_lives:
                self.without_nanny.add(rank)
        if max_restarts:
            cures = [cure for cure in cures if cure != GO_ON]
            if n_survived == max_restarts:
                cures.append(f"The job had been started again as often as max_restarts={max_restarts} allows.")
        who = ranks_named(list(deaths)).capitalize()
        error = WorkerDied(" ".join([f"{who} died: {'; '.join(said)}.", *filter(None, dict.fromkeys(cures))]))
        for note in getattr(self.error, "__notes__", ()):  # of a rank that failed because of the death
            add_note(error, f"Another rank failed because of it. {note}")
        return error
