"""Which images each rank takes at which step of a training run, and the child processes that read them.

The order of the images, and what datasets and layers draw from torch, follow from the seed and the step, and from
nothing that came before: a resumed run draws the same.
"""

import math
import operator
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from workshop_utils.training.preemption import heed_sigterm_only_from, sigterm_blocked

# What is drawn at random: the order of images in an epoch, what the datasets draw, and layers such as dropout.
ORDER, DATASET, LAYERS, EVALUATION = range(4)
CURE = "Let it return another image for one that it cannot read, or leave bad images out beforehand."


class TrainBatches:
    """This rank's share of the training images, step by step."""

    def __init__(
        self, dataset: Dataset, batch_size: int, seed: int, num_workers: int, n_classes: int | None = None
    ) -> None:
        """batch_size: images per step, over all ranks. num_workers: children that read. n_classes: of the model."""
        self.batch_size, self.seed = batch_size, seed
        self._images = _Seeded(dataset, n_classes)
        # Each rank has n // w images, and so (n // w) // (b / w) batches: n // b, whatever the world size w.
        self.per_epoch = len(self._images) // batch_size
        self._order: list[list[int]] = []  # what the loader reads in this epoch
        self._loader = batch_loader(self._images, self._order, num_workers)

    def of_epoch(self, epoch: int, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """Yield (images, labels, seconds waited) for each step of `epoch`, beginning with the run's step `step`.

        images: (batch_size / world size, 3, h, w). labels: (batch_size / world size,).
        Raises ValueError if the dataset leaves images out, or a label is no class of the model.
        """
        rank, world_size = world()
        self._order[:] = self._batches(epoch, step, rank, world_size)
        begin, batches = step, started(self._loader)
        start = time.perf_counter()
        for images, labels in batches:
            load_s = time.perf_counter() - start
            torch.manual_seed(derived_seed(self.seed, LAYERS, step, rank))
            yield images, labels, load_s
            step, start = step + 1, time.perf_counter()
        check_all_there(step - begin, len(self._order), "batches")  # a StopIteration in the dataset ends the loop early

    def _batches(self, epoch: int, first: int, rank: int, world_size: int) -> list[list[int]]:
        """Return [seed, *indices] for each step of `epoch` from the run's step `first` on."""
        seed = derived_seed(self.seed, ORDER, epoch)
        # set_epoch would add the epoch to the seed: the second epoch of seed 0 would be the first of seed 1.
        sampler: DistributedSampler = DistributedSampler(self._images, world_size, rank, seed=seed, drop_last=True)
        per_rank, indices = self.batch_size // world_size, list(sampler)
        begin = epoch * self.per_epoch  # the first step of the epoch
        return [
            [derived_seed(self.seed, DATASET, step, rank), *indices[(step - begin) * per_rank :][:per_rank]]
            for step in range(first, begin + self.per_epoch)
        ]


def evaluation_batches(
    dataset: Dataset, batch_size: int, num_workers: int, n_classes: int | None = None, seed: int = 0
) -> DataLoader:
    """Return this rank's part of `dataset`, so that each image is on one rank; raise ValueError without images.

    n_classes: of the model; None if it is not known. seed: of what the dataset draws from torch, each time the same.
    """
    n_images = len(dataset)  # type: ignore[arg-type]
    if not n_images:
        raise ValueError("The dataset for evaluation has 0 images: give it some, or leave val_set out.")
    rank, world_size = world()
    part = range(rank, n_images, world_size)  # DistributedSampler would count some images twice
    batches = [
        [derived_seed(seed, EVALUATION, part[start]), *part[start : start + batch_size]]
        for start in range(0, len(part), batch_size)
    ]
    return batch_loader(_Seeded(dataset, n_classes), batches, num_workers)


def batch_loader(dataset: Dataset, batches: list[list[int]], num_workers: int) -> DataLoader:
    """Return a DataLoader of `batches`, lists of indices that may change between epochs; its children live on."""
    forks = num_workers > 0 and sys.platform == "linux"  # as Python did before 3.14, in a tenth of a second
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="fork" if forks else None,
        persistent_workers=num_workers > 0,
        worker_init_fn=partial(_begin_child, os.getpid()),
    )


def started(loader: DataLoader) -> Iterator:
    """Return the iterator over an epoch of `loader`, whose children start in the first."""
    with sigterm_blocked():
        return iter(loader)


def check_all_there(found: int, expected: int, what: str = "images") -> None:
    """Raise ValueError if a dataset left something out: the ranks would part, or wait for each other."""
    if found != expected:
        raise ValueError(f"The dataset gave {found} {what} instead of {expected}. {CURE}")


def world() -> tuple[int, int]:
    """Return (rank of this process, world size); without a process group it is rank 0 of one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def check_all_alike(values: dict[str, Any]) -> None:
    """Raise ValueError on all ranks, with the name and what each rank has, unless all give the same `values`."""
    ranks: list = [values] * world()[1]
    if len(ranks) > 1:
        dist.all_gather_object(ranks, values)
    for name, mine in values.items():
        theirs = [rank[name] for rank in ranks]
        if any(value != mine for value in theirs):
            raise ValueError(
                f"The ranks differ in {name}: {str(theirs)[:500]}. Give all ranks the same settings and images, and a "
                "checkpoint that all can read, such as s3://…"
            )


def derived_seed(seed: int, purpose: int, *where: int) -> int:
    """Return the seed for a purpose, such as ORDER, at a place in the run, such as a step and a rank.

    Two purposes, places or runs share one only by chance, which is 1 in 4 billion: torch takes 32 bits of a seed.

    >>> derived_seed(0, ORDER, 1) == derived_seed(1, ORDER, 0)
    False
    """
    mixed = np.random.SeedSequence(seed, spawn_key=(purpose, *where))
    return int(mixed.generate_state(1, np.uint64)[0])


def _begin_child(parent: int, _: int) -> None:
    """Run in each child before it reads."""
    heed_sigterm_only_from(parent)


class _Seeded(Subset):
    """Takes batches [seed, *indices]: what the dataset draws from torch, also in a child, follows from the seed."""

    def __init__(self, dataset: Dataset, n_classes: int | None) -> None:
        super().__init__(dataset, range(len(dataset)))  # type: ignore[arg-type]
        self.n_classes = n_classes

    def __getitems__(self, batch: list[int]) -> list[tuple[torch.Tensor, int]]:
        seed, *indices = batch
        torch.manual_seed(seed)
        samples = super().__getitems__(indices)
        check_all_there(len(samples), len(indices))
        return [(image, self._checked(label, index)) for index, (image, label) in zip(indices, samples, strict=True)]

    def _checked(self, label: Any, index: int) -> int:
        with suppress(TypeError):  # of a float, or of several numbers
            number = operator.index(label.item() if math.prod(getattr(label, "shape", [0])) == 1 else label)
            if 0 <= number < (self.n_classes or math.inf):
                return number
        classes = f"from 0 to {self.n_classes - 1}" if self.n_classes else "from 0 on"
        raise ValueError(
            f"Image {index} of the dataset has the label {label!r}, a {type(label).__name__}; the model's classes are "
            f"whole numbers {classes}. Correct it, leave the image out with Subset, or give the model another head."
        )
