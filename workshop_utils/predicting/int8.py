"""A ResNet in int8, for CPUs: weights and activations of eight bits make its forward pass shorter than in bf16."""

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock

from workshop_utils.checkpoint import WeightsError
from workshop_utils.photos import read_files
from workshop_utils.precision import ieee_float32
from workshop_utils.reading.decode import BadPhoto, decode_photo

CALIBRATION = 32  # photos from which a model learns the range of its values: ResNet-50 takes 12 s of a core
FORWARD = 16  # photos of a forward pass
# How the warnings begin that torch.ao.quantization, which is deprecated, gives of what it does itself.
ITS_WARNINGS = "torch.ao.quantization is deprecated", "Please use quant_min and quant_max", "torch.quantize_per_tensor"


def choose_for_calibration(photos: Iterator[str], all_at_hand: bool) -> tuple[list[str], Iterator[str]]:
    """Return (paths to calibrate with, an iterator over all paths).

    all_at_hand: the paths are in memory, so these are spread evenly over all of them; else they are the first ones.
    """
    known = list(photos if all_at_hand else islice(photos, CALIBRATION))
    n = min(CALIBRATION, len(known))
    return [known[i * len(known) // n] for i in range(n)], chain(known, photos)


@dataclass(frozen=True)
class Calibration:
    """What all tasks of a call of `classify` calibrate with. call: tells it from all other calls."""

    call: str
    paths: Sequence[str] = field(compare=False)
    storage_options: dict | None = field(compare=False)


@dataclass(frozen=True)
class CalibrationPhotos:
    """The photos of a Calibration, as a process read them. Two are equal if their files hold the same.

    checksum: of all that could be read. contents: as from `photos.read_files`.
    """

    checksum: int
    paths: Sequence[str] = field(compare=False)
    contents: Sequence[bytes | Exception] = field(compare=False)


@lru_cache(maxsize=2)  # two calls may take turns on a worker, and each reads its photos once
def read_photos(calibration: Calibration) -> CalibrationPhotos:
    """Return the photos to calibrate with."""
    checksum, contents = 0, read_files(calibration.paths, calibration.storage_options)
    for content in contents:
        if isinstance(content, bytes):  # else it is the error
            checksum = zlib.crc32(content, checksum)
    return CalibrationPhotos(checksum, calibration.paths, contents)


@ieee_float32()
@torch.inference_mode()
def to_int8(model: ResNet, transform: Callable, photos: CalibrationPhotos, weights: str) -> nn.Module:
    """Return a copy of a float32 ResNet that computes in int8, on the CPU, from float32 images to float32 logits.

    transform: the model's. weights: where they are from, for errors.
    photos: from the values that each layer has with them come its eight-bit steps. They should be like the photos that
    the model will see.
    Raises WeightsError if the model's output is NaN or infinite, ValueError if none of the photos can be read, if
    PyTorch has no int8 on this processor, or no longer has this way to it.

    PyTorch's static quantization, by torch.ao.quantization. Its successor torchao needs a C++ compiler on every worker
    to be as fast. Tracing by torch.fx would break forward passes in other threads meanwhile, so it is not used.
    """
    engine = torch.backends.quantized.engine
    if engine == "none":
        raise ValueError("PyTorch has no kernels for int8 on this processor: write precision='auto'.")
    try:
        from torch.ao.quantization import convert, get_default_qconfig, prepare  # deprecated: it may be gone one day
    except ImportError as error:
        raise ValueError(f"This PyTorch does not quantize to int8 ({error}): write precision='auto'.") from error
    # Ignored for good: `catch_warnings` in one thread would also silence, and perhaps leave silent, all others.
    for said in ITS_WARNINGS:
        warnings.filterwarnings("ignore", said)
    images = _images(transform, photos)
    if not model(images[:1]).isfinite().all():
        raise WeightsError(
            f"{weights!r} cannot be used: the model's output is not a number (NaN) or infinite, so its weights may be "
            "damaged. Save or download them again."
        )
    prepared = _quantizable(model)
    prepared.fuse_model()  # each convolution with its BatchNorm and ReLU
    prepared.qconfig = get_default_qconfig(engine)
    prepare(prepared, inplace=True)
    for part in images.split(FORWARD):
        prepared(part)
    return convert(prepared, inplace=True)


def _images(transform: Callable, photos: CalibrationPhotos) -> torch.Tensor:
    """Return the images of the photos that can be read, (n, 3, h, w)."""
    images, errors = [], []
    for content, path in zip(photos.contents, photos.paths, strict=True):
        try:
            images.append(transform(decode_photo(content, path)))
        except BadPhoto as error:
            errors.append(str(error))
    if not images:
        raise ValueError(
            f"A model in int8 is calibrated with photos, and none of the {len(errors)} that were given for it can be "
            f"classified{f': {errors[0]}' if errors else ''}. Give photos that can be read, or precision='auto'."
        )
    return torch.stack(images)


def _quantizable(model: ResNet) -> Any:
    """Return torchvision's quantizable twin of a ResNet, with the same weights and strides."""
    from torchvision.models.quantization.resnet import QuantizableBasicBlock, QuantizableBottleneck, QuantizableResNet

    block = QuantizableBasicBlock if isinstance(model.layer1[0], BasicBlock) else QuantizableBottleneck
    layers = [len(stage) for stage in (model.layer1, model.layer2, model.layer3, model.layer4)]
    about = {"groups": model.groups, "width_per_group": model.base_width, "num_classes": model.fc.out_features}
    twin = QuantizableResNet(block, layers, **about).eval()
    twin.load_state_dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            twin.get_submodule(name).stride = module.stride  # ResNet v1 has others
    return twin
