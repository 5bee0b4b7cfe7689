"""Checks of notebook 03 · Single inference."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import combinations

import torch
from torch.nn.functional import cross_entropy

from workshop_utils.exercises import Function, exercise, expect, expect_equal, expect_type, number, pair, passed

ROUNDED = 0.011  # a probability may be rounded to two digits
GOOD_FIT = 0.006  # a fitted loss may be this much above the smallest one, as a grid may be coarse
SAME_LOSS = 0.01  # a loss may be rounded, too
EVEN, ODD, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)  # which photos
SURER = 10.0  # logits times this want a temperature that is as many times larger
SAME_ERROR = 0.003  # calibration errors that differ less count as equal
BINS = (1, 5, 10, 15)  # of the probability, in usual calibration errors; 1: |mean probability - share of right answers|
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
    others, their_truth = _other_photos(logits, truth)
    temperature, loss = _fitted(calibrate, logits, truth, "")
    their_temperature, loss_of_others = _fitted(calibrate, others, their_truth, "for some other photos, ")
    _expect_tested(temperature, loss, logits, truth)
    _expect_tested(their_temperature, loss_of_others, others, their_truth)
    before = cross_entropy(logits[1::2], truth[1::2])
    passed(f"T = {temperature:.2f}: on the other half, the loss falls from {before:.2f} to {loss:.2f}.")


def _other_photos(logits, truth):
    """Return (logits, truth) that want the same T on photos 0, 2, 4, …, and another one on the others.

    The loss there depends on the right breeds through the sum of their logits alone. That sum stays, so a search that
    ends well with `logits` does so here. But now the first photos are as wrong as can be, and all later ones are right.
    """
    logits, truth = logits.clone(), truth.clone()
    logits[1::2] *= SURER
    fitted = logits[::2]
    best, spread = fitted.amax(1), fitted.amax(1) - fitted.amin(1)
    lost = (best - fitted.gather(1, truth[::2, None]).squeeze(1)).sum()
    left = lost - (spread.cumsum(0) - spread)  # what the photos before have not lost
    truth[::2] = (fitted - (best - left.clamp(0).minimum(spread)).unsqueeze(1)).abs().argmin(1)
    return logits, truth


def _fitted(calibrate, logits, truth, where):
    """Check and return T; also return the loss that came with it. where: how hints about T begin."""
    answer = calibrate(logits.clone(), truth.clone())
    temperature, reported = (
        number(one, "T and the loss should be numbers") for one in pair(answer, "return (T, loss of the other half)")
    )
    about = f"{where}your T is {temperature:.3g}"
    diverged = f"{about}. Did the search leave the range from 0 to 1,000? Take smaller steps, or search a grid."
    expect(0 < temperature < 1000, diverged)  # False for nan
    grid = torch.logspace(-1.3, 1.2, 201).tolist()

    def fits(half):
        return _loss(temperature, half, logits, truth) <= min(_loss(t, half, logits, truth) for t in grid) + GOOD_FIT

    def is_least(n_bins):
        errors = [_calibration_error(logits[::2] / t, truth[::2], n_bins) for t in (temperature, *grid)]
        return errors[0] <= min(errors) + SAME_ERROR

    fitted_on = next(filter(fits, (EVEN, ALL, ODD)), BINS if any(map(is_least, BINS)) else None)
    mistakes = {
        "it is not fitted on photos 0, 2, 4, … alone. Fit it on these, and test it on the others.": ALL,
        "it is fitted on photos 1, 3, 5, …, which should test it.": ODD,
        "it brings the probabilities closest to the share of right answers. Find the smallest negative log-likelihood "
        "instead.": BINS,
    }
    best = min(grid, key=lambda t: _loss(t, EVEN, logits, truth))
    if abs(temperature - 1) < 0.001:
        cure = "Did the search leave 1? The mean as a loss helps, and with SciPy logits.double()."
    elif abs(temperature * best - 1) < 0.1:
        cure = "Is yours 1 / T? The logits are divided by T."
    else:
        cure = (
            "Does your loss take the probability of the right breed, or of the likeliest? If the right one's, search "
            "longer, or on a wider and finer grid."
        )
    otherwise = f"the loss of photos 0, 2, 4, … is smallest at {best:.2f}. {cure}"
    expect_equal(fitted_on, EVEN, otherwise, mistakes, about=f"{about}: ")
    return temperature, reported


def _expect_tested(temperature, reported, logits, truth):
    right, n_tested = _loss(temperature, ODD, logits, truth), len(truth[ODD])
    about = f"T is right; the loss that you return, {reported:.2f}, is "
    is_sum = abs(reported / n_tested - right) <= SAME_LOSS < abs(reported - right)
    expect(not is_sum, f"{about}a sum: return the mean of the photos.")
    mistakes = {"that of the photos that T was fitted on.": _loss(temperature, EVEN, logits, truth)}
    expect_equal(
        reported, right, "not that of the photos 1, 3, 5, … at this T.", mistakes, within=SAME_LOSS, about=about
    )


def _loss(t, half, logits, truth):
    return cross_entropy(logits[half] / t, truth[half]).item()


def _calibration_error(logits, truth, n_bins):
    # Mean of |probability - share of right answers| over bins of equal width, weighted by their photos.
    probability, answer = logits.softmax(1).max(1)
    gap = probability - (answer == truth).float()
    which = (probability * n_bins).long().clamp(max=n_bins - 1)
    return torch.zeros(n_bins).index_add(0, which, gap).abs().sum().item() / len(truth)
