"""Each fault is found by the looks that the notebook teaches, and leaves nothing behind on the workers."""

import inspect
import os
from itertools import count

import psutil
import pytest
from solver import solve
from waiting import until

import daskrun
from workshop_utils.cluster import start_cluster
from workshop_utils.exercises import gym
from workshop_utils.exercises.gym import scores
from workshop_utils.exercises.gym.faults import FOUND, draw, possible_with
from workshop_utils.exercises.gym.run import PIECES, original_of

ALL = list(FOUND)
FOR_CI = ("uneven batches", "bad resume")  # one that hangs, and one that is only wrong; the others once a week
ROOM = "2 GiB"


@pytest.fixture(scope="module")
def room():
    client = start_cluster(2, memory_limit=ROOM)
    yield client
    client.shutdown()


def seed_of(number):
    """Return the first seed that draws this fault."""
    return next(seed for seed in count() if draw(seed, ALL).number == number)


def what_is_left():
    """Return what a fault may have left in this worker process."""
    import torch

    replaced = [piece for piece in PIECES if original_of(piece).__closure__]
    return {"replaced": replaced, "threads": torch.get_num_threads()}


def pids(case):
    """Return the processes of a case: those of workers and of their DataLoaders."""
    ranks = [psutil.Process(int(pid)) for pid in case.workers()["pid"].dropna()]
    return ranks + [child for rank in ranks for child in rank.children()]


def case_for(number):
    """Return the parameter of a test about a fault, or about none."""
    kind = FOUND[number].kind if number else scores.HEALTHY
    return pytest.param(number, id=kind, marks=() if kind in FOR_CI else pytest.mark.weekly)


@pytest.mark.parametrize("number", [case_for(number) for number in (0, *ALL)])
def test_a_script_that_knows_only_the_looks_finds_the_fault_and_nothing_is_left_of_it(room, number, capsys):
    case = gym.start(room, seed_of(number))
    found = solve(case)
    there = pids(case)
    cure = FOUND[number].cure if number else scores.LEFT_ALONE
    assert case.diagnose(**found, cure=cure) == scores.FULL, (found, capsys.readouterr().out)
    case.stop()

    left = daskrun.run(room, what_is_left, n_workers=2, wait_for_workers=90)
    assert left == [{"replaced": [], "threads": 1}] * 2
    assert not any(room.processing().values())
    assert_ended(room, there)


def test_the_line_that_a_stack_shows_for_a_fault_is_in_the_piece_that_it_changes():
    for one in FOUND.values():
        assert one.at in inspect.getsource(original_of(one.piece)), one.kind


def assert_ended(room, processes):
    """Wait until none of these processes is left, but those that are workers now: a reader looks every 5 s."""
    workers = room.run(os.getpid).values()
    until(lambda: not any(process.is_running() for process in processes if process.pid not in workers))


@pytest.mark.weekly
def test_twenty_cases_that_are_left_at_any_time_leave_the_workers_free(room):
    for seed in range(100, 120):
        with gym.start(room, seed) as case:
            case.result(wait_s=seed % 5)
            there = pids(case)
    assert daskrun.run(room, pow, 2, 3, n_workers=2, wait_for_workers=90) == [8, 8]
    assert_ended(room, there)


def test_one_case_in_six_is_healthy_and_each_fault_is_drawn_about_as_often():
    drawn = [draw(seed, ALL).number for seed in range(3000)]
    assert drawn.count(0) / len(drawn) == pytest.approx(1 / 6, abs=0.02)
    for number in ALL:
        assert drawn.count(number) / len(drawn) == pytest.approx(5 / 6 / 16, abs=0.015)


def test_a_seed_always_draws_the_same_rank_and_step():
    assert [draw(seed, ALL) for seed in range(200)] == [draw(seed, ALL) for seed in range(200)]
    for drawn in (draw(seed, ALL) for seed in range(500)):
        if drawn.number:
            assert drawn.rank in FOUND[drawn.number].ranks and drawn.step in FOUND[drawn.number].steps


def test_without_a_small_memory_limit_nothing_leaks_and_other_seeds_draw_what_they_did():
    leak = next(number for number, one in FOUND.items() if one.kind == "memory leak")
    for limit in (None, 2**40):
        possible = possible_with(limit)
        for seed in range(500):
            before, now = draw(seed, ALL), draw(seed, possible)
            assert now.number != leak and (now == before or before.number == leak)
    assert possible_with(2 * 2**30) == ALL
