"""Checks of notebook 05 · Training data."""

import numpy as np

from workshop_utils.dogs.breeds import find_breed
from workshop_utils.exercises import Answer, exercise, expect, passed


@exercise
def check_to_imagenet(answer: Answer, classes: list[str]) -> None:
    expect(answer is not None, "to_imagenet is still None.")
    expect(hasattr(answer, "__len__"), f"{answer!r} is one value; make a list, with an index for each folder.")
    expect(not isinstance(answer, dict), "to_imagenet is a dict; make a tensor or a list, in the order of the folders.")
    expect(len(answer) == len(classes), f"it has {len(answer)} entries; make one for each of {len(classes)} folders.")
    found, right = [int(index) for index in answer], [find_breed(name.split("-")[0]).index for name in classes]
    expect(found != list(range(len(classes))), "these are the labels themselves; look each folder's id up in index_of.")
    expect(sorted(found) != sorted(right) or found == right, "the numbers are right, their order is not.")
    for name, index, truth in zip(classes, found, right, strict=True):
        expect(index == truth, f"{name} does not become {index}: look its WordNet id up.")
    passed(f"Label {len(classes) - 1} is ImageNet's category {found[-1]}.")


@exercise
def check_split_by_dog(split: Answer, breeds: np.ndarray, dogs: np.ndarray, val_fraction: float) -> None:
    _, val = _parts(split, breeds, dogs, val_fraction, seed=0)
    expect(
        _parts(split, breeds, dogs, val_fraction, seed=0)[1] == val,
        "called twice with seed 0, it splits in two ways: draw with np.random.default_rng(seed).",
    )
    others = [_parts(split, breeds, dogs, val_fraction, seed)[1] for seed in (1, 2, 3)]
    expect(any(other != val for other in others), "every seed gives the same split: use the seed to draw the dogs.")
    # Other shots, whose number differs from dog to dog and which are in another order.
    shuffled = np.random.default_rng(1).permutation(np.repeat(np.arange(60), 1 + np.arange(60) % 5))
    _parts(split, shuffled % 6, shuffled + 100, 0.4, seed=0, which=" Seen with other shots, in another order.")
    n_dogs = len(set(np.asarray(dogs)[val].tolist()))
    passed(f"{n_dogs} dogs are for validation, with all of their shots, the same share of each breed.")


def _parts(split, breeds, dogs, val_fraction, seed, which=""):
    """Check the two lists of positions that a split returns, and return them sorted."""
    parts = split(breeds.copy(), dogs.copy(), val_fraction, seed)
    expect(parts is not None, "split_by_dog returns None; return two lists of positions.")
    expect(isinstance(parts, tuple | list) and len(parts) == 2, "return two lists: (training, validation).")
    masks = [np.asarray(part).dtype == bool for part in parts]
    expect(not any(masks), "these are masks of True and False; np.flatnonzero gives their positions.")
    train, val = (sorted(int(position) for position in part) for part in parts)
    expect(train and val, f"there is nothing for {'validation' if train else 'training'}.{which}")
    expect(
        set(train + val) <= set(range(len(dogs))),
        f"positions go from 0 to {len(dogs) - 1}: return positions of shots, not breeds or dogs.{which}",
    )
    expect(len(set(train + val)) == len(train + val), f"some shots are in both lists, or twice in one.{which}")
    n_lost = len(dogs) - len(train + val)
    expect(
        n_lost == 0,
        f"{n_lost} of {len(dogs)} shots are in neither list: return positions of shots, all of them.{which}",
    )
    train_dogs, val_dogs = set(dogs[train].tolist()), set(dogs[val].tolist())
    both = train_dogs & val_dogs
    expect(not both, f"{len(both)} dogs have shots on both sides, so the model only has to remember them.{which}")
    for breed in np.unique(breeds):
        of_breed = set(dogs[breeds == breed].tolist())
        n_dogs, n_val = len(of_breed), len(of_breed & val_dogs)
        expect(
            abs(n_val - n_dogs * val_fraction) <= 1 and 0 < n_val < n_dogs,
            f"{n_val} of the {n_dogs} dogs of breed "
            f"{breed} are for validation: draw a share of {val_fraction:g} of the dogs of each.{which}",
        )
    return train, val


@exercise
def check_order(order: Answer, n_photos: int) -> None:
    first = order(0, 0)
    expect(first is not None, "order returns None; return a list of indices.")
    expect(hasattr(first, "__len__"), f"order returns a {type(first).__name__}; return a list of indices.")
    first = _indices(first)
    expect(len(set(first)) < n_photos, "rank 0 visits every photo: with two ranks, it visits half of them.")
    for epoch in (0, 1):
        ranks = [_indices(order(rank, epoch)) for rank in (0, 1)]
        both = ranks[0] + ranks[1]
        expect(set(both) <= set(range(n_photos)), f"indices go from 0 to {n_photos - 1}.")
        expect(
            len(both) - len(set(both)) <= n_photos % 2,
            "both ranks visit the same photos: let both shuffle alike, and give each its own half of the order.",
        )
        expect(n_photos - len(set(both)) <= n_photos % 2, f"together they visit {len(set(both))} of {n_photos} photos.")
    expect(_indices(order(0, 0)) == first, "asked twice for the same epoch, it answers differently: seed its shuffle.")
    expect(_indices(order(0, 1)) != first, "epoch 1 has epoch 0's order: let the epoch decide the shuffle.")
    passed(f"{len(ranks[0])} photos for rank 0 and {len(ranks[1])} for rank 1, in a new order each epoch.")


def _indices(answer):
    return [int(index) for index in answer]
