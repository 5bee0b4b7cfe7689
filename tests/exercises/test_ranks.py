"""An answer on several ranks: what keeps them from an end is told in a hint."""

from types import SimpleNamespace

import pytest

from daskrun import JobError, WorkerDied
from workshop_utils.exercises import NotYet, ranks


@pytest.mark.parametrize(
    ("error", "kind", "hint"),
    [
        (TimeoutError("Rank 0 waits in all_reduce. If all is well, wait."), NotYet, "here, .*in all_reduce. Call the"),
        (TimeoutError("rank 1 calls barrier, at ranks.py:6 in says, in barrier."), NotYet, "has returned. Call the"),
        (TimeoutError("Rank 1 has not called it: it is at x.py:3."), NotYet, "wait.* If they do, your machine is busy"),
        (TimeoutError("All ranks have called it, so it is under way."), NotYet, "at work.* busy.* run the cell again"),
        (
            TimeoutError("No rank waits for another in a collective: rank 0 is at x.py:3."),
            NotYet,
            "at work.* at x.py:3. .*busy",
        ),
        (
            TimeoutError(
                "No rank waits for another in a collective: rank 0 is at x.py:3. "
                "Rank 1 has returned, or raised an error."
            ),
            NotYet,
            "wait for each other.*Call the",
        ),
        (WorkerDied("Rank 1 died: it was killed by signal 6 (SIGABRT)."), NotYet, "here, Rank 1 died"),
        (RuntimeError("Connection closed by peer"), NotYet, "here, one rank waits for another"),
        (RuntimeError("shapes differ"), RuntimeError, "shapes differ"),
        (JobError("Connection to the cluster"), JobError, "cluster"),
        (ZeroDivisionError("division by zero"), ZeroDivisionError, "zero"),
    ],
)
def test_ranks_that_come_to_no_end_get_a_hint_and_what_one_raises_is_raised(error, kind, hint, monkeypatch):
    def run(client, function, *args, **settings):
        raise error

    monkeypatch.setattr(ranks, "daskrun", SimpleNamespace(run=run))
    with pytest.raises(kind, match=hint):
        ranks.run_on_ranks(None, int, about="here, ")
