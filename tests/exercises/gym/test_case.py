"""The gym scores answers, refuses what cannot be one, replays a seed, hides its faults, and proves cures by a rerun."""

import os
import re
import sys
import time
import traceback
from itertools import count
from unittest.mock import patch

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch.distributed as dist

from workshop_utils.cluster import start_cluster
from workshop_utils.exercises import NotYet, gym
from workshop_utils.exercises.gym import case as gym_case
from workshop_utils.exercises.gym import scores
from workshop_utils.exercises.gym.faults import FOUND, Drawn, draw
from workshop_utils.exercises.gym.run import PIECES, disguised
from workshop_utils.results import log_metrics

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it
NUMBER = {one.kind: number for number, one in FOUND.items()} | {"none": 0}
SLOW_RANK = Drawn(NUMBER["slow rank"], rank=1, step=15)


@pytest.fixture(scope="module")
def room():
    client = start_cluster(2, memory_limit="2 GiB")
    yield client
    client.shutdown()


def seed_of(kind):
    return next(seed for seed in count() if draw(seed, list(FOUND)).number == NUMBER[kind])


def ended(case):
    """Wait for the end of a case that does end."""
    assert "has not ended" not in case.result(wait_s=90)
    return case


# --- points


def test_each_part_of_an_answer_has_its_points():
    right = {"fault": "slow rank", "rank": 1, "step": 15, "cure": "another machine"}
    wrong = {"fault": "slow link", "rank": 0, "step": 22, "cure": "nothing"}
    assert scores.points(SLOW_RANK, scores.Answer(**right)) == scores.POINTS
    for part, name in (("kind", "fault"), ("place", "rank"), ("step", "step"), ("cure", "cure")):
        got = scores.points(SLOW_RANK, scores.Answer(**right | {name: wrong[name]}))
        assert got == scores.POINTS | {part: 0}
    assert scores.points(SLOW_RANK, scores.Answer(**right | {"step": 16}))["step"] == 1


def test_a_false_alarm_and_an_overlooked_fault_cost_points_and_a_healthy_job_gives_all():
    alarm, calm = scores.Answer("slow rank", 1, 15, "another machine"), scores.Answer("none")
    assert sum(scores.points(Drawn(0), alarm).values()) == sum(scores.points(SLOW_RANK, calm).values()) == -4
    assert sum(scores.points(Drawn(0), calm).values()) == scores.FULL == 10


def test_a_healthy_job_has_no_rank_no_step_and_nothing_to_cure():
    said = scores.points(Drawn(0), scores.Answer("none", 1, 3, "another machine"))
    assert said == scores.POINTS | {"place": 0, "step": 0, "cure": 0}
    assert scores.points(Drawn(0), scores.Answer("none", cure="nothing")) == scores.POINTS


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"fault": "slow"}, "fault is 'slow': write one of 'none', 'collective on one rank'"),
        ({"fault": 7}, "fault is 7: write one of"),
        ({"fault": ["none"]}, "write one of"),
        ({"fault": "none", "cure": "reboot"}, "cure is 'reboot': write one of 'nothing', "),
        ({"fault": "none", "rank": "1"}, "rank is '1': write a whole number"),
        ({"fault": "none", "rank": True}, "rank is True: write a whole number"),
        ({"fault": "none", "rank": 2}, "rank is 2: it is from 0 to 1"),
        ({"fault": "none", "step": 1.5}, "step is 1.5: write a whole number"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_with_what_can(answer, says):
    with pytest.raises(NotYet, match=re.escape(says)):
        scores.checked(**{"rank": None, "step": None, "cure": None} | answer)


def test_a_number_from_the_table_is_as_good_as_a_typed_one():
    answer = scores.checked("slow rank", np.int64(1), np.int64(15), None)
    assert scores.points(SLOW_RANK, answer) == scores.POINTS | {"cure": 0}


@pytest.mark.parametrize("seed", ["3", 1.5, None, True])
def test_a_seed_that_is_no_whole_number_is_refused_before_anything_starts(seed):
    with pytest.raises(NotYet, match="seed is"):
        gym.start(None, seed)


# --- looks


def test_before_the_first_row_the_metrics_have_their_columns():
    clean = pd.DataFrame({"step": [9], "rank": [0], "loss": [2.5]})
    with patch.object(gym.Case, "_launch") as launch:
        launch().metrics.return_value = pd.DataFrame([])
        case = gym.Case(None, 6, gym_case.Clean("", "", None, clean), Drawn(0))
    assert len(case.metrics()) == 0 and case.metrics().groupby("rank")["step"].max().empty


def test_a_hanging_job_says_so_and_the_next_case_ends_it(room, capsys):
    hangs = gym.start(room, seed_of("collective on one rank"))
    give_up, seen = time.monotonic() + 90, -1
    while "calls barrier" not in hangs.explain():
        assert time.monotonic() < give_up
        time.sleep(0.5)
    assert hangs.result(wait_s=0.5).startswith("The job has not ended within 0.5 s; it has logged ")
    begun, seen = time.monotonic(), hangs.workers()
    assert seen["n_threads"].notna().all() and list(seen["children"]) == [1, 1]
    assert time.monotonic() - begun < 25  # the rank that hangs is not waited for
    with gym.start(room, seed_of("none")) as healthy:  # on new workers
        assert set(healthy.metrics()["rank"]) == {0, 1}
        assert "<Case of seed" in repr(hangs) and "ended" in repr(hangs)
        assert "CancelledError" in hangs.result(wait_s=0)
        assert ended(healthy).diagnose("none") == 10
    assert "Your looks: metrics 1, result 1." in capsys.readouterr().out


def test_a_case_is_there_when_both_ranks_have_logged_a_step(room, monkeypatch):
    def late(plan):
        for step in (9, 10):
            time.sleep(dist.get_rank())
            log_metrics(step=step)

    gym.start(room, seed_of("none")).stop()  # which makes the clean run, of the real function
    monkeypatch.setattr(gym_case, "train_sketches", late)
    with gym.start(room, seed_of("none")) as case:
        assert set(case._job.metrics()["rank"]) == {0, 1}


def test_looks_are_counted_and_refusals_and_the_clean_run_are_not(room, capsys):
    case = ended(gym.start(room, seed_of("none")))
    assert case.n_looks == 1
    case.metrics(), case.metrics(), case.logs(), case.clean
    with pytest.raises(NotYet):
        case.diagnose("broken")
    with pytest.raises(NotYet, match="cure is 'broken'"):
        case.rerun("broken")
    with pytest.raises(NotYet, match="flow is no piece of the training: write one of keep"):
        case.rerun(flow=print)
    assert case.n_looks == 4
    case.diagnose("none", cure="nothing")
    assert "Your looks: result 1, metrics 2, logs 1." in capsys.readouterr().out


def test_a_healthy_case_takes_the_steps_of_the_clean_run_to_the_bit(room):
    case = ended(gym.start(room, seed_of("none")))
    same = ["step", "rank", "loss", "weights", "momentum", "pixels", "images"]
    assert case.metrics()[same].equals(case.clean[same])
    assert case.metrics()["gradient"].tolist() == pytest.approx(case.clean["gradient"].tolist(), rel=1e-5)
    assert case.metrics()["step"].min() == 9 and case.metrics()["step"].max() == 36


def test_a_seed_replays(room):
    seed = seed_of("bad gradient")
    first = ended(gym.start(room, seed)).metrics()
    again = ended(gym.start(room, seed)).metrics()
    columns = ["step", "rank", "loss", "weights"]
    assert first[columns].equals(again[columns]) and not first[columns].equals(gym.start(room, seed).clean[columns])


# --- nothing gives the answer away


def names_of_faults():
    """Return a pattern of all words by which a fault could be recognised."""
    words = {one.kind for one in FOUND.values()} | {one.make.__name__ for one in FOUND.values()}
    words |= {one.cure for one in FOUND.values()} | {"faults.py", "exercises.faults", "Drawn"}
    return re.compile("|".join(re.escape(form) for word in words for form in (word, word.replace(" ", "_"))))


def about_this_worker(dask_worker):
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return str(environment) + str(list(dask_worker.state.tasks))


@pytest.mark.parametrize("kind", ["uneven batches", "bad resume", pytest.param("slow link", marks=pytest.mark.long)])
def test_no_name_of_a_fault_is_in_stacks_logs_metrics_environment_or_keys(room, kind):
    case, pattern = gym.start(room, seed_of(kind)), names_of_faults()
    assert pattern.search(kind) and pattern.search("File faults.py, line 3, in one_batch_fewer")
    give_up, found = time.monotonic() + 60, []
    while len(case.metrics()) < 4 and time.monotonic() < give_up:
        found += [text for text in (case.stacks(), case.explain()) if "importlib" not in text]  # those of all faults
        time.sleep(0.1)
    found += [case.stacks(), case.explain(), case.metrics().to_csv(), case.logs(), case.result(wait_s=5), repr(case)]
    found += room.run(about_this_worker).values()
    found += [str(room.processing()), str(room.who_has()), str(list(room.futures))]
    assert "train_sketches" in "".join(found)
    assert not [text[max(0, match.start() - 300) : match.end()] for text in found if (match := pattern.search(text))]


def the_original():
    """A function of a library."""
    first = 1
    return first + 1


def made(here, original):
    def raises():
        assert original() == 2
        raise ValueError("seen")

    return raises


def test_a_replacement_shows_the_name_and_a_line_of_what_it_replaces():
    with pytest.raises(ValueError, match="seen") as caught:
        disguised(made, the_original, "first = 1")(None, the_original)()
    shown = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (shown.name, shown.line, shown.filename) == ("the_original", "first = 1", __file__)
    assert made(None, the_original).__name__ == "raises"


# --- proof by rerun


def test_the_right_cure_passes_a_wrong_one_fails_and_says_which_invariant(room, capsys):
    case = gym.start(room, seed_of("bad resume"))
    assert case.rerun("load all of the checkpoint")
    shown = capsys.readouterr().out
    assert shown.count("holds ") == 4 and "FAILED" not in shown
    assert not case.rerun("shard by rank")
    assert re.findall(r"FAILED  (.*?):", capsys.readouterr().out) == ["the clean run's losses"]


def test_a_job_that_drifts_or_is_slow_fails_its_own_invariant(room, capsys):
    assert not gym.start(room, seed_of("weights drift")).rerun("nothing")
    assert "FAILED  equal weights on all ranks: they differ from step" in capsys.readouterr().out
    assert not gym.start(room, seed_of("slow link")).rerun("nothing")
    assert re.findall(r"FAILED  (.*?):", capsys.readouterr().out) == ["a step's time"]


def test_a_late_fault_is_still_seen_after_a_wrong_cure(room, capsys):
    late = next(
        seed
        for seed in count()
        if (drawn := draw(seed, list(FOUND))).number == NUMBER["bad gradient"] and drawn.step >= 25
    )
    assert not gym.start(room, late).rerun("time limit for reads")
    assert re.findall(r"FAILED  (.*?):", capsys.readouterr().out) == ["the clean run's losses"]


@pytest.mark.long
def test_a_job_that_still_hangs_fails_in_time_and_the_next_rerun_works(room, monkeypatch, capsys):
    monkeypatch.setattr("workshop_utils.exercises.gym.case.RERUN_S", 20)
    case = gym.start(room, seed_of("collectives swapped"))
    assert not case.rerun("shard by rank")
    assert "FAILED  it ends: TimeoutError" in capsys.readouterr().out
    assert case.rerun("same collectives on all ranks")


def test_the_attendees_own_function_may_be_the_cure(room, capsys):
    def mended(here, original):
        def resume(self):
            return original(self)

        return resume

    case = gym.start(room, seed_of("bad resume"))
    assert case.rerun(resume=mended)
    assert not case.rerun(keep=lambda here, original: lambda self, *args: original(self, *args))


# --- scores that cannot be had for nothing


def test_the_first_answer_counts_also_after_the_solution_was_printed(room, capsys):
    case = gym.start(room, seed_of("bad resume"))
    first = case.diagnose("slow link")
    shown = capsys.readouterr().out
    assert first < scores.FULL and "first answer" not in shown and "bad resume" in shown
    assert case.diagnose("bad resume", None, 9, "load all of the checkpoint") == first
    assert f"Your first answer counts: {first} of {scores.FULL}." in capsys.readouterr().out


def test_whoever_only_says_that_something_is_wrong_gets_no_points():
    slow = Drawn(7, rank=1, step=15)
    assert sum(scores.points(slow, scores.Answer("bad resume", 0, 30, "shard by rank")).values()) == 0
    assert scores.points(slow, scores.Answer("bad resume", 1))["detection"] > 0


def test_swapped_collectives_may_be_called_a_collective_on_one_rank_and_not_the_other_way_round():
    kinds = {one.kind: number for number, one in FOUND.items()}
    swapped, alone = (Drawn(kinds[kind], 0, 16) for kind in ("collectives swapped", "collective on one rank"))
    assert scores.points(swapped, scores.Answer("collective on one rank", 0))["kind"] > 0
    assert scores.points(alone, scores.Answer("collectives swapped", 0))["kind"] == 0


def test_a_healthy_case_is_not_called_repaired(room, capsys):
    case = gym.start(room, seed_of("none"))
    assert case.rerun("shard by rank")
    assert "Nothing was wrong" not in capsys.readouterr().out  # it would be the answer
    assert "rerun 1" in (case.diagnose("none"), capsys.readouterr().out)[1]
    assert case.rerun("shard by rank")
    assert "Nothing was wrong before, either." in capsys.readouterr().out


def test_a_rerun_mends_one_piece_at_a_time(room):
    with pytest.raises(NotYet, match="mend one piece"):
        gym.start(room, 1).rerun(**dict.fromkeys(PIECES, lambda here, original: original))


def test_a_rerun_of_an_older_case_ends_the_newer_one(room):
    older = gym.start(room, seed_of("bad resume"))
    gym.start(room, seed_of("uneven batches"))
    assert older.rerun("load all of the checkpoint")


@pytest.mark.parametrize("seed", [np.int64(6), 6])
def test_numpys_numbers_are_seeds_too(room, seed):
    assert gym.start(room, seed).seed == 6
