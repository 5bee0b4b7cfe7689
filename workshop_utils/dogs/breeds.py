"""The 120 breeds of Stanford Dogs: their WordNet ids, ImageNet class indices, and the traits a sketch is drawn from."""

import csv
import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Breed:
    """One breed. Lengths are relative to an average dog (1.0); colours are names in `drawing.PALETTE`.

    index: position of `wnid` among ImageNet's 1,000 classes.
    held_out: whether the shipped weights never saw the breed.
    coat, mark, light: the coat's main colour, its second colour, its white or pale parts.
    pattern, extras: words that sketches are drawn from, such as "saddle" or "beard".
    muzzle: 0.0 (pug) to 1.0 (borzoi). fur: 0.0 (short) to about 1.3.
    """

    wnid: str
    name: str
    index: int
    held_out: bool
    coat: str
    mark: str
    light: str
    pattern: tuple[str, ...]
    ear: str
    ear_size: float
    muzzle: float
    skull: float
    body: float
    leg: float
    bulk: float
    texture: str
    fur: float
    tail: str
    extras: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The name of the breed's folder of photos.

        >>> BREEDS[0].folder
        'n02085620-Chihuahua'
        """
        return f"{self.wnid}-{self.name}"


def find_breed(breed: Breed | str) -> Breed:
    """Return the `Breed` that a folder, a WordNet id or a name (in any case, spaces or underscores) stands for.

    >>> find_breed("toy poodle").folder
    'n02113624-toy_poodle'
    """
    if isinstance(breed, Breed):
        return breed
    known = {word.lower(): known for known in BREEDS for word in (known.name, known.wnid, known.folder)}
    wanted = str(breed).lower().replace(" ", "_")
    if wanted in known:
        return known[wanted]
    close = dict.fromkeys(known[word].folder for word in difflib.get_close_matches(wanted, known, n=3))
    guess = f"Did you mean {' or '.join(close)}? " if close else ""
    cure = "Take a name from workshop_utils.photos.BREEDS, for example 'n02085620-Chihuahua'."
    raise ValueError(f"no breed is called {breed!r}. {guess}{cure}")


def _read_breeds():
    readers: dict[Any, Callable[[str], Any]] = {kind: kind for kind in (str, int, float, bool)}
    readers[tuple[str, ...]] = lambda words: tuple(words.split())
    traits = [(trait.name, readers[trait.type]) for trait in fields(Breed)]
    with open(Path(__file__).with_name("breeds.csv"), newline="", encoding="utf-8") as file:
        return tuple(Breed(**{name: read(row[name]) for name, read in traits}) for row in csv.DictReader(file))


BREEDS: tuple[Breed, ...] = _read_breeds()  # 120, in the order of their WordNet ids
HELD_OUT = tuple(breed for breed in BREEDS if breed.held_out)  # 12 that the shipped weights never saw: to be learned
