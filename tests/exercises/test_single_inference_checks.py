"""Notebook 03: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import numpy as np
import pytest
import torch

from workshop_utils.exercises import (
    NotYet,
    single_inference,
)

CATEGORIES = ["ant", "bee", "cat", "dog", "eel"]

LOGITS = torch.tensor([0.1, 3.0, 2.0, 4.0, -1.0])


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (lambda logits, names: None, "returns None"),
        (lambda logits, names: zip(["dog", "bee"], [0.5, 0.4], strict=True), "returned 2 entries"),
        (lambda logits, names: ["dog", "bee", "cat"], "return pairs"),
        (lambda logits, names: {"dog": 0.5, "bee": 0.3, "cat": 0.2}, "return pairs"),
        (lambda logits, names: [("dog", "66%"), ("bee", "24%"), ("cat", "9%")], "as a number"),
        (lambda logits, names: [(names[i], 0.1) for i in range(3)], "three likeliest"),
        (
            lambda logits, names: [(p.item(), names[i]) for p, i in zip(*logits.softmax(0).topk(3), strict=True)],
            "return pairs",
        ),
        (
            lambda logits, names: [(names[i], 100 * p) for p, i in zip(*logits.softmax(0).topk(3), strict=True)],
            "the numbers are not",
        ),
        (
            lambda logits, names: [(names[i], p) for p, i in zip(*LOGITS.softmax(0).topk(3), strict=True)],
            "given other logits",
        ),
    ],
)
def test_no_wrong_top_three_passes(function, hint):
    with pytest.raises(NotYet, match=hint):
        single_inference.check_top_three(function, LOGITS, CATEGORIES)


def test_a_top_three_may_hold_tensors_or_be_an_iterator():
    def top_three(logits, names):
        return ([names[i], p] for p, i in zip(*logits.softmax(0).topk(3), strict=True))

    single_inference.check_top_three(top_three, LOGITS, CATEGORIES)


ROWS = torch.eye(5)[[0, 1, 2, 3]]


TRUTH = torch.tensor([0, 1, 2, 4])


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ("75%", "'75%'.*number"),
        (75, "between 0 and 1"),
        (0.5, "largest logit"),
        (ROWS.argmax(1) == TRUTH, "take their mean"),
    ],
)
def test_no_wrong_accuracy_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        single_inference.check_batch_accuracy(answer, ROWS, TRUTH)


@pytest.mark.parametrize("answer", [0.75, np.float64(0.75), torch.tensor(0.75)])
def test_a_right_accuracy_passes_in_any_type(answer):
    single_inference.check_batch_accuracy(answer, ROWS, TRUTH)


UNSURE = 2 * torch.eye(5)[[0, 1, 2, 3]]  # three of four are right; the model says 65 %


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ("1.2", "'1.2'.*number"),
        (True, "should be a number"),
        (torch.tensor([0.5, 0.6]), "more than one number"),
        ([0.8], "cannot read"),
        (0, "is above 0"),
        (-0.8, "is above 0"),
        (1, "64.9%.*75.0%.*by less"),
        (0.1, "100.0%.*by more"),
    ],
)
def test_no_wrong_temperature_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        single_inference.check_temperature(answer, UNSURE, TRUTH)


@pytest.mark.parametrize("answer", [0.8, np.float32(0.8), torch.tensor(0.8)])
def test_a_right_temperature_passes_in_any_type(answer, capsys):
    single_inference.check_temperature(answer, UNSURE, TRUTH)
    assert "It said 65%; at 0.80 it says 75%, and 75% are right." in capsys.readouterr().out
