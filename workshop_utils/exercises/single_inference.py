"""Checks of notebook 03 · Single inference."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from itertools import combinations

import torch

from workshop_utils.exercises import Function, exercise, expect, expect_type, number, pair, passed

ROUNDED = 0.011  # a probability may be rounded to two digits
FAULTS = {
    "mode": "the model is still in train mode: its answers depend on their neighbors.",
    "softmax": "the probabilities of one image should sum to 1: over which dimension does softmax go?",
    "names": "the names are sorted: in which order are the logits?",
}


def given_name_dogs(model: torch.nn.Module, images: torch.Tensor, categories: Sequence[str]) -> list[tuple[str, float]]:
    """Return a name and a probability for each image, with three faults: the stub of the exercise."""
    with torch.inference_mode():
        logits = model(images)  # (batch, 1000)
    values, indices = logits.softmax(0).max(1)
    names = sorted(categories)
    pairs = zip(values, indices)  # noqa: B905
    return [(names[index], value.item()) for value, index in pairs]


@partial(exercise, given=given_name_dogs)
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
    passed(f"{len(images)} images get the same answers together and one by one, in either mode of the model.")


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
