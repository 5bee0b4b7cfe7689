"""What a training run is told to do."""

import sys
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.utils.data import Dataset

from workshop_utils.loop.ranks import check_all_alike, world
from workshop_utils.precision import precision_of

COMPRESSIONS = {None: hooks.allreduce_hook, "fp16": hooks.fp16_compress_hook, "bf16": hooks.bf16_compress_hook}


@dataclass(frozen=True)
class Settings:
    """What a training run does; a checkpoint holds it, and a run with other settings does not resume from it.

    Raises ValueError for values that cannot be.
    """

    epochs: int = 1  #: passes over the training set
    batch_size: int = 32  #: images per optimizer step, over all ranks
    accumulate: int = 1  #: forward passes per step; each takes batch_size / (world size * accumulate) images
    lr: float = 0.01  #: learning rate for 32 images a step; see `learning_rate`
    body_lr: float = 1.0  #: share of it for the layers below the head `fc`; try 0.1 if they know much already
    freeze_epochs: int = 0  #: the first epochs, so many, train the head `fc` alone
    warmup_steps: int = 0  #: steps in which the learning rate rises to its peak
    #: True keeps BatchNorm's running statistics and normalises with them. With False each rank normalises with its own
    #: part of the batch, and several ranks no longer equal one process.
    freeze_batchnorm: bool = True
    precision: str = "fp32"  #: "fp32", "bf16" or "auto", the faster one here; the weights stay float32
    compression: str | None = None  #: "fp16" or "bf16": the type in which gradients travel
    seed: int = 0  #: of the order of images and all else that is drawn

    def __post_init__(self) -> None:
        precision_of(self.precision)
        if self.compression not in list(COMPRESSIONS):
            choices = ", ".join(map(repr, COMPRESSIONS))
            raise ValueError(f"compression is {self.compression!r}: write one of {choices}.")
        # NumPy's numbers become Python's, as torch.load reads no others.
        counts = {"epochs": 1, "batch_size": 1, "accumulate": 1, "freeze_epochs": 0, "warmup_steps": 0, "seed": 0}
        for name, lowest in counts.items():
            object.__setattr__(self, name, whole(name, getattr(self, name), lowest))
        if not isinstance(self.freeze_batchnorm, (bool, np.bool_)):
            raise ValueError(f"freeze_batchnorm is {self.freeze_batchnorm!r}: write True or False.")
        object.__setattr__(self, "freeze_batchnorm", bool(self.freeze_batchnorm))
        object.__setattr__(self, "precision", str(self.precision))
        for name in ("lr", "body_lr"):
            object.__setattr__(self, name, real(name, getattr(self, name)))


def check_run(
    run: Settings, model: torch.nn.Module, train_set: Dataset, val_set: Dataset | None, check_every: int
) -> dict[str, int]:
    """Return the sizes of the datasets; raise ValueError if the run does not fit them, the model or the ranks.

    All ranks have to call this together. They raise alike, so that none waits for one that raised.
    """
    whole("check_every", check_every, 0)
    n_images, n_val_images = len(train_set), 0 if val_set is None else len(val_set)  # type: ignore[arg-type]
    sizes = {"n_images": n_images, "n_val_images": n_val_images}
    check_all_alike({**sizes, "validation": val_set is not None, "check_every": check_every, **asdict(run)})
    parts = (world_size := world()[1]) * run.accumulate
    if run.batch_size % parts:
        raise ValueError(
            f"batch_size {run.batch_size} cannot be shared by {world_size} ranks with accumulate={run.accumulate}: "
            f"give a multiple of {parts}, such as {max(1, round(run.batch_size / parts)) * parts}."
        )
    if n_images < run.batch_size:
        largest = n_images - n_images % parts  # the largest batch that the ranks can share
        lower = f"lower batch_size to at most {largest}, or " if largest else ""
        raise ValueError(
            f"The training set has {n_images} images, fewer than one batch of {run.batch_size}: {lower}bring more "
            f"images; {world_size} ranks with accumulate={run.accumulate} need at least {parts}."
        )
    if run.freeze_epochs and not hasattr(model, "fc"):
        raise ValueError(f"freeze_epochs is {run.freeze_epochs}, but {type(model).__name__} has no head named fc.")
    return sizes


def whole(name: str, value: Any, lowest: int) -> int:
    """Return a setting as an int; raise ValueError unless it is a whole number of at least `lowest`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not lowest <= value < 2**63:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}: give a whole number of at least {lowest}.")
    return int(value)


def real(name: str, value: Any) -> float:
    """Return a setting as a float; raise ValueError unless it is a finite number of at least 0."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}: give a finite number of at least 0.")
    return float(value)
