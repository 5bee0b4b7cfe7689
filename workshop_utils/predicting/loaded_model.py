"""The model that a worker's process classifies with: loaded once, in the precision that was asked for."""

import os
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from workshop_utils.labels import ClassNames
from workshop_utils.precision import precision_of
from workshop_utils.storage import open_address
from workshop_utils.weights import load_resnet, resolve_weights

_loading = threading.Lock()


@dataclass(frozen=True)
class LoadedModel:
    """A pretrained ResNet, ready for the photos of a process.

    model: on the GPU if there is one, channels-last, each BatchNorm folded into the convolution before it. Its images
    need the device and the dtype of its parameters.
    transform, categories: `load_resnet`'s. classes: the categories again, which finds them by the name of a folder.
    checksum: of weights and categories. on_gpu: where the model is.
    """

    model: nn.Module
    transform: Callable
    categories: list[str]
    classes: ClassNames
    checksum: int
    on_gpu: bool


class Model(NamedTuple):
    """A model of your own for `classify`, which a function makes in each worker's process.

    Attributes:
        module: Takes (n, 3, h, w) float32 images, and returns (n, number of categories) logits.
        transform: Makes a (3, h, w) float32 tensor of a Pillow image.
        categories: The names of the classes, in the order of the logits.
    """

    module: nn.Module
    transform: Callable
    categories: list[str]


def ready_model(model: Model, precision: str) -> LoadedModel:
    """Return the LoadedModel of a model of your own, in eval mode, on the GPU if there is one."""
    categories = [str(name) for name in model.categories]
    checksum = _checksum(model.module, zlib.crc32(repr(categories).encode()))
    return _ready(model.module, model.transform, categories, checksum, precision_of(precision))


def _checksum(model: nn.Module, checksum: int) -> int:
    for tensor in model.state_dict().values():
        checksum = zlib.crc32(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def loaded_model(weights: str | os.PathLike = "auto", precision: str = "auto") -> LoadedModel:
    """Return the LoadedModel of these weights. The first call loads, and the first after their file was replaced.

    Raises what `load_resnet` raises, and ValueError for an unknown precision.
    """
    address, version = resolve_weights(weights), None
    if address not in ("imagenet", "sketches"):
        with suppress(Exception):  # no file can be read there, which `load_resnet` says better
            fs, path = open_address(address)
            version = str(fs.info(path))  # size, time and the like: they change with the file
    with _loading:  # otherwise two threads of a worker would both load
        return _load(address, version, precision_of(precision))


@lru_cache(maxsize=2)  # two calls of `classify` may take turns on a worker
def _load(address: str, version: str | None, precision: str) -> LoadedModel:
    model, transform, categories = load_resnet(address)
    checksum = _checksum(model, zlib.crc32(repr((model.about, categories)).encode()))
    _fold_batch_norms(model)
    return _ready(model, transform, categories, checksum, precision)


def _ready(model: nn.Module, transform: Callable, categories: list[str], checksum: int, precision: str) -> LoadedModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    ready = model.eval().to(device, dtype).to(memory_format=torch.channels_last)
    return LoadedModel(ready, transform, categories, ClassNames(categories), checksum, device == "cuda")


def _fold_batch_norms(model: nn.Module) -> None:
    """Multiply each BatchNorm of a ResNet into the convolution before it.

    torch.fx has a function for it, which would break forward passes in other threads meanwhile.
    """
    for module in list(model.modules()):
        for (name, before), (after, norm) in pairwise(list(module.named_children())):
            if isinstance(before, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(before, norm))
                setattr(module, after, nn.Identity())
