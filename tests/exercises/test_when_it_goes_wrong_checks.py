"""Notebook 12: wrong answers get a hint, never a traceback, and right ones pass in any sensible form."""

import sys
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from answers import judged
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

import daskrun
from workshop_utils.exercises import NotYet, ours, unanswered
from workshop_utils.exercises import when_it_goes_wrong as checks
from workshop_utils.exercises.gym.case import Case
from workshop_utils.exercises.gym.faults import Diagnosis

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's functions: ranks don't import this module
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "12-when-it-goes-wrong.ipynb"
RIGHT_CULPRIT = (checks.SPOILED_RANK, checks.SPOILED_STEP)
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


# --- exercise 2: the gradient


test_culprit = pytest.mark.smoke(
    judged(
        checks.check_culprit,
        (RIGHT_CULPRIT, "Correct"),
        (np.array(RIGHT_CULPRIT), "Correct"),
        (9, "a pair of whole numbers, .*, not 9"),
        ((1, 9.5), "a pair of whole numbers"),
        ((1, 200), "no step 200"),
        ((9, 1), "The rank comes first"),
        ((1, 10), "already spoiled"),
        ((1, 5), "like those around it"),
        ((0, 9), "rank 0's gradient is as long as ever"),
    )
)


@pytest.fixture
def one_thread():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads make such small batches slower, above all on a busy machine
    yield
    torch.set_num_threads(n_threads)


def lengths_of_gradients(monkeypatch):
    """Return `odd`, as the notebook trains it, with both ranks in this process: rank, step, gradient."""
    exec(code_cell_with("import daskrun").split("\nos.environ")[0], cells := {})
    exec(code_cell_with("def small_model"), cells)
    torch.manual_seed(0)
    models = [cells["small_model"]()]
    models.append(deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9) for model in models]
    rows = []
    for step in range(1, checks.N_STEPS + 1):
        for rank, model in enumerate(models):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            checks.odd_loss_of(model, *cells["load"](step)).backward()
            length = get_total_norm([weight.grad for weight in model.parameters()]).item()
            rows.append({"rank": rank, "step": step, "gradient": length})
        for weights in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(weight.grad for weight in weights) / 2
            for weight in weights:
                weight.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return pd.DataFrame(rows)


def test_the_largest_gradient_of_the_run_is_another_one_so_ranks_have_to_be_compared(one_thread, monkeypatch, capsys):
    odd = lengths_of_gradients(monkeypatch)
    largest = odd.loc[odd["gradient"].idxmax()]
    with pytest.raises(NotYet, match="already spoiled"):
        checks.check_culprit((largest["rank"], largest["step"]))
    exec(code_cell_with("odd.pivot("), found := {"odd": odd, "culprit": None, "ours": ours, "unanswered": unanswered})
    checks.check_culprit(found["culprit"])
    assert "That was our solution." in capsys.readouterr().out


# --- exercise 3: the gym


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


def code_cell_with(words):
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]
    (source,) = [source for source in cells if words in source]
    return source


def test_without_an_answer_nothing_is_run_again():
    exec(code_cell_with("case.rerun("), found := {"answer": None})
    assert found["repaired"] is None


# --- what the notebook measures and says


def test_the_gradient_that_the_loop_logs_is_that_of_all_buckets(tmp_path, monkeypatch):
    logged, bucket_sizes = [], []

    def in_small_buckets(model):
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.001)
        register = parallel.register_comm_hook

        def counted(hook):
            return lambda state, bucket: bucket_sizes.append(bucket.buffer().numel()) or hook(state, bucket)

        parallel.register_comm_hook = lambda state, hook: register(state, counted(hook))
        return parallel

    monkeypatch.setattr(daskrun, "log_metrics", lambda **row: logged.append(row))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        exec(code_cell_with("import daskrun").split("\nos.environ")[0], cells := {})
        for words in ("def small_model", "def train"):
            exec(code_cell_with(words), cells)
        cells["DistributedDataParallel"] = in_small_buckets
        cells["train"](n_steps=2)
        torch.manual_seed(0)
        model = cells["small_model"]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for step in (1, 2):
            optimizer.zero_grad()
            cells["loss_of"](model, *cells["load"](step)).backward()
            optimizer.step()
    finally:
        dist.destroy_process_group()
    whole = get_total_norm([weight.grad for weight in model.parameters()]).item()
    assert len(bucket_sizes) >= 3  # DDP makes its buckets after the first step
    assert logged[1]["gradient"] == pytest.approx(whole, rel=1e-4)


def test_the_box_on_nccl_names_pytorchs_own_time_limit():
    (box,) = [cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if "On NCCL" in cell.source]
    limit = dist.constants.default_pg_nccl_timeout  # None if this PyTorch was built without NCCL
    assert limit in (None, timedelta(minutes=10)) and "The time limit is 10 minutes" in box
