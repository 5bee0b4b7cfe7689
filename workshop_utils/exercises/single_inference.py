"""Checks of notebook 03 · Single inference."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import combinations

import torch
from torch.nn.functional import cross_entropy

from workshop_utils.exercises import Function, exercise, expect, expect_equal, expect_type, number, pair, passed

ROUNDED = 0.011  # a probability may be rounded to two digits
GOOD_FIT = 0.006  # a fitted loss may be this much above the smallest one, as a grid may be coarse
FAULTS = {
    "mode": "the model is still in train mode: its answers depend on the neighbours.",
    "softmax": "the probabilities of one image should sum to 1: over which dimension does softmax go?",
    "names": "the names are sorted: in which order are the logits?",
}


@exercise
def check_name_dogs(
    name_dogs: Function, model: torch.nn.Module, images: torch.Tensor, categories: Sequence[str]
) -> None:
    for names in (list(categories), [*categories[1:], categories[0]]):  # an answer from memory does not fit the second
        together = _named(name_dogs, model, images, names)
        _expect_right(together, model, images, names)
        alone = _named(name_dogs, model, images[:1], names)
        hint = "an image gets another answer alone than among others"
        expect(alone[0][0] == together[0][0] and abs(alone[0][1] - together[0][1]) <= 2 * ROUNDED, f"{hint}.")
        _expect_right(alone, model, images[:1], names)
    passed(f"{len(images)} images get the same answers together and one by one, whatever mode the model came in.")


def _named(name_dogs, model, images, names):
    # What the attendee's function answers for copies, with a model in train mode: [(name, probability), ...].
    answer = name_dogs(deepcopy(model).train(), images.clone(), list(names))
    expect_type(answer, Iterable, "name_dogs should return a list of pairs (category, probability)")
    answer = list(answer)
    expect(len(answer) == len(images), f"name_dogs returned {len(answer)} entries for {len(images)} images.")
    pairs = [pair(one, "return pairs (category, probability)") for one in answer]
    for name, _ in pairs:
        expect_type(name, str, "the first of each pair should be a category")
    return [(name, number(p, "return each probability as a number")) for name, p in pairs]


def _expect_right(answer, model, images, names):
    given = [name for name, _ in answer]
    answers = _with_each_mix_of_faults(model, images, names)
    same_names = [(mix, pairs) for mix, pairs in answers if given == [name for name, _ in pairs]]
    expect(same_names, "these are not the model's answers: take `categories[index]` from the list you are given.")
    same = [(mix, pairs) for mix, pairs in same_names if _are_close(answer, pairs)]
    left, _ = (same or same_names)[0]
    expect(not left, " And: ".join(FAULTS[fault] for fault in left))
    expect(same, "the names are right, the probabilities are not: return the largest of each row, from 0 to 1.")


def _with_each_mix_of_faults(model, images, names):
    # [(mix of FAULTS, [(name, probability) of each image with these faults]), ...], fewest first, so () is right.
    with torch.inference_mode():
        in_eval_mode = [deepcopy(model).eval()(images.clone())]
        in_train_mode = [
            torch.cat([deepcopy(model).train()(part) for part in images.split(n)]) for n in (len(images), 1)
        ]
    answers = []
    mixes = [mix for n_faults in range(len(FAULTS) + 1) for mix in combinations(FAULTS, n_faults)]
    for mix in mixes:
        order = sorted(names) if "names" in mix else names
        for logits in in_train_mode if "mode" in mix else in_eval_mode:
            values, indices = logits.softmax(0 if "softmax" in mix else 1).max(1)
            answers.append(
                (mix, [(order[index], value) for value, index in zip(values.tolist(), indices, strict=True)])
            )
    return answers


def _are_close(answer, pairs):
    return all(abs(p - value) <= ROUNDED for (_, p), (_, value) in zip(answer, pairs, strict=True))


@exercise
def check_calibrate(calibrate: Function, logits: torch.Tensor, truth: torch.Tensor) -> None:
    for low, high in ((0.5, 3.0), (2.0, 0.7)):  # other photos, whose halves want these temperatures
        _expect_calibrated(calibrate, *_photos_that_want(low, high))
    temperature, loss = _expect_calibrated(calibrate, logits, truth)
    before = cross_entropy(logits[1::2], truth[1::2])
    passed(f"T = {temperature:.2f}: on the other half, the loss falls from {before:.2f} to {loss:.2f}.")


def _photos_that_want(low, high):
    # (logits, truth) of 800 photos: 0, 2, 4, ... are calibrated at the temperature `low`, the others at `high`.
    random = torch.Generator().manual_seed(3)
    honest = 2 * torch.randn(800, 10, generator=random)
    truth = honest.softmax(1).multinomial(1, generator=random).squeeze(1)
    return honest * torch.tensor([low, high]).repeat(400).unsqueeze(1), truth


def _expect_calibrated(calibrate, logits, truth):
    """Check and return the temperature, and the loss of the other half."""
    answer = calibrate(logits.clone(), truth.clone())
    temperature, reported = (
        number(one, "T and the loss should be numbers") for one in pair(answer, "return (T, loss of the other half)")
    )
    expect(temperature > 0, "a temperature is above 0: dividing by a negative one would turn the order round.")
    halves = {"fitted": slice(0, None, 2), "tested": slice(1, None, 2), "all": slice(None)}

    def loss(t, half):
        return cross_entropy(logits[halves[half]] / t, truth[halves[half]]).item()

    def fits(half):
        smallest = min(loss(t, half) for t in torch.logspace(-1.3, 1.2, 101).tolist())
        return loss(temperature, half) <= smallest + GOOD_FIT

    mistakes = {
        "T suits photos of both halves, such as all of them or the first ones: fit it on photos 0, 2, 4, … alone, and "
        "test it on the others.": "all",
        "T is fitted on photos 1, 3, 5, …, which should test it.": "tested",
    }
    otherwise = (
        f"for some photos, T = {temperature:.2f} is not where the loss of 0, 2, 4, … is smallest: does the loss take "
        "the probability of the right breed, or of the likeliest? If the right one's, search longer, or on a wider and "
        "finer grid."
    )
    fitted_on = next(filter(fits, ("fitted", "all", "tested")), None)
    expect_equal(fitted_on, "fitted", otherwise, mistakes)
    expect_equal(
        reported,
        loss(temperature, "tested"),
        "not that of the photos 1, 3, 5, … at this T.",
        {"that of the photos that T was fitted on.": loss(temperature, "fitted")},
        within=0.01,
        about=f"T is right; the loss that you return, {reported:.2f}, is ",
    )
    return temperature, reported
