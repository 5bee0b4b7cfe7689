"""The gym scores answers, refuses what cannot be one, replays a seed, and proves cures by a rerun."""

import re
import time
import uuid
from itertools import count
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from workshop_utils.exercises import NotYet, gym
from workshop_utils.exercises.gym import case as gym_case
from workshop_utils.exercises.gym.faults import BY_KIND, FULL, POINTS, Diagnosis, draw, points, possible_with

SLOW_RANK = {"fault": "slow rank", "rank": 1, "step": 15, "cure": "another machine"}


def seed_of(kind):
    return next(seed for seed in count() if draw(seed).fault == kind)


# --- what a seed draws


def test_one_case_in_six_is_healthy_and_each_fault_is_drawn_about_as_often():
    drawn = [draw(seed).fault for seed in range(3000)]
    assert drawn.count("none") / len(drawn) == pytest.approx(1 / 6, abs=0.02)
    for kind in BY_KIND:
        assert drawn.count(kind) / len(drawn) == pytest.approx(5 / 6 / 16, abs=0.015)


def test_a_seed_always_draws_the_same_fault_rank_and_step():
    assert draw(6) == Diagnosis("uneven batches", 1, 24, "as many batches on all ranks")  # the case of notebook 12
    assert [draw(seed) for seed in range(200)] == [draw(seed) for seed in range(200)]


def test_without_a_small_memory_limit_nothing_leaks_and_other_seeds_draw_what_they_did():
    for limit in (None, 2**40):
        for seed in range(500):
            before, now = draw(seed), draw(seed, possible_with(limit))
            assert now.fault != "memory leak" and (now == before or before.fault == "memory leak")
    assert possible_with(2 * 2**30) == list(BY_KIND)


# --- points


def test_each_part_of_an_answer_has_its_points():
    truth, wrong = Diagnosis(**SLOW_RANK), {"fault": "slow link", "rank": 0, "step": 22, "cure": "nothing"}
    assert points(truth, truth) == POINTS
    for part, name in (("kind", "fault"), ("place", "rank"), ("step", "step"), ("cure", "cure")):
        assert points(truth, Diagnosis(**SLOW_RANK | {name: wrong[name]})) == POINTS | {part: 0}
    assert points(truth, Diagnosis(**SLOW_RANK | {"step": 16}))["step"] == 1


def test_a_false_alarm_and_an_overlooked_fault_cost_points_and_a_healthy_job_gives_all():
    slow, none = Diagnosis(**SLOW_RANK), Diagnosis()
    assert sum(points(none, slow).values()) == sum(points(slow, none).values()) < 0
    assert sum(points(none, none).values()) == FULL


def test_two_kinds_that_look_the_same_and_have_the_same_cure_count_for_each_other_both_ways_round():
    swapped, alone = Diagnosis("collectives swapped", 0, 16), Diagnosis("collective on one rank", 0, 16)
    assert points(swapped, alone)["kind"] == points(alone, swapped)["kind"] == POINTS["kind"]
    for fault in BY_KIND.values():
        if fault.alike:
            twin = BY_KIND[fault.alike]
            assert (twin.alike, twin.cure, twin.look) == (fault.kind, fault.cure, fault.look)


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
    with pytest.raises(NotYet, match="flow is no piece of the training: write one of .*keep"):
        case.rerun(flow=print)
    with pytest.raises(NotYet, match="mend one piece"):
        case.rerun(keep=print, send=print)
    assert "4 looks" in repr(case)
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


def test_a_rerun_that_goes_on_logging_is_waited_for_and_one_that_is_quiet_hangs(start, capsys, monkeypatch):
    clock = SimpleNamespace(now=0.0, time=time.time, monotonic=lambda: clock.now, sleep=lambda s: pass_by(s))

    def pass_by(seconds):
        clock.now += seconds

    monkeypatch.setattr(gym_case, "time", clock)
    monkeypatch.setattr(gym_case, "QUIET_S", 0.2)
    grows = [table()[:n] for n in range(2, 56) for _ in range(3)]
    case = start(seed_of("none"), Job(table()), Job(*grows, table()), Job(*[table()[:20]] * 99, table()))
    assert case.rerun("shard by rank") and clock.now > 1  # many times as long as a rerun may be quiet
    capsys.readouterr()
    assert not case.rerun("shard by rank")
    assert "FAILED  it ends: No rank has logged a step for 0.2 s. all is well" in capsys.readouterr().out


def test_a_healthy_case_is_not_called_repaired(start, capsys):
    case = start(seed_of("none"), Job(table()), Job(table()), Job(table()))
    assert case.rerun("shard by rank")
    assert "Nothing was wrong" not in capsys.readouterr().out  # it would be the answer
    case.diagnose("none")
    assert "rerun 1" in capsys.readouterr().out
    assert case.rerun("shard by rank")
    assert "Nothing was wrong before, either." in capsys.readouterr().out


def test_a_rerun_after_a_diagnosis_shows_where_its_losses_leave_those_before(start, capsys):
    before = table(steps=range(9, 20), loss=lambda step: 2.0 if step < 18 else 1.5)
    case = start(seed_of("bad gradient"), Job(before), *[Job(table(loss=lambda step: 2.0)) for _ in range(2)])
    case.rerun("keep no tensors")
    assert "before" not in capsys.readouterr().out  # it would help with the answer
    case.diagnose("bad gradient", rank=0, step=18, cure="another machine")
    case.rerun("another machine")
    shown = capsys.readouterr().out
    assert "where step 18 differs" in shown and shown.count("1.50000 <") == 2
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if re.match(r"1[6-9] ", line)}
    assert rows["17"] == ["2.00000"] * 4 and rows["18"] == ["1.50000", "<", "1.50000", "<", "2.00000", "2.00000"]


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        (table()[:0], "has logged nothing"),
        (table().query("rank == 0"), r"9 +2.00000 +none < +2.00000 +2.00000"),
        (table(steps=range(9, 20)), "step 20 differs.*Up to there they are the same"),
        (table(steps=range(12, 20)), "step 9 differs"),
        (table(loss=lambda step: 2.0 if step != 12 else float("nan")), "step 12 differs"),
        (table(), "losses are those of the run before"),
    ],
)
def test_a_run_before_that_logged_little_or_the_same_is_shown_as_it_was(before, shown, start, capsys):
    case = start(seed_of("slow rank"), Job(before), Job(table()))
    case.diagnose("slow rank", rank=0, step=18, cure="another machine")
    case.rerun("another machine")
    assert re.search(shown, capsys.readouterr().out, re.DOTALL)


def test_a_rerun_of_an_older_case_ends_the_newer_one(start):
    newer = Job(table())
    older = start(seed_of("bad resume"), Job(table()), newer, Job(table()))
    gym.start(SimpleNamespace(id="another"), 6)
    assert not newer.cancelled
    assert older.rerun("load all of the checkpoint") and newer.cancelled
