"""Checks of notebook 05 · Training data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from workshop_utils.dogs.breeds import find_breed
from workshop_utils.exercises import Function, NotYet, exercise, expect, pair, passed, shown
from workshop_utils.photos import ImageFolder

DOGS_PER_BREED, SHOTS_PER_DOG, SHIFT, SMALL = 8, 4, 16, 16  # SHIFT and SMALL in pixels


@dataclass(frozen=True)
class Shots:
    """Several shots of each of some dogs, and a model that answers with the breed of the most similar training shot."""

    breeds: np.ndarray  #: (n,) the breed of each shot
    dogs: np.ndarray  #: (n,) the dog of each shot
    pixels: torch.Tensor  #: (n, 768) float

    def percent_right(self, train: Sequence[int], val: Sequence[int]) -> float:
        """Return for how many of the validation shots the model names the breed, in percent."""
        nearest = torch.cdist(self.pixels[list(val)], self.pixels[list(train)]).argmin(1)
        return 100 * float((self.breeds[list(train)][nearest.numpy()] == self.breeds[list(val)]).mean())

    def percent_of_unseen_dogs(self) -> tuple[float, float]:
        """Return the same with one dog left out at a time, and its standard error."""
        distances = torch.cdist(self.pixels, self.pixels)
        distances[torch.tensor(self.dogs[:, None] == self.dogs)] = torch.inf
        right = 100.0 * (self.breeds[distances.argmin(1).numpy()] == self.breeds)
        of_dogs = [right[self.dogs == dog].mean() for dog in np.unique(self.dogs)]
        return float(np.mean(of_dogs)), float(np.std(of_dogs) / len(of_dogs) ** 0.5)


def shots_of(dataset: ImageFolder) -> Shots:
    """Return four shots, shifted by a few pixels, of eight dogs of each breed of a dataset without a transform."""
    rng = np.random.default_rng(0)
    labels = np.array([label for _, label in dataset.samples])
    chosen = np.concatenate([np.flatnonzero(labels == label)[:DOGS_PER_BREED] for label in np.unique(labels)])
    breeds, dogs, small = [], [], []
    for dog, (photo, label) in enumerate(dataset.__getitems__(chosen.tolist())):
        for x, y in rng.integers(0, SHIFT, (SHOTS_PER_DOG, 2)).tolist():
            shot = photo.crop((x, y, x + photo.width - SHIFT, y + photo.height - SHIFT))
            small.append(np.array(shot.resize((SMALL, SMALL))))
            breeds.append(label)
            dogs.append(dog)
    return Shots(np.array(breeds), np.array(dogs), torch.tensor(np.stack(small)).float().flatten(1))


def given_to_imagenet(classes: list[str]) -> list[int]:
    """Return other categories than those of the folders, for two reasons: the stub of exercise 1."""
    names = sorted(folder.split("-", 1)[1] for folder in classes)
    return [index_by_name[name.replace("_", " ").lower()] for name in names]  # type: ignore[name-defined]  # noqa: F821


@partial(exercise, given=given_to_imagenet)
def check_to_imagenet(to_imagenet: Function, classes: list[str]) -> None:
    backwards = sorted({*classes, "n02113186-Cardigan"}, reverse=True)
    for folders, about in ((classes, ""), (backwards, "called with other folders, in another order, ")):
        found = _numbers(to_imagenet(list(folders)), len(folders))
        right = [find_breed(folder.split("-")[0]).index for folder in folders]
        expect(
            found != list(range(len(folders))), "these are the labels themselves; look each folder's ID up in index_of."
        )
        if found != right:
            pairs = list(zip(folders, found, right, strict=True))
            folder, index, _ = next(pair for pair in pairs if pair[1] != pair[2])
            mixed_up = set(found) == set(right)
            cure = "the order of the folders is lost" if mixed_up else "look its WordNet ID up in index_of"
            raise NotYet(f"{about}{folder} gets {index}, the number of something else: {cure}.")
    passed(f"{len(classes)} folders become {len(classes)} numbers, in the order of the labels.")


def _numbers(answer, n_folders):
    """Return the table as a list, if it is one row of whole numbers."""
    table = np.asarray(answer.tolist() if hasattr(answer, "tolist") else answer)  # a tensor, on any device
    kind = "None" if answer is None else f"a {type(answer).__name__}"
    expect(table.ndim > 0, f"to_imagenet returns {kind}; return a list or a tensor, in the order of the folders.")
    expect(table.ndim == 1, f"the {kind} has shape {table.shape}; return one row of numbers, of shape ({n_folders},).")
    expect(len(table) == n_folders, f"it returns {len(table)} entries; return one for each of {n_folders} folders.")
    expect(table.dtype.kind not in "US", f"{table.tolist()[0]!r}, … are texts; return the numbers of index_of.")
    whole = table.dtype.kind in "iu" or (table.dtype.kind == "f" and (table == table.round()).all())
    expect(whole, f"{table.tolist()[0]!r}, … are not all whole numbers; return those of index_of.")
    return table.astype(int).tolist()


@exercise
def check_split_by_dog(split_by_dog: Function, shots: Shots, val_fraction: float) -> None:
    breeds, dogs = shots.breeds, shots.dogs
    train, val = _parts(split_by_dog, breeds, dogs, val_fraction, seed=0)
    expect(
        _parts(split_by_dog, breeds, dogs, val_fraction, seed=0)[1] == val,
        "called twice with seed 0, it splits in two ways: draw with np.random.default_rng(seed).",
    )
    others = [_parts(split_by_dog, breeds, dogs, val_fraction, seed)[1] for seed in (1, 2, 3)]
    expect(any(other != val for other in others), "every seed gives the same split: use the seed to draw the dogs.")
    # Other shots, whose number differs from dog to dog and which are in another order.
    breed_of = np.repeat(np.arange(4), [5, 10, 15, 30])  # some breeds have more dogs than others
    shuffled = np.random.default_rng(1).permutation(np.repeat(np.arange(60), 1 + np.arange(60) % 5))
    which = " Seen with other shots, in another order."
    _parts(split_by_dog, breed_of[shuffled], shuffled + 100, 0.5, seed=0, which=which)
    n_dogs, n_breeds = len(set(dogs[val].tolist())), len(set(breeds.tolist()))
    mean, error = shots.percent_of_unseen_dogs()
    passed(
        f"Of {n_dogs} dogs that it has never seen, the pixel model gets {shots.percent_right(train, val):.0f}% right. "
        f"Leaving out one dog at a time gives {mean:.0f}% ± {error:.0f}, and guessing gives {100 / n_breeds:.0f}%."
    )


def _parts(split, breeds, dogs, val_fraction, seed, which=""):
    """Check the two lists of positions that a split returns, and return them sorted."""
    answer = split(breeds.copy(), dogs.copy(), val_fraction, seed)
    parts = pair(answer, "split_by_dog should return two lists of indices, (training, validation)")
    for part in parts:
        expect(
            not isinstance(part, set | frozenset), "a set has no order, and no array takes it as indices: use lists."
        )
        shape = np.shape(part)
        expect(shape, f"return two lists: one of these is {shown(part)}.")
        one_row = f"return two lists: one of these has shape {shape}. (np.where returns a tuple: take its [0].)"
        expect(len(shape) == 1, one_row)
    masks = [np.asarray(part).dtype == bool for part in parts]
    expect(not any(masks), "these are masks of True and False; np.flatnonzero gives their indices.")
    whole = [len(part) == 0 or np.asarray(part).dtype.kind in "iu" for part in parts]
    expect(all(whole), "these aren't integers, and an array takes nothing else as indices: .astype(int) makes some.")
    train, val = (sorted(int(position) for position in part) for part in parts)
    expect(train and val, f"there is nothing for {'validation' if train else 'training'}.{which}")
    found, of_dogs = set(train + val), set(dogs.tolist())  # dogs' numbers may be positions, too, and then come again
    expect(
        found <= set(range(len(dogs))) and not (len(found) < len(train + val) and found <= of_dogs),
        f"indices go from 0 to {len(dogs) - 1}: return indices of shots, not breeds or dogs.{which}",
    )
    expect(len(found) == len(train + val), f"some shots are in both lists, or twice in one.{which}")
    n_lost = len(dogs) - len(train + val)
    expect(
        n_lost == 0,
        f"{n_lost} of {len(dogs)} shots are in neither list: return indices of shots, all of them.{which}",
    )
    train_dogs, val_dogs = set(dogs[train].tolist()), set(dogs[val].tolist())
    both = train_dogs & val_dogs
    expect(not both, f"{len(both)} dogs have shots on both sides, so the model only has to remember them.{which}")
    within = 1.0 if which else 0.9  # dogs; with other shots, some dogs have more shots than others
    wrong = _wrong_breed(val_dogs, breeds, dogs, val_fraction, within)
    swapped = wrong is not None and _wrong_breed(train_dogs, breeds, dogs, val_fraction, within) is None
    expect(not swapped, f"the two lists are swapped: return (training, validation), in this order.{which}")
    if wrong is not None:
        of_breed = set(dogs[breeds == wrong].tolist())
        raise NotYet(
            f"{len(of_breed & val_dogs)} of the {len(of_breed)} dogs of breed {wrong} are in validation: put "
            f"{val_fraction:.0%} of each breed's dogs there. Is each dog drawn once, whatever the number of its shots?"
            f"{which}"
        )
    return train, val


def _wrong_breed(chosen, breeds, dogs, val_fraction, within):
    """Return the first breed of whose dogs another share than `val_fraction` was chosen; None if there is none."""
    for breed in np.unique(breeds):
        of_breed = set(dogs[breeds == breed].tolist())
        n_dogs, n_chosen = len(of_breed), len(of_breed & chosen)
        if abs(n_chosen - n_dogs * val_fraction) > within or not 0 < n_chosen < n_dogs:
            return breed
    return None
