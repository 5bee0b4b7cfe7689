"""The gym scores answers, refuses what cannot be one, replays a seed, hides its faults, and proves cures by a rerun."""

import os
import re
import sys
import time
import uuid
from itertools import count
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pandas as pd
import pytest
from waiting import until

from workshop_utils.cluster import start_cluster
from workshop_utils.exercises import NotYet, gym
from workshop_utils.exercises.gym import case as gym_case
from workshop_utils.exercises.gym import scores
from workshop_utils.exercises.gym.faults import FOUND, Drawn, draw
from workshop_utils.exercises.gym.run import PIECES

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
    assert sum(scores.points(Drawn(0), alarm).values()) == sum(scores.points(SLOW_RANK, calm).values()) < 0
    assert sum(scores.points(Drawn(0), calm).values()) == scores.FULL


def test_swapped_collectives_may_be_called_a_collective_on_one_rank_and_not_the_other_way_round():
    swapped, alone = (Drawn(NUMBER[kind], 0, 16) for kind in ("collectives swapped", "collective on one rank"))
    assert scores.points(swapped, scores.Answer("collective on one rank", 0))["kind"] > 0
    assert scores.points(alone, scores.Answer("collectives swapped", 0))["kind"] == 0


# --- a case whose jobs are tables, so that their clock is a column


class Job:
    """A job that shows these tables of metrics in turn, and has ended once the last is there."""

    def __init__(self, *tables, error=None):
        self.tables, self.error, self.cancelled = list(tables), error, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cancel()

    def metrics(self):
        return self.tables.pop(0) if len(self.tables) > 1 else self.tables[0]

    def done(self):
        return len(self.tables) == 1

    def result(self):
        if self.error:
            raise self.error
        return ["well", "well"]

    def explain(self):
        return "all is well"

    def cancel(self):
        self.cancelled = True


def table(loss=lambda step: 2.0, weights=lambda step, rank: "0", seconds=lambda step: 0.1, steps=range(9, 37)):
    """Return what two ranks logged."""
    rows = [
        {"step": step, "rank": rank, "attempt": 0, "worker": "w", "loss": loss(step), "weights": weights(step, rank)}
        | {"load_s": 0.0, "compute_s": seconds(step), "comm_s": 0.0}
        for step in steps
        for rank in (0, 1)
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def start(monkeypatch, tmp_path):
    """A function that starts a case whose launches are these jobs, one after the other."""
    (tmp_path / "start.pt").touch()
    clean = gym_case.Clean(str(tmp_path), "", None, table().drop(columns=gym_case.HIDDEN))
    monkeypatch.setattr(gym_case, "make_clean", lambda client: clean)

    def start(seed, *jobs):
        jobs = list(jobs)
        monkeypatch.setattr(gym_case.daskrun, "launch", lambda *args, **settings: jobs.pop(0))
        return gym.start(SimpleNamespace(id=uuid.uuid4().hex), seed)

    return start


@pytest.mark.parametrize("seed", ["3", 1.5, None, True])
def test_a_seed_that_is_no_whole_number_is_refused_before_anything_starts(seed):
    with pytest.raises(NotYet, match="seed is"):
        gym.start(None, seed)


def test_a_case_is_there_when_both_ranks_have_logged_a_step(start):
    of_rank_0, of_both = table()[:1], table()[:2]
    job = Job(pd.DataFrame([]), of_rank_0, of_rank_0, of_both, table(), table())
    assert start(np.int64(6), job).seed == 6
    assert len(job.tables) == 2 and not job.done()  # what came after the tables of both was not waited for


def test_looks_are_counted_and_refusals_and_the_clean_run_are_not(start, capsys):
    case = start(seed_of("none"), Job(table()))
    case.metrics(), case.metrics(), case.explain(), case.result(), case.clean
    with pytest.raises(NotYet):
        case.diagnose("broken")
    with pytest.raises(NotYet, match="cure is 'broken'"):
        case.rerun("broken")
    with pytest.raises(NotYet, match="flow is no piece of the training: write one of keep"):
        case.rerun(flow=print)
    with pytest.raises(NotYet, match="mend one piece"):
        case.rerun(**dict.fromkeys(PIECES, lambda here, original: original))
    assert case.n_looks == 4
    case.diagnose("none", cure="nothing")
    assert "Your looks: metrics 2, explain 1, result 1." in capsys.readouterr().out


# The weakest fault moves a loss by 1.6e-4 of it; what is slow takes five times as long on top.
@pytest.mark.parametrize(
    ("job", "failed"),
    [
        (Job(table()), []),
        (Job(table(seconds=lambda step: 0.1 if step < 18 or step % 3 == 0 else 1.0)), []),  # on a busy machine
        (Job(table(seconds=lambda step: 0.1 if step < 17 else 0.6)), ["a step's time"]),
        (Job(table(weights=lambda step, rank: str(rank * (step > 20)))), ["equal weights on all ranks"]),
        (Job(table(loss=lambda step: 2.0 if step < 30 else 2.00032)), ["the clean run's losses"]),
        (Job(table(steps=range(9, 20)), error=TimeoutError("late")), ["it ends", "the clean run's losses"]),
    ],
)
def test_a_rerun_holds_what_a_good_run_holds_and_says_what_failed(start, capsys, job, failed):
    case = start(seed_of("none"), Job(table()), job)
    assert case.rerun("shard by rank") == (not failed)
    shown = capsys.readouterr().out
    assert re.findall(r"FAILED  (.*?):", shown) == failed and ("holds " in shown or "TimeoutError: late" in shown)


def test_a_healthy_case_is_not_called_repaired(start, capsys):
    case = start(seed_of("none"), Job(table()), Job(table()), Job(table()))
    assert case.rerun("shard by rank")
    assert "Nothing was wrong" not in capsys.readouterr().out  # it would be the answer
    case.diagnose("none")
    assert "rerun 1" in capsys.readouterr().out
    assert case.rerun("shard by rank")
    assert "Nothing was wrong before, either." in capsys.readouterr().out


def test_a_rerun_of_an_older_case_ends_the_newer_one(start):
    newer = Job(table())
    older = start(seed_of("bad resume"), Job(table()), newer, Job(table()))
    gym.start(SimpleNamespace(id="another"), 6)
    assert not newer.cancelled
    assert older.rerun("load all of the checkpoint") and newer.cancelled


# --- real jobs


@pytest.mark.weekly
def test_a_hanging_job_says_so_and_the_next_case_ends_it(room, capsys):
    hangs = gym.start(room, seed_of("collective on one rank"))
    until(lambda: "calls barrier" in hangs.explain())
    assert hangs.result(wait_s=0.5).startswith("The job has not ended within 0.5 s; it has logged ")
    seen = hangs.workers()  # the rank that hangs is not waited for
    assert seen["n_threads"].notna().all() and list(seen["children"]) == [1, 1]
    with gym.start(room, seed_of("none")) as healthy:  # on new workers
        assert set(healthy.metrics()["rank"]) == {0, 1}
        assert "<Case of seed" in repr(hangs) and "ended" in repr(hangs)
        assert "CancelledError" in hangs.result(wait_s=0)
        assert ended(healthy).diagnose("none") == scores.FULL
    assert "Your looks: metrics 1, result 1." in capsys.readouterr().out


@pytest.mark.weekly
def test_a_healthy_case_takes_the_steps_of_the_clean_run_to_the_bit(room):
    case = ended(gym.start(room, seed_of("none")))
    same = ["step", "rank", "loss", "weights", "momentum", "pixels", "images"]
    assert case.metrics()[same].equals(case.clean[same])
    assert case.metrics()["gradient"].tolist() == pytest.approx(case.clean["gradient"].tolist(), rel=1e-5)


def mended(here, original):
    def resume(self):
        return original(self)

    return resume


def test_the_right_cure_or_ones_own_function_passes_and_a_wrong_one_fails(room):
    case = gym.start(room, seed_of("bad resume"))
    assert case.rerun("load all of the checkpoint")
    assert case.rerun(resume=mended)
    assert not case.rerun("shard by rank")


@pytest.mark.weekly
def test_a_job_that_is_still_slow_or_still_hangs_fails_and_the_next_rerun_works(room, monkeypatch, capsys):
    assert not gym.start(room, seed_of("slow link")).rerun("nothing")
    assert re.findall(r"FAILED  (.*?):", capsys.readouterr().out) == ["a step's time"]
    monkeypatch.setattr(gym_case, "RERUN_S", 20)
    case = gym.start(room, seed_of("collectives swapped"))
    assert not case.rerun("shard by rank")
    assert "FAILED  it ends: TimeoutError" in capsys.readouterr().out
    monkeypatch.undo()
    assert case.rerun("same collectives on all ranks")


# --- nothing gives the answer away


def names_of_faults():
    """Return a pattern of all words by which a fault could be recognised."""
    words = {one.kind for one in FOUND.values()} | {one.make.__name__ for one in FOUND.values()}
    words |= {one.cure for one in FOUND.values()} | {"faults.py", "exercises.faults", "Drawn"}
    return re.compile("|".join(re.escape(form) for word in words for form in (word, word.replace(" ", "_"))))


def about_this_worker(dask_worker):
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return str(environment) + str(list(dask_worker.state.tasks))


@pytest.mark.weekly
@pytest.mark.parametrize("kind", ["uneven batches", "bad resume", "slow link"])
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
