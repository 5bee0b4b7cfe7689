"""Notebook 09: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import nbformat
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from workshop_utils import horovod as launcher
from workshop_utils.exercises import NotYet, horovod, unanswered
from workshop_utils.models import load_checkpoint


@pytest.mark.parametrize(
    ("plan", "hint"),
    [
        (lambda size, accumulate: None, "still None"),
        (lambda size, accumulate: (16 * size, 0.0025 * size, 288 // (16 * size)), "4 times 16"),
        (lambda size, accumulate: (32 * size, 0.005 * size, 9 // size), "a part has 16"),
        (lambda size, accumulate: (16 * size * accumulate, 0.0025 * size, 288 // (16 * size * accumulate)), "the rate"),
        (lambda size, accumulate: (16 * size * accumulate, 0.0025 * size * accumulate, 18 / size), "whole"),
        (lambda size, accumulate: (16 * size * accumulate, 0.0025 * size * accumulate, 9), "does not have 9"),
        (lambda size, accumulate: 16 * size, "cannot read"),
    ],
)
def test_wrong_plans_get_a_hint(plan, hint):
    with pytest.raises(NotYet, match=hint):
        horovod.check_plan(plan)


def test_a_right_plan_passes_in_any_type(capsys):
    def plan(size, accumulate):
        images = 16 * size * accumulate
        return torch.tensor(images), np.float64(0.005 * images / 32), float(288 // images)

    horovod.check_plan(plan)
    assert capsys.readouterr().out.startswith("Correct. ")


def test_the_stub_repeats_the_function_with_mistakes():
    cells = nbformat.read(launcher.RENDERED, 4).cells
    stub = next(cell.source for cell in cells if cell.source.startswith("def resume(path):"))
    names = dict(torch=torch, cross_entropy=cross_entropy, load_checkpoint=load_checkpoint, exercises=horovod)
    exec(stub, names)
    assert unanswered(names["resume"], given=horovod.given_resume) and not unanswered(resume, horovod.given_resume)


def resume(path, *, load="broadcast", wrap="first", divide=False, part="own", report="mean"):
    """An answer to exercise 2; its arguments bring in mistakes."""
    import horovod.torch as hvd

    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if load == "after broadcast":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if wrap == "first":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    saved = load_checkpoint(path) if hvd.rank() == 0 else None
    if load != "after broadcast":
        saved = hvd.broadcast_object(saved, root_rank=0, name="saved")
    if saved:
        model.load_state_dict(saved["model"])
        if load != "model alone":
            optimizer.load_state_dict(saved["optimizer"])
    if wrap == "last":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    losses = []
    for step in range(5, 10):
        images, labels = horovod.batch(step, hvd.rank() if part == "own" else 0, hvd.size() if part != "all" else 1)
        loss = cross_entropy(model(images), labels)
        (loss / hvd.size() if divide else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(hvd.allreduce(loss.detach(), name="loss") if report == "mean" else loss.detach())
    return losses


def resume_with_rank_0_as_the_source(path):
    import horovod.torch as hvd

    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if hvd.rank() == 0:
        saved = load_checkpoint(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for step in range(5, 10):
        images, labels = horovod.batch(step, hvd.rank(), hvd.size())
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return np.array(losses)


def with_mistakes(**mistakes):
    return lambda path: resume(path, **mistakes)


WRONG = [
    (horovod.given_resume, "which order"),
    (with_mistakes(load="after broadcast", wrap="last", divide=True), "which order"),
    (with_mistakes(load="after broadcast"), "which order"),
    (with_mistakes(wrap="last"), "The momentum is gone"),
    (with_mistakes(load="model alone"), "The momentum is gone"),
    (with_mistakes(divide=True), "factor 2"),
    (with_mistakes(wrap="last", divide=True), "Two mistakes are left"),
    (with_mistakes(wrap="never"), "different losses|step 7"),
    (with_mistakes(part="first"), "not looked at"),
    (with_mistakes(part="all"), "not looked at"),
    (with_mistakes(report="own"), "report the mean"),
    (lambda path: None, "None|no rank"),
    (lambda path: [0.5] * 5, "not looked at|no rank"),
    (lambda path: resume(path)[:3], "5 losses"),
    (lambda path: {}["learning rate"], "learning rate"),
]


@pytest.mark.parametrize(("answer", "hint"), WRONG)
def test_a_wrong_way_to_resume_gets_a_hint_where_threads_stand_in(answer, hint, monkeypatch):
    monkeypatch.setattr(launcher, "available", lambda: False)
    with pytest.raises(NotYet, match=hint):
        horovod.check_resume(answer, None)


@pytest.mark.parametrize("answer", [resume, resume_with_rank_0_as_the_source])
def test_a_right_way_to_resume_passes_where_threads_stand_in(answer, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "available", lambda: False)
    horovod.check_resume(answer, None)
    assert capsys.readouterr().out.startswith("Correct. ")


@pytest.mark.skipif(not launcher.available(), reason="Horovod is not built: make horovod")
@pytest.mark.filterwarnings("ignore:Port 8787 is busy")
@pytest.mark.timeout(240)
def test_on_a_cluster_each_way_to_resume_gets_the_same_answer(client, capsys):
    for answer, hint in WRONG:
        with pytest.raises(NotYet, match=hint):
            horovod.check_resume(answer, client)
    for answer in (resume, resume_with_rank_0_as_the_source):
        horovod.check_resume(answer, client)
        assert capsys.readouterr().out.startswith("Correct. ")
