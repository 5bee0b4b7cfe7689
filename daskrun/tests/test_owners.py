"""A worker has one owner at a time, and who gets none is told why."""

import dataclasses

import pytest
from daskrun.claims import REPLACED_S, Claimed, Denied, Owners, Request, Worker

from daskrun import WorkersBusy


def worker(name, **about):
    return Worker(f"tcp://{name}", f"process of {name}", f"nanny of {name}", "host", name, **about)


A, B, C = map(worker, "abc")


def names(answer):
    assert isinstance(answer, Claimed), answer.error
    return [worker.name for worker in answer.workers]


def test_workers_are_taken_by_host_and_name_and_belong_to_the_job_until_it_gives_them_up():
    owners, ten = Owners(), worker("10")
    far = dataclasses.replace(worker("1"), host="z")
    assert names(owners.claim(Request("one", "kernel", 2, 2), [far, ten, A, worker("9")], 0)) == ["9", "a"]
    owners.free("one")
    assert names(owners.claim(Request("one", "kernel", 1, 1), [A, B], 0)) == ["a"]
    assert names(owners.claim(Request("two", "kernel", 1, 1), [A, B], 0)) == ["b"]
    assert set(owners.owned().values()) == {"one", "two"}
    owners.free("one")
    assert owners.owned() == {"nanny of b": "two"}


def test_a_worker_whose_nanny_is_silent_stays_the_jobs_until_it_has_answered():
    owners = Owners()
    owners.claim(Request("one", "kernel"), [A, B], 0)
    owners.free("one", but={A.slot})
    assert owners.owned() == {A.slot: "one"}
    owners.free_slot(A.slot, "two")
    owners.free_slot(B.slot, "one")
    assert owners.owned() == {A.slot: "one"}
    owners.free_slot(A.slot, "one")
    assert owners.owned() == {}


def test_survivors_that_look_idle_still_belong_to_the_job_whose_worker_died():
    owners = Owners()
    owners.claim(Request("one", "kernel"), [A, B], 0)
    denied = owners.claim(Request("two", "other kernel", 1, 1), [A], 0)  # b is dead; a's rank has ended by itself
    assert isinstance(denied.error, WorkersBusy) and "belongs to the job one" in str(denied.error)


def test_a_successor_belongs_to_the_job_that_goes_on_and_to_nobody_else():
    owners = Owners()
    owners.claim(Request("one", "kernel"), [A, B], 0)
    owners.replace([A], 0)
    successor = dataclasses.replace(A, address="tcp://new", process="new")
    assert "belongs to the job one" in str(owners.claim(Request("two", "other", 1, 1), [successor, B], 1).error)
    assert names(owners.claim(Request("one", "kernel", 2, 2), [successor, B], 1)) == ["a", "b"]
    assert owners.owners_of("tcp://new") == ["one"] and owners.owners_of(A.address) == []


def test_a_job_that_goes_on_with_others_gives_up_the_slots_that_it_does_not_need():
    owners = Owners()
    owners.claim(Request("one", "kernel"), [A, B], 0)
    assert names(owners.claim(Request("one", "kernel", 2, 2), [B, C], 0)) == ["b", "c"]
    assert "nanny of a" not in owners.owned()


def test_a_killed_worker_is_not_taken_though_the_scheduler_still_lists_it():
    owners = Owners()
    owners.replace([A], 0)
    denied = owners.claim(Request("one", "kernel"), [A, B], 1)
    assert denied.soon and not owners.owned()
    assert names(owners.claim(Request("one", "kernel", 1, 1), [A, B], 1)) == [
        "b"
    ]  # who needs no successor does not wait


def test_a_successor_that_only_starts_is_awaited_too():
    owners = Owners()
    owners.replace([A], 0)
    starting = dataclasses.replace(A, address="tcp://new", process="new", status="init")
    assert owners.claim(Request("one", "kernel"), [starting, B], 1).soon
    ready = dataclasses.replace(starting, status="running")
    assert names(owners.claim(Request("one", "kernel"), [ready, B], 1)) == ["a", "b"]


def test_a_successor_is_awaited_by_who_needs_it_and_not_without_an_end():
    owners = Owners()
    owners.replace([A], 0)
    assert owners.claim(Request("one", "kernel", 2, 2), [B], REPLACED_S - 1).soon
    assert not owners.claim(Request("one", "kernel", 2, 2), [B], REPLACED_S + 1).soon
    assert names(owners.claim(Request("one", "kernel"), [B], REPLACED_S + 1)) == ["b"]


def test_what_a_lost_kernel_owned_is_known_so_that_its_ranks_can_be_ended():
    owners = Owners()
    owners.claim(Request("one", "kernel"), [A, B], 0)
    owners.claim(Request("two", "other", 1, 1), [C], 0)
    assert owners.of_client("kernel") == {"one": []}
    owners.begin("one", B.address)
    owners.begin("two", A.address)  # the rank of an earlier owner, which has no nanny
    assert owners.of_client("kernel") == {"one": [B.address]}
    owners.free_all()
    assert owners.owned() == {}


@pytest.mark.parametrize("fewest", [None, 2])
def test_a_paused_worker_is_not_taken_but_named_with_its_memory_and_the_cure(fewest):
    paused = dataclasses.replace(A, status="paused", memory="3.1 GiB of 3.6 GiB")
    denied = Owners().claim(Request("one", "kernel", fewest, fewest), [paused, B], 0)
    assert isinstance(denied.error, WorkersBusy)
    assert all(word in str(denied.error) for word in (A.address, "paused", "3.1 GiB of 3.6 GiB", "restart_workers"))
    assert names(Owners().claim(Request("one", "kernel", 1, 1), [paused, B], 0)) == ["b"]


def test_busy_workers_are_left_alone_and_named_with_their_tasks():
    busy = dataclasses.replace(A, tasks=("sleep-1",))
    denied = Owners().claim(Request("one", "kernel"), [busy, B], 0)
    assert "tcp://a is busy with ['sleep-1']" in str(denied.error)
    stuck = Request("one", "kernel", stuck={B.address: ["cancelled-1"]})
    assert "tcp://b is busy with ['cancelled-1']" in str(Owners().claim(stuck, [A, B], 0).error)
    assert "retiring" in str(Owners().claim(Request("one", "k"), [dataclasses.replace(A, status="retiring")], 0).error)


def test_ranks_are_of_one_kind():
    gpu = worker("gpu", has_gpu=True)
    answer = Owners().claim(Request("one", "kernel"), [A, B, gpu], 0)
    assert names(answer) == ["gpu"] and answer.left_out == (A.address, B.address)
    assert names(Owners().claim(Request("one", "kernel", 2, 2), [A, B, gpu], 0)) == ["a", "b"]
    assert "1 with a GPU and 2 without" in str(Owners().claim(Request("one", "k", 3, 3), [A, B, gpu], 0).error)
    again = Request("one", "kernel", has_gpu=False)  # after a death, the kind stays
    assert names(Owners().claim(again, [A, gpu], 0)) == ["a"]


def test_too_few_workers_are_no_reason_to_call_anybody_busy():
    for workers, fewest, word in (([A], 2, "has 1"), ([], None, "has 0"), ([], 3, r"needs 3 workers")):
        denied = Owners().claim(Request("one", "kernel", fewest, fewest), workers, 0)
        assert not isinstance(denied.error, WorkersBusy) and word in str(denied.error) and not denied.soon


def test_the_workers_of_a_job_that_has_failed_are_waited_for_but_not_without_an_end():
    owners = Owners()
    owners.claim(Request("one", "kernel"), [A, B], 0)
    assert not owners.claim(Request("two", "kernel"), [A, B], 0).soon
    owners.expect_end("one", now=0)
    assert owners.claim(Request("two", "kernel"), [A, B], 1).soon
    assert not owners.claim(Request("two", "kernel"), [A, B], REPLACED_S + 1).soon
    owners.free("one")
    assert names(owners.claim(Request("two", "kernel"), [A, B], 1)) == ["a", "b"]


def test_killed_workers_with_a_gpu_are_waited_for_before_others_are_taken():
    gpus = [worker(name, has_gpu=True) for name in ("g0", "g1")]
    owners = Owners()
    owners.replace(gpus, 0)
    assert owners.claim(Request("one", "kernel", 2, 2), [A, B, C], 1).soon
    assert names(owners.claim(Request("one", "kernel", 2, 2), [A, B, C], REPLACED_S + 1)) == ["a", "b"]


def test_the_kind_of_a_pairs_workers_does_not_depend_on_how_long_it_waits():
    gpus = [worker(name, has_gpu=True) for name in ("g0", "g1")]
    patient = Request("one", "kernel", fewest=3, most=3, enough=2)
    assert isinstance(Owners().claim(patient, [A, B, C, *gpus], 0), Denied)
    assert names(Owners().claim(Request("one", "k", 2, 3, enough=2), [A, B, C, *gpus], 0)) == ["g0", "g1"]
