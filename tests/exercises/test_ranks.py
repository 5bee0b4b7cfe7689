"""An answer on several ranks: what keeps them from an end is told in a hint."""

import sys
import threading
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
        if "timeout" in settings:  # what comes before has no limit
            raise error
        return [1.0]

    monkeypatch.setattr(ranks, "daskrun", SimpleNamespace(run=run))
    with pytest.raises(kind, match=hint):
        ranks.run_on_ranks(None, int, about="here, ")


@pytest.mark.parametrize(
    ("slowness", "is_short", "limit_s"), [(1, True, 10), (3.24, True, 32), (2.5, False, 75), (70, False, 150)]
)
def test_ranks_have_the_more_time_the_busier_the_busiest_machine_is(slowness, is_short, limit_s, monkeypatch):
    limits = []

    def run(client, function, *args, timeout=None, **settings):
        limits.append(timeout)
        return [1.0, slowness]

    monkeypatch.setattr(ranks, "daskrun", SimpleNamespace(run=run))
    ranks.run_on_ranks(None, int, is_short=is_short)
    assert limits == [None, limit_s]


def test_what_an_answer_imports_is_there_before_its_time_begins(client):
    def is_imported():
        return "wave" in sys.modules

    assert ranks.run_on_ranks(client, is_imported, imports=["wave"]) == [True, True]


def test_a_rank_that_shares_its_core_finds_its_machine_slow(monkeypatch):
    limits, stop = [], threading.Event()

    def run(client, function, *args, timeout=None, **settings):
        limits.append(timeout)
        return [function(*args)]

    def take_turns():  # with the rank's thread, by Python's lock
        while not stop.is_set():
            pass

    monkeypatch.setattr(ranks, "daskrun", SimpleNamespace(run=run))
    others = [threading.Thread(target=take_turns) for _ in range(3)]
    for other in others:
        other.start()
    ranks.run_on_ranks(None, int, is_short=True)
    stop.set()
    for other in others:
        other.join()
    assert limits[1] > 15  # 10 on a quiet machine
