"""Notebook 08: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import pandas as pd
import pytest
import torch

from workshop_utils.exercises import (
    NotYet,
    many_models,
)


def best(losses, n):
    return sorted(losses, key=losses.get)[:n]


@pytest.mark.parametrize(
    ("survivors", "hint"),
    [
        (lambda losses, factor: None, "returns None"),
        (lambda losses, factor: best(losses, 1)[0], "returns the text 'b'"),
        (lambda losses, factor: best(losses, 1), "it should be 3 of 6"),
        (lambda losses, factor: best(losses, max(1, len(losses) // 2)), "it should be 2 of 6"),
        (lambda losses, factor: best(losses, len(losses) // factor), "at least one has to"),
        (lambda losses, factor: sorted(losses, key=losses.get)[len(losses) // factor :], "a smaller loss is better"),
        (lambda losses, factor: sorted(losses.values())[: max(1, len(losses) // factor)], "return the names"),
        (lambda losses, factor: sorted(losses)[: max(1, len(losses) // factor)], "a smaller loss is better"),
        (lambda losses, factor: list(losses), "it should be 3 of 6"),
        (lambda losses, factor: [["a"]], "cannot read this answer .*unhashable"),
    ],
)
def test_no_wrong_survivors_pass(survivors, hint):
    with pytest.raises(NotYet, match=hint):
        many_models.check_survivors(survivors)


@pytest.mark.parametrize("kind", [list, tuple, set, pd.Index, dict.fromkeys])
def test_the_best_pass_in_any_type(kind):
    def survivors(losses, factor):
        return kind(sorted(losses, key=losses.get)[: max(1, len(losses) // factor)])

    many_models.check_survivors(survivors)


@pytest.mark.parametrize(
    ("at_temperature", "hint"),
    [
        (lambda logits, t: None, "returns None"),
        (lambda logits, t: logits.softmax(0), "divide the logits by the temperature first"),
        (lambda logits, t: (logits * t).softmax(0), "the other way round"),
        (lambda logits, t: logits.softmax(0) / t, "sum to 1"),
        (lambda logits, t: logits / t, "sum to 1"),
        (lambda logits, t: (logits / t).argmax(), "its shape is .., not .3,."),
        (lambda logits, t: (logits / t).exp(), "sum to 1"),
        (lambda logits, t: (logits / t).exp() / (logits / t).exp().sum(), "large logits overflow"),
        (lambda logits, t: torch.zeros(32), "its shape is .32,."),
        (lambda logits, t: "likely", "cannot read this answer .*invalid data type 'str'"),
    ],
)
def test_no_wrong_probabilities_pass(at_temperature, hint):
    with pytest.raises(NotYet, match=hint):
        many_models.check_at_temperature(at_temperature)


@pytest.mark.parametrize("kind", [torch.Tensor.double, torch.Tensor.numpy, torch.Tensor.tolist])
def test_right_probabilities_pass_in_any_type(kind):
    many_models.check_at_temperature(lambda logits, t: kind((logits / t).softmax(0)))
