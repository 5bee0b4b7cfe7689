"""Checks of notebook 03 · Single inference."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from workshop_utils.exercises import Answer, exercise, expect, passed, which_mistake

ROUNDED = 0.011  # a probability may be off by 0.01: the task says so
GOOD_FIT = 0.006  # a fitted loss may be above the smallest by 0.005: the task says so


@exercise
def check_name_dogs(function: Answer, model: torch.nn.Module, images: torch.Tensor, categories: Sequence[str]) -> None:
    for names in (list(categories), [*categories[1:], categories[0]]):  # an answer from memory does not fit the second
        together = _named(function, model, images, names)
        _expect_right(together, model, images, names)
        alone = _named(function, model, images[:1], names)
        hint = "an image gets another answer alone than among others"
        expect(alone[0][0] == together[0][0] and abs(alone[0][1] - together[0][1]) <= 2 * ROUNDED, f"{hint}.")
        _expect_right(alone, model, images[:1], names)
    passed(f"{len(images)} images get the same answers together and one by one, whatever mode the model came in.")


def _named(function, model, images, names):
    # What the attendee's function answers for copies, with a model in train mode: [(name, probability), ...].
    answer = function(deepcopy(model).train(), images.clone(), list(names))
    expect(answer is not None, "name_dogs returns None; return a list.")
    answer = list(answer)
    expect(len(answer) == len(images), f"name_dogs returned {len(answer)} entries for {len(images)} images.")
    pairs = all(not isinstance(pair, str) and len(pair) == 2 and isinstance(pair[0], str) for pair in answer)
    expect(pairs, "return pairs (category, probability).")
    expect(not any(isinstance(p, str) for _, p in answer), "return each probability as a number, not as text.")
    return [(name, _number(p)) for name, p in answer]


def _expect_right(answer, model, images, names):
    with torch.inference_mode():
        logits = deepcopy(model).eval()(images.clone())
        in_train_mode = deepcopy(model).train()(images.clone())
    values, indices = logits.softmax(1).max(1)
    chosen, given = [names[index] for index in indices], [name for name, _ in answer]
    if given != chosen:
        mistakes = {
            "the positions are right, the names are not: in which order are the logits?": (logits, 1, sorted(names)),
            "the probabilities of one image should sum to 1: over which dimension does softmax go?": (logits, 0, names),
            "the model is still in train mode: its answers depend on the neighbours.": (in_train_mode, 1, names),
        }
        otherwise = "there is more than one fault left: the model's mode, the dimension of softmax, or the names."
        expect(False, which_mistake(lambda wrong: given == _names_of(*wrong), mistakes, otherwise))
    close = all(abs(p - value) <= ROUNDED for (_, p), value in zip(answer, values.tolist(), strict=True))
    hint = "the names are right, the probabilities are not: is the model in eval mode, and does each row sum to 1?"
    expect(close, hint)


def _names_of(logits, dim, names):
    return [names[index] for index in logits.softmax(dim).argmax(1)]


@exercise
def check_calibrate(function: Answer, logits: torch.Tensor, truth: torch.Tensor) -> None:
    for low, high in ((0.5, 3.0), (2.0, 0.7)):  # other photos, whose halves want these temperatures
        _expect_calibrated(function, *_photos_that_want(low, high))
    _expect_calibrated(function, logits, truth)
    temperature, loss = _calibrated(function, logits, truth)
    before = cross_entropy(logits[1::2], truth[1::2])
    passed(f"T = {temperature:.2f}: on the other half, the loss falls from {before:.2f} to {loss:.2f}.")


def _photos_that_want(low, high):
    # (logits, truth) of 800 photos: 0, 2, 4, ... are calibrated at the temperature `low`, the others at `high`.
    random = torch.Generator().manual_seed(3)
    honest = 2 * torch.randn(800, 10, generator=random)
    truth = honest.softmax(1).multinomial(1, generator=random).squeeze(1)
    return honest * torch.tensor([low, high]).repeat(400).unsqueeze(1), truth


def _calibrated(function, logits, truth):
    answer = function(logits.clone(), truth.clone())
    expect(answer is not None, "calibrate returns None; return (T, loss).")
    expect(hasattr(answer, "__len__") and len(answer) == 2, "return two numbers: (T, loss of the other half).")
    temperature, loss = (_number(value) for value in answer)
    expect(temperature > 0, "a temperature is above 0: dividing by a negative one would turn the order round.")
    return temperature, loss


def _expect_calibrated(function, logits, truth):
    temperature, reported = _calibrated(function, logits, truth)
    halves = {"fitted": slice(0, None, 2), "tested": slice(1, None, 2), "all": slice(None)}

    def loss(t, half):
        return cross_entropy(logits[halves[half]] / t, truth[halves[half]]).item()

    def fits(half):
        smallest = min(loss(t, half) for t in torch.logspace(-1.3, 1.2, 101).tolist())
        return loss(temperature, half) <= smallest + GOOD_FIT

    if not fits("fitted"):
        expect(not fits("all"), "T is fitted on all photos: which are left to test it?")
        expect(not fits("tested"), "T is fitted on photos 1, 3, 5, …, which should test it.")
        hint = "does the loss take the probability of the right breed, or of the likeliest?"
        hint += " If the right one's, search longer, or on a wider and finer grid."
        expect(False, f"for some photos, T = {temperature:.2f} is not where the loss of 0, 2, 4, … is smallest: {hint}")
    due = loss(temperature, "tested")
    if not abs(reported - due) <= 0.01:  # nor where it is NaN
        same = abs(reported - loss(temperature, "fitted")) <= 0.01
        whose = "that of the photos that T was fitted on" if same else "not that of the photos 1, 3, 5, … at this T"
        expect(False, f"T is right; the loss that you return, {reported:.2f}, is {whose}.")


def _number(value: Any) -> float:
    expect(not isinstance(value, str | bool), f"{value!r} should be a number.")
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    single = getattr(value, "size", 1) if not isinstance(value, torch.Tensor) else value.numel()
    expect(single == 1, "that is more than one number where one is asked for.")
    return float(value.item() if hasattr(value, "item") else value)
