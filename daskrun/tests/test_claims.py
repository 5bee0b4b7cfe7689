"""A worker has one owner at a time, and who gets none is told why."""

import dataclasses

from daskrun import WorkersBusy
from daskrun.claims import RENEWED_S, Claimed, Claims, Denied, Request, Worker


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
    assert set(claims.owned().values()) == {"one", "two"}
    claims.release("one")
    assert claims.owned() == {"nanny of b": "two"}


def after_a_kill(*killed):
    """Return the claims after a job whose workers were killed at its end, at 0 s."""
    claims = Claims()
    claims.claim(Request("killed", "kernel"), killed, 0)
    claims.renew(killed, 0)
    claims.release("killed")
    return claims


def test_a_successor_belongs_to_the_job_that_goes_on_and_to_nobody_else():
    claims = Claims()
    claims.claim(Request("one", "kernel"), [A, B], 0)
    claims.renew([A], 0)
    successor = dataclasses.replace(A, address="tcp://new", process="new")
    assert "belongs to the job one" in str(claims.claim(Request("two", "other", 1, 1), [successor, B], 1).error)
    assert names(claims.claim(Request("one", "kernel", 2, 2), [successor, B], 1)) == ["a", "b"]
    assert claims.owners_of("tcp://new") == [("one", "kernel", "new")] and claims.owners_of(A.address) == []


def test_a_job_that_goes_on_with_others_gives_up_the_slots_that_it_does_not_need():
    claims = Claims()
    claims.claim(Request("one", "kernel"), [A, B], 0)
    assert names(claims.claim(Request("one", "kernel", 2, 2), [B, C], 0)) == ["b", "c"]
    assert "nanny of a" not in claims.owned()


def test_a_successor_that_only_starts_is_awaited_too():
    claims = after_a_kill(A)
    starting = dataclasses.replace(A, address="tcp://new", process="new", status="init")
    assert claims.claim(Request("one", "kernel"), [starting, B], 1).being_renewed
    ready = dataclasses.replace(starting, status="running")
    assert names(claims.claim(Request("one", "kernel"), [ready, B], 1)) == ["a", "b"]


def test_a_successor_is_awaited_by_who_needs_it_and_not_without_an_end():
    claims = after_a_kill(A)
    assert claims.claim(Request("one", "kernel", 2, 2), [B], RENEWED_S - 1).being_renewed
    assert not claims.claim(Request("one", "kernel", 2, 2), [B], RENEWED_S + 1).being_renewed
    assert names(claims.claim(Request("one", "kernel"), [B], RENEWED_S + 1)) == ["b"]


def test_what_a_lost_kernel_owned_is_known_so_that_its_ranks_can_be_ended():
    claims = Claims()
    claims.claim(Request("one", "kernel"), [A, B], 0)
    claims.claim(Request("two", "other", 1, 1), [C], 0)
    assert claims.of_client("kernel") == {"one": []}
    claims.begin("one", 0, B.address)
    claims.begin("two", 0, A.address)  # the rank of an earlier owner, which has no nanny
    assert claims.of_client("kernel") == {"one": [B]}
    claims.release_all()
    assert claims.owned() == {}


def test_busy_workers_are_left_alone_and_named_with_their_tasks():
    busy = dataclasses.replace(A, tasks=("sleep-1",))
    denied = Claims().claim(Request("one", "kernel"), [busy, B], 0)
    assert "tcp://a is busy with ['sleep-1']" in str(denied.error)
    stuck = Request("one", "kernel", stuck={B.address: "does not answer"})
    assert "tcp://b does not answer" in str(Claims().claim(stuck, [A, B], 0).error)
    assert "retiring" in str(Claims().claim(Request("one", "k"), [dataclasses.replace(A, status="retiring")], 0).error)


def test_ranks_are_of_one_kind():
    gpu = worker("gpu", has_gpu=True)
    answer = Claims().claim(Request("one", "kernel"), [A, B, gpu], 0)
    assert names(answer) == ["gpu"] and answer.left_out == (A.address, B.address)
    assert names(Claims().claim(Request("one", "kernel", 2, 2), [A, B, gpu], 0)) == ["a", "b"]
    assert "1 with a GPU and 2 without" in str(Claims().claim(Request("one", "k", 3, 3), [A, B, gpu], 0).error)
    again = Request("one", "kernel", has_gpu=False)  # after a death, the kind stays
    assert names(Claims().claim(again, [A, gpu], 0)) == ["a"]


def test_too_few_workers_are_no_reason_to_call_anybody_busy():
    for workers, fewest, word in (([A], 2, "has 1"), ([], None, "has 0"), ([], 3, r"needs 3 workers")):
        denied = Claims().claim(Request("one", "kernel", fewest, fewest), workers, 0)
        assert not isinstance(denied.error, WorkersBusy) and word in str(denied.error) and not denied.being_renewed


def test_the_workers_of_a_job_that_has_failed_are_waited_for_but_not_without_an_end():
    claims = Claims()
    claims.claim(Request("one", "kernel"), [A, B], 0)
    assert not claims.claim(Request("two", "kernel"), [A, B], 0).being_renewed
    claims.expect_end("one", now=0)
    assert claims.claim(Request("two", "kernel"), [A, B], 1).being_renewed
    assert not claims.claim(Request("two", "kernel"), [A, B], RENEWED_S + 1).being_renewed
    claims.stay([A.slot, B.slot])  # none of its ranks had begun
    claims.release("one")
    assert names(claims.claim(Request("two", "kernel"), [A, B], 1)) == ["a", "b"]


def test_killed_workers_with_a_gpu_are_waited_for_before_others_are_taken():
    gpus = [worker(name, has_gpu=True) for name in ("g0", "g1")]
    claims = after_a_kill(*gpus)
    assert claims.claim(Request("one", "kernel", 2, 2), [A, B, C], 1).being_renewed
    assert names(claims.claim(Request("one", "kernel", 2, 2), [A, B, C], RENEWED_S + 1)) == ["a", "b"]


def test_a_worker_that_is_killed_is_awaited_though_its_job_has_given_it_up():
    claims = Claims()
    claims.renew([A], 0)  # a rank began there after its client was lost
    assert claims.claim(Request("one", "kernel"), [A, B], 1).being_renewed


def test_a_worker_that_nobody_replaces_is_free_once_that_is_known():
    claims = after_a_kill(A)
    claims.stay([A.slot])
    assert names(claims.claim(Request("one", "kernel"), [A], 1)) == ["a"]


def test_the_kind_of_a_pairs_workers_does_not_depend_on_how_long_it_waits():
    gpus = [worker(name, has_gpu=True) for name in ("g0", "g1")]
    patient = Request("one", "kernel", fewest=3, most=3, minimum=2)
    assert isinstance(Claims().claim(patient, [A, B, C, *gpus], 0), Denied)
    assert names(Claims().claim(Request("one", "k", 2, 3, minimum=2), [A, B, C, *gpus], 0)) == ["g0", "g1"]
