"""Notebook 12: wrong answers get a hint, never a traceback, and right ones pass in any sensible form."""

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist
from answers import judged

import daskrun
from workshop_utils.exercises import NotYet
from workshop_utils.exercises import when_it_goes_wrong as checks
from workshop_utils.exercises.gym.case import Case, today
from workshop_utils.exercises.gym.faults import Diagnosis, draw

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's functions: ranks don't import this module
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "12-when-it-goes-wrong.ipynb"
UNEVEN = {"fault": "uneven batches", "rank": 1, "step": 24, "cure": "as many batches on all ranks"}


# --- exercise 1: stop together


def stop_below(limit=3.2, op=dist.ReduceOp.SUM, *, asks=lambda loss: True, as_a=bool):
    """Return a `stop` that is right by default: the mean of two ranks is below 1.6. The arguments bring in mistakes."""

    def stop(loss):
        if not asks(loss):
            return False
        of_all = loss.clone()
        dist.all_reduce(of_all, op=op)
        return as_a(of_all.item() < limit)

    return stop


def in_place_and_as_a_tensor(loss):
    dist.all_reduce(loss)
    return loss / 2 < 1.6


def as_rank_0_says(loss):
    """Return what is right, after a broadcast of rank 0 that rank 1 never takes part in."""
    mean = loss.clone()
    dist.all_reduce(mean)
    stops = mean.item() / 2 < 1.6
    if dist.get_rank() == 0:
        dist.broadcast(torch.tensor(float(stops)), 0)
    return stops


def that_waits(loss):
    mean = loss.clone()
    work = dist.all_reduce(mean, async_op=True)
    work.wait()
    return mean.item() / 2 < 1.6


def that_does_not_wait(loss):
    mean = loss.clone()
    dist.all_reduce(mean, async_op=True)
    return mean.item() / 2 < 1.6


def with_a_total():
    """Return a `stop` that adds the losses of all steps up."""
    total = torch.zeros(())

    def stop(loss):
        total.add_(loss)
        return stop_below()(total)

    return stop


test_stop = judged(
    lambda stop, two_ranks: checks.check_stop(stop, None),
    (in_place_and_as_a_tensor, "Correct"),
    (stop_below(as_a=np.bool_), "Correct"),
    (lambda loss: loss.item() < 1.6, "rank 0 says stop and rank 1 says go on"),
    (stop_below(1.6), r"1\.1\. The sum is 2\.2: divide it by the number of ranks"),
    (lambda loss: False, "both ranks say go on: .* both are low"),
    (stop_below(1.6, dist.ReduceOp.MIN), "both ranks say stop: .* the mean is 2.0"),
    (stop_below(asks=lambda loss: loss.item() < 1.6), "the ranks wait for each other. .* Call the same collectives"),
    (as_rank_0_says, "the ranks wait for each other"),
    (stop_below(as_a=lambda is_low: None), "it returns None"),
    (stop_below(as_a=lambda is_low: "stop" if is_low else "go on"), "it returns 'go on'"),
)


def test_a_stop_that_does_not_wait_for_its_sum_is_told_so(client, capsys):
    with pytest.raises(NotYet, match=r" With async_op=True, a collective returns at once: wait\(\)"):
        checks.check_stop(that_does_not_wait, client)
    checks.check_stop(that_waits, client)
    assert capsys.readouterr().out.startswith("Correct.")


def test_a_stop_that_takes_nan_for_low_is_refused(two_ranks):
    def stop(loss):
        dist.all_reduce(loss)
        return not loss.item() / 2 >= 1.6

    with pytest.raises(NotYet, match="both ranks say stop: .*NaN"):
        checks.check_stop(stop, None)


def test_a_stop_that_adds_up_the_losses_of_all_steps_is_refused(two_ranks):
    with pytest.raises(NotYet, match="both ranks say go on: .* both are low"):
        checks.check_stop(with_a_total(), None)


# --- exercise 2: a hidden case


@pytest.fixture
def case_of(monkeypatch):
    """A function that makes a case whose job is never started."""
    monkeypatch.setattr(daskrun, "launch", lambda *args, **settings: None)
    clean = SimpleNamespace(plan=lambda truth: None)
    return lambda **truth: Case(None, 6, clean, Diagnosis(**truth))


test_case = judged(
    lambda answer, case_of: checks.check_case(answer, case_of(**UNEVEN)),
    (UNEVEN, "Correct"),
    ("uneven batches", "write a dict with 'fault', 'rank', 'step', 'cure'"),
    (UNEVEN | {"where": 1}, "write a dict with"),
    (UNEVEN | {"fault": "none"}, "did the job end"),
    (UNEVEN | {"fault": "slow rank"}, "'slow rank' would look different"),
    ({"fault": "collective on one rank", "rank": 0, "step": 23}, "neither the fault nor the rank is right"),
    (UNEVEN | {"rank": 0}, "not which one waits"),
    (UNEVEN | {"step": 23}, "first step that is missing"),
    (UNEVEN | {"cure": "another machine"}, "'another machine' help"),
    (UNEVEN | {"cure": None}, r"right\. Which cure\?$"),
    (UNEVEN | {"fault": "gremlins"}, "write one of 'none'"),
    (UNEVEN | {"cure": "hope"}, "write one of 'nothing'"),
    (UNEVEN | {"rank": 7}, "it is from 0 to 1"),
    (UNEVEN | {"step": 1.5}, "step is 1.5: write a whole number"),
    (UNEVEN | {"rank": 1.0, "step": np.float64(24)}, "Correct"),  # as pandas returns numbers of a column with a gap
)


test_case_of_a_healthy_job = judged(
    lambda more, case_of: checks.check_case({"fault": "none"} | more, case_of()),
    ({}, "Correct"),
    ({"cure": "nothing"}, "Correct"),
    ({"rank": 1}, "leave them out"),
    ({"step": 3}, "leave them out"),
    ({"cure": "another machine"}, "leave them out"),
)


@pytest.mark.parametrize("fault", ["none", "slow rank", "collective on one rank"])
def test_a_hint_does_not_tell_the_fault(case_of, fault):
    with pytest.raises(NotYet) as raised:
        checks.check_case(UNEVEN | {"fault": fault}, case_of(**UNEVEN))
    assert "uneven" not in str(raised.value)


def test_the_first_answer_counts_also_where_the_check_refused_it(case_of, capsys):
    case = case_of(**UNEVEN)
    with pytest.raises(NotYet, match="write one of"):  # this costs nothing
        checks.check_case(UNEVEN | {"fault": "gremlins"}, case)
    for answer in ({"fault": "uneven batches", "rank": 0}, {"fault": "none"}):
        with pytest.raises(NotYet):
            checks.check_case(answer, case)
    checks.check_case(UNEVEN, case)
    assert "Correct." in (shown := capsys.readouterr().out)
    assert "Your first answer counts: 5 of 10." in shown


def test_the_line_to_share_has_a_square_for_each_part_of_the_first_answer(case_of, capsys):
    case = case_of(**UNEVEN)
    with pytest.raises(NotYet, match="answer with case.diagnose"):
        case.share()
    for answer in (UNEVEN | {"step": 20, "cure": None}, UNEVEN):  # the second doesn't count
        case.points_for(Diagnosis(**answer))
    case.share()
    assert "case 6: 🟩🟩⬜🟩⬜ 0 looks" in capsys.readouterr().out


def test_the_case_of_the_day_is_a_seed_of_its_own():
    assert today() > 20261129 and draw(today()) == draw(today())


def test_the_box_on_nccl_names_pytorchs_own_time_limit():
    (box,) = [cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if "On NCCL" in cell.source]
    limit = dist.constants.default_pg_nccl_timeout  # None if this PyTorch was built without NCCL
    assert limit in (None, timedelta(minutes=10)) and "The time limit is 10 minutes" in box
