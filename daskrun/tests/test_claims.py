"""A worker has one owner at a time, and who gets none is told why."""

import dataclasses

from waiting import owners

from daskrun import WorkersBusy
from daskrun.claims import SUCCESSOR_S, Claimed, Claims, Request, Worker


def worker(name, **about):
    return Worker(f"tcp://{name}", f"process of {name}", f"nanny of {name}", "host", name, **about)


A, B, C = map(worker, "abc")


def names(answer):
    assert isinstance(answer, Claimed), answer.error
    return [worker.name for worker in answer.workers]


def test_workers_are_taken_by_host_and_name_and_belong_to_the_job_until_it_gives_them_up():
    claims, ten = Claims(), worker("10")
    far = dataclasses.replace(worker("1"), host="z")
    assert names(claims.claim(Request("one", "kernel", 2, 2), [far, ten, A, worker("9")], 0)) == ["9", "a"]
    claims.release("one")
    assert names(claims.claim(Request("one", "kernel", 1, 1), [A, B], 0)) == ["a"]
    assert names(claims.claim(Request("two", "kernel", 1, 1), [A, B], 0)) == ["b"]
    assert set(owners(claims).values()) == {"one", "two"}
    claims.release("one")
    assert owners(claims) == {"nanny of b": "two"}


def test_a_job_that_goes_on_with_fewer_workers_gives_up_the_others_place():
    claims = Claims()
    claims.claim(Request("one", "kernel", 3, 3), [A, B, C], 0)
    claims.end_attempt("one")
    claims.lose(A.slot, 0)
    assert names(claims.claim(Request("one", "kernel", 2, 3, attempt=1), [B, C], SUCCESSOR_S + 1)) == ["b", "c"]
    assert set(owners(claims)) == {B.slot, C.slot}
    successor = dataclasses.replace(A, process="new")
    assert names(claims.claim(Request("two", "other", 1, 1), [successor, B, C], SUCCESSOR_S + 2)) == ["a"]


def after_a_death(*dead):
    """Return the claims after these workers have died, at 0 s."""
    claims = Claims()
    for worker in dead:
        claims.lose(worker.slot, 0)
    return claims


def test_a_successor_belongs_to_the_job_that_goes_on_and_to_nobody_else():
    claims = Claims()
    claims.claim(Request("one", "kernel"), [A, B], 0)
    claims.lose(A.slot, 0)
    successor = dataclasses.replace(A, address="tcp://new", process="new")
    assert "belongs to the job one" in str(claims.claim(Request("two", "other", 1, 1), [successor, B], 1).error)
    assert names(claims.claim(Request("one", "kernel", 2, 2), [successor, B], 1)) == ["a", "b"]
    assert claims.owners_of("tcp://new") == [("one", "new")] and claims.owners_of(A.address) == []


def test_a_successor_that_only_starts_is_awaited_too():
    claims = after_a_death(A)
    starting = dataclasses.replace(A, address="tcp://new", process="new", status="init")
    assert claims.claim(Request("one", "kernel"), [starting, B], 1).may_change
    ready = dataclasses.replace(starting, status="running")
    assert names(claims.claim(Request("one", "kernel"), [ready, B], 1)) == ["a", "b"]


def test_a_successor_is_awaited_by_who_needs_it_and_not_without_an_end():
    claims = after_a_death(A)
    assert claims.claim(Request("one", "kernel", 2, 2), [B], SUCCESSOR_S - 1).may_change
    assert not claims.claim(Request("one", "kernel", 2, 2), [B], SUCCESSOR_S + 1).may_change
    assert names(claims.claim(Request("one", "kernel"), [B], SUCCESSOR_S + 1)) == ["b"]


def test_workers_of_a_job_that_is_being_ended_are_awaited():
    claims = Claims()
    claims.claim(Request("one", "kernel"), [A, B], 0)
    assert not claims.claim(Request("two", "other", 2, 2), [A, B], 0).may_change
    claims.end_attempt("one", for_good=True)
    assert claims.claim(Request("two", "other", 2, 2), [A, B], 0).may_change


def test_busy_workers_are_left_alone_and_named_with_their_tasks():
    busy = dataclasses.replace(A, tasks=("sleep-1",))
    denied = Claims().claim(Request("one", "kernel"), [busy, B], 0)
    assert "tcp://a is busy with ['sleep-1']" in str(denied.error)
    stuck = Request("one", "kernel", stuck={B.address: "does not answer"})
    assert "tcp://b does not answer" in str(Claims().claim(stuck, [A, B], 0).error)
    assert "retiring" in str(Claims().claim(Request("one", "k"), [dataclasses.replace(A, status="retiring")], 0).error)


def test_too_few_workers_are_no_reason_to_call_anybody_busy():
    for workers, fewest, word in (([A], 2, "has 1"), ([], None, "has 0"), ([], 3, r"needs 3 workers")):
        denied = Claims().claim(Request("one", "kernel", fewest, fewest), workers, 0)
        assert not isinstance(denied.error, WorkersBusy) and word in str(denied.error) and not denied.may_change


def test_a_job_takes_only_the_workers_that_it_names_and_their_successors():
    claims = Claims()
    request = Request("one", "kernel", 2, 2, among=("b", "tcp://c"))
    assert names(claims.claim(request, [A, B, C], 0)) == ["b", "c"]
    assert "has 1 of gpu, a" in str(Claims().claim(Request("one", "k", 2, 2, among=("gpu", "a")), [A, B], 0).error)
    claims.end_attempt("one")
    claims.lose(C.slot, 0)
    successor = dataclasses.replace(C, address="tcp://new", process="new")
    again = Request("one", "kernel", 2, 2, among=("b", "tcp://c", B.slot, C.slot), attempt=1)
    assert names(claims.claim(again, [A, B, successor], 1)) == ["b", "c"]
