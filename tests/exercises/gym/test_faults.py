"""Each fault shows in the looks that the notebook teaches, is not named there, and leaves nothing on the workers."""

import os
import re
import sys
import time
from contextlib import suppress
from itertools import count

import cloudpickle
import psutil
import pytest
from solver import solve
from waiting import until

import daskrun
from workshop_utils.cluster import start_cluster
from workshop_utils.exercises import NotYet, gym
from workshop_utils.exercises import when_it_goes_wrong as exercises
from workshop_utils.exercises.gym import case as gym_case
from workshop_utils.exercises.gym.faults import BY_KIND, CURES, FAULTS, FULL, draw

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it
FOR_CI = ("bad resume",)  # one that is only wrong; notebook 12 has one that hangs, and the others come once a week


@pytest.fixture(scope="module")
def room():
    client = start_cluster(2, memory_limit="2 GiB")
    yield client
    client.shutdown()


def start(room, kind):
    """Start the case of the first seed that draws this fault, or none."""
    return gym.start(room, next(seed for seed in count() if draw(seed).fault == kind))


def ended(case):
    """Wait for the end of a case that does end."""
    assert "has not ended" not in case.result(wait_s=90)
    return case


def processes_of(case):
    """Return the processes of a case: those of its ranks and of their DataLoaders."""
    found = []
    for pid in case.workers()["pid"].dropna():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            rank = psutil.Process(int(pid))
            found += [rank, *rank.children()]
    return found


def assert_ended(processes):
    until(lambda: not any(process.is_running() for process in processes))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FOR_CI else pytest.mark.weekly) for kind in FAULTS]
)
def test_a_script_that_knows_only_the_looks_finds_the_fault_and_nothing_is_left_of_it(room, kind, capsys):
    case = start(room, kind)
    answer = solve(case) | {"cure": BY_KIND[kind].cure if kind in BY_KIND else "nothing"}
    there = processes_of(case)
    assert case.diagnose(**answer) == FULL, (answer, capsys.readouterr().out)
    exercises.check_case(answer, case)
    with pytest.raises(NotYet):
        exercises.check_case(answer | {"fault": "slow link" if kind != "slow link" else "slow rank"}, case)
    case.stop()

    assert daskrun.run(room, pow, 2, 3, n_workers=2) == [8, 8]
    assert_ended(there)


@pytest.mark.weekly
def test_twenty_cases_that_are_left_at_any_time_leave_the_workers_free(room):
    for seed in range(100, 120):
        with gym.start(room, seed) as case:
            case.result(wait_s=seed % 5)
            there = processes_of(case)
    assert daskrun.run(room, pow, 2, 3, n_workers=2) == [8, 8]
    assert_ended(there)


@pytest.mark.weekly
def test_a_hanging_job_says_so_and_the_next_case_ends_it(room, capsys):
    hangs = start(room, "collective on one rank")
    until(lambda: "calls barrier" in hangs.explain())
    assert hangs.result(wait_s=0.5).startswith("The job has not ended within 0.5 s; it has logged ")
    seen = hangs.workers()  # the rank that hangs is not waited for
    assert list(seen["children"]) == [1, 1] and list(seen["torch_threads"]) == [1, 1]
    with start(room, "none") as healthy:
        assert set(healthy.metrics()["rank"]) == {0, 1}
        assert "<Case of seed" in repr(hangs) and "ended" in repr(hangs)
        assert "CancelledError" in hangs.result(wait_s=0)
        assert ended(healthy).diagnose("none") == FULL
    assert "Your looks: metrics 1, result 1." in capsys.readouterr().out


@pytest.mark.weekly
def test_a_healthy_case_takes_the_steps_of_the_clean_run_to_the_bit(room):
    case = ended(start(room, "none"))
    same = ["step", "rank", "loss", "weights", "momentum", "pixels", "images"]
    assert case.metrics()[same].equals(case.clean[same])
    assert case.metrics()["gradient"].tolist() == pytest.approx(case.clean["gradient"].tolist(), rel=1e-5)


def test_the_right_cure_or_ones_own_function_passes_and_a_wrong_one_fails(room):
    case = start(room, "bad resume")
    assert case.rerun("load all of the checkpoint")
    assert case.rerun(resume=lambda original, checkpoint: original(checkpoint))
    assert not case.rerun("shard by rank")


@pytest.mark.weekly
def test_a_job_that_is_still_slow_or_still_hangs_fails_and_the_next_rerun_works(room, monkeypatch, capsys):
    assert not start(room, "slow link").rerun("nothing")
    assert re.findall(r"FAILED  (.*?):", capsys.readouterr().out) == ["a step's time"]
    monkeypatch.setattr(gym_case, "QUIET_S", 15)
    case = start(room, "collectives swapped")
    assert not case.rerun("shard by rank")
    assert "FAILED  it ends: No rank has logged a step for 15 s. The ranks' collective" in capsys.readouterr().out
    monkeypatch.undo()
    assert case.rerun("same collectives on all ranks")


# --- nothing gives the answer away


def about_this_worker(dask_worker):
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return str(environment) + str(list(dask_worker.state.tasks))


@pytest.mark.weekly
@pytest.mark.parametrize("kind", ["uneven batches", "bad resume", "slow link"])
def test_no_name_of_a_fault_is_in_stacks_logs_metrics_environment_or_keys(room, kind):
    names = re.compile("|".join([*BY_KIND, *CURES[1:], "faults.py", "Diagnosis", "leak", "slow"]).replace(" ", "[ _]"))
    case = start(room, kind)
    give_up, found = time.monotonic() + 60, []
    while len(case.metrics()) < 4 and time.monotonic() < give_up:
        found += [text for text in (case.stacks(), case.explain()) if "importlib" not in text]  # of faults.py
        time.sleep(0.1)
    found += [case.stacks(), case.explain(), case.metrics().to_csv(), case.logs(), case.result(wait_s=5), repr(case)]
    found += room.run(about_this_worker).values()
    found += [str(room.processing()), str(room.who_has()), str(list(room.futures))]
    assert "train_sketches" in "".join(found)
    assert not [text[max(0, match.start() - 300) : match.end()] for text in found if (match := names.search(text))]
