"""Notebook 05: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import numpy as np
import pytest
import torch
from answers import judged
from sklearn.model_selection import StratifiedGroupKFold

from workshop_utils.exercises import training_data

CLASSES = ["n02085620-Chihuahua", "n02106166-Border_collie", "n02113186-Cardigan"]


NUMBER_OF = {"n02085620": 151, "n02106166": 232, "n02113186": 264}
INDEX_BY_NAME = {"chihuahua": 151, "border collie": 232, "cardigan": 474}


def by_id(classes):
    return [NUMBER_OF[folder.split("-")[0]] for folder in classes]


def by_name(classes):
    names = [folder.split("-", 1)[1].replace("_", " ").lower() for folder in classes]
    return [INDEX_BY_NAME[name] for name in names]


test_to_imagenet = pytest.mark.smoke(
    judged(
        lambda to_imagenet: training_data.check_to_imagenet(to_imagenet, CLASSES),
        (by_id, "Correct"),
        (lambda classes: np.array(by_id(classes)), "Correct"),
        (lambda classes: torch.tensor(by_id(classes)), "Correct"),
        (lambda classes: None, "returns None"),
        (lambda classes: by_id(classes)[:1], "1 entries"),
        (lambda classes: [0, 1, 2], "the labels themselves"),
        (by_name, "Cardigan gets 474.*WordNet ID"),
        (lambda classes: by_id(sorted(classes)), "in another order, .*order of the folders"),
        (lambda classes: [str(index) for index in by_id(classes)], "'151'.*are texts"),
        (lambda classes: torch.tensor(by_id(classes))[:, None], r"shape \(3, 1\)"),
    )
)


BREEDS = np.repeat([0, 1, 2], 8 * 4)  # eight dogs of each breed, four shots of each dog
DOGS = np.repeat(np.arange(24), 4)
SHOTS = training_data.Shots(BREEDS, DOGS, torch.randn(96, 768, generator=torch.Generator().manual_seed(0)))


def by_dog(breeds, dogs, val_fraction, seed):
    rng, chosen = np.random.default_rng(seed), []
    for breed in np.unique(breeds):
        of_breed = rng.permutation(np.unique(dogs[breeds == breed]))
        chosen += of_breed[: round(len(of_breed) * val_fraction)].tolist()
    in_val = np.isin(dogs, chosen)
    return np.flatnonzero(~in_val), np.flatnonzero(in_val)


def by_shot(breeds, dogs, val_fraction, seed):
    in_val = np.random.default_rng(seed).random(len(dogs)) < val_fraction
    return np.flatnonzero(~in_val), np.flatnonzero(in_val)


def by_breed(breeds, dogs, val_fraction, seed):
    return np.flatnonzero(breeds != seed % 3), np.flatnonzero(breeds == seed % 3)


def without_unique(breeds, dogs, val_fraction, seed):
    rng, chosen = np.random.default_rng(seed), []
    for breed in np.unique(breeds):
        of_breed = rng.permutation(dogs[breeds == breed])
        chosen += of_breed[: round(len(of_breed) * val_fraction)].tolist()
    in_val = np.isin(dogs, chosen)
    return np.flatnonzero(~in_val), np.flatnonzero(in_val)


def masks(breeds, dogs, val_fraction, seed):
    in_val = np.isin(np.arange(len(dogs)), by_dog(breeds, dogs, val_fraction, seed)[1])
    return ~in_val, in_val


def by_scikit_learn(breeds, dogs, val_fraction, seed):
    folds = StratifiedGroupKFold(round(1 / val_fraction), shuffle=True, random_state=seed)
    return next(folds.split(dogs, breeds, dogs))


test_split_by_dog = judged(
    lambda split: training_data.check_split_by_dog(split, SHOTS, 0.25),
    (lambda *args: [part.tolist() for part in by_dog(*args)], "Correct"),
    (lambda *args: [torch.tensor(part) for part in by_dog(*args)], "Correct"),
    (by_scikit_learn, "Correct"),
    (lambda *args: by_dog(*args)[0], "two lists of indices, .*, not array"),
    (lambda *args: by_dog(*args)[::-1], "swapped"),
    (lambda breeds, dogs, val_fraction, seed: by_dog(breeds, dogs, 0, seed), "nothing for validation"),
    (lambda breeds, dogs, val_fraction, seed: by_dog(breeds, dogs, 0.25, seed), "50% .*other shots"),
    (lambda breeds, dogs, val_fraction, seed: by_dog(breeds, dogs, val_fraction, 0), "every seed"),
    (lambda breeds, dogs, val_fraction, seed: by_dog(breeds, dogs, val_fraction, None), "in two ways"),
    (lambda *args: (by_dog(*args)[0][1:], by_dog(*args)[1]), "1 of 96.*neither list"),
    (lambda *args: (range(96), by_dog(*args)[1]), "in both lists"),
    (lambda *args: ([1000], by_dog(*args)[1]), "0 to 95"),
    (lambda *args: [np.append([], part) for part in by_dog(*args)], "aren't integers"),
    (lambda *args: [DOGS[part] for part in by_dog(*args)], "not breeds or dogs"),
    (by_shot, "both sides"),
    (by_breed, "of the 8 dogs"),
    (without_unique, "dogs of breed .* whatever the number of its shots"),
    (lambda *args: [part[:, None] for part in by_dog(*args)], r"has shape \(72, 1\)"),
    (lambda *args: (None, None), "two lists: one of these is None"),
    (masks, "masks"),
)
