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
        (WorkerDied("Rank 1 died: it was killed by signal 6 (SIGABRT)."), NotYet, "here, Rank 1 died"),
        (RuntimeError("Connection closed by peer"), NotYet, "here, one rank waits for another"),
        (RuntimeError("shapes differ"), RuntimeError, "shapes differ"),
        (JobError("Connection to the cluster"), JobError, "cluster"),
        (ZeroDivisionError("division by zero"), ZeroDivisionError, "zero"),
    ],
)
def test_ranks_that_come_to_no_end_get_a_hint_and_what_one_raises_is_raised(error, kind, hint, monkeypatch):
    def run(client, function, *args, **settings):
        if "timeout" in settings:  # what comes before has no limit
            raise error

    monkeypatch.setattr(ranks, "daskrun", SimpleNamespace(run=run))
    with pytest.raises(kind, match=hint):
        ranks.run_on_ranks(None, int, about="here, ")


@pytest.mark.parametrize(
    ("empty_job_s", "is_short", "limit_s"), [(0.2, True, 11), (3, True, 25), (9, True, 30), (0.2, False, 30)]
)
def test_ranks_of_a_short_function_get_less_time_but_not_where_an_empty_job_was_slow(
    empty_job_s, is_short, limit_s, monkeypatch
):
    now, limits = [0.0], []

    def run(client, function, *args, timeout=None, **settings):
        now[0] += empty_job_s
        limits.append(timeout)

    monkeypatch.setattr(ranks, "daskrun", SimpleNamespace(run=run))
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ranks.run_on_ranks(None, int, is_short=is_short)
    assert limits == [None, limit_s]
