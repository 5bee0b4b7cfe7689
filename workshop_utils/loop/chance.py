"""All that is drawn at random in a training run: each purpose has numbers of its own, which follow from the seed."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import numpy as np
import torch

# The order of images in an epoch; what the datasets draw, in training and in evaluation; layers such as dropout.
Purpose = Literal["order", "dataset", "evaluation", "layers"]


def derived_seed(seed: int, purpose: Purpose, *where: int) -> int:
    """Return the seed for a purpose at a place in the run, such as a step and a rank.

    Two purposes, places or runs share one only by chance, which is 1 in 4 billion: torch takes 32 bits of a seed. The
    second epoch of one run is not the first of another. `numpy.random.SeedSequence` mixes the numbers.

    >>> derived_seed(0, "order", 1) == derived_seed(1, "order", 0)
    False
    """
    mixed = np.random.SeedSequence(seed, spawn_key=(get_args(Purpose).index(purpose), *where))
    return int(mixed.generate_state(1, np.uint64)[0])


def seed_all(seed: int) -> None:
    """Seed what transforms and layers draw from in this process: torch, Python's `random`, and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def callers_chance_kept() -> Iterator[None]:
    """Have the caller draw after the block, also after an error, what it would have drawn without it."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
