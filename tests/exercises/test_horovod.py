"""Notebook 09: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import numpy as np
import pytest
import torch

from workshop_utils.exercises import (
    NotYet,
    horovod,
)


@pytest.mark.parametrize(
    ("plan", "hint"),
    [
        (lambda size, accumulate: None, "still None"),
        (lambda size, accumulate: (16 * size, 0.01 * size, 640 // (16 * size)), "each rank computes 4 times 16"),
        (lambda size, accumulate: (16 * size * accumulate, 0.01 * size, 640 // (16 * size * accumulate)), "the rate"),
        (lambda size, accumulate: (16 * size * accumulate, 0.01 * size * accumulate, 40 / size / accumulate), "whole"),
        (lambda size, accumulate: 16 * size, "cannot read"),
    ],
)
def test_wrong_plans_get_a_hint(plan, hint):
    with pytest.raises(NotYet, match=hint):
        horovod.check_plan(plan)


def test_a_right_plan_passes_in_any_type(capsys):
    def plan(size, accumulate):
        images = 16 * size * accumulate
        return torch.tensor(images), np.float64(0.01 * images / 16), float(640 // images)

    horovod.check_plan(plan)
    assert capsys.readouterr().out.startswith("Correct. ")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda right, count, mean: None, "still None"),
        (lambda right, count, mean: right / count, "own accuracy"),
        (lambda right, count, mean: mean(right / count), "mean of the accuracies"),
        (lambda right, count, mean: mean(right), "is not 12 of 16"),
        (lambda right, count, mean: 0.75, "is not 13 of 16"),
        (lambda right, count, mean: mean("many"), "cannot read"),
    ],
)
def test_wrong_global_accuracies_get_a_hint(answer, hint):
    with pytest.raises(NotYet, match=hint):
        horovod.check_global_accuracy(answer)


def test_a_right_global_accuracy_passes(capsys):
    horovod.check_global_accuracy(lambda right, count, mean: torch.tensor(mean(right) / mean(count)))
    assert capsys.readouterr().out.startswith("Correct. ")
