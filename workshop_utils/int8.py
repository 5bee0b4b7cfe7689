"""A ResNet in int8, for CPUs: weights and activations of eight bits make its forward pass shorter than in bf16."""

import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import nn
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock

from workshop_utils.checkpoint import WeightsError
from workshop_utils.decode import load_on_cpu
from workshop_utils.photos import read_files
from workshop_utils.precision import ieee_float32

CALIBRATION = 32  # photos from which a model learns the range of its values: ResNet-50 takes 12 s of a core
CALLS_KEPT = 2  # two calls may take turns on a worker
_calibrating = threading.Lock()
# Of the latest calls, by call and checksum of the weights: what `calibrated` returns.
_of_calls: dict[tuple[str, int], tuple[int, nn.Module]] = {}
# How the warnings begin that torch.ao.quantization, which is deprecated, gives of what it does itself.
ITS_WARNINGS = "torch.ao.quantization is deprecated", "Please use quant_min and quant_max", "torch.quantize_per_tensor"


class Calibration(NamedTuple):
    """What all tasks of a call calibrate with. call: tells it from all other calls. paths: of the photos."""

    call: str
    paths: list[str]


def for_calibration(photos: Iterator[str], all_at_hand: bool) -> tuple[list[str], Iterator[str]]:
    """Return (paths to calibrate with, an iterator over all paths).

    all_at_hand: the paths are in memory, so these are spread evenly over all of them; else they are the first ones.
    """
    if not all_at_hand:
        first = list(islice(photos, CALIBRATION))
        return first, chain(first, photos)
    everything = list(photos)
    n = min(CALIBRATION, len(everything))
    return [everything[i * len(everything) // n] for i in range(n)], iter(everything)


def calibrated(
    model: ResNet, checksum: int, transform: Callable, calibration: Calibration, storage_options: dict | None
) -> tuple[int, nn.Module]:
    """Return (checksum, model in int8): calibrated by a call's first task in this process, which later ones reuse.

    checksum: of the model's weights; the one returned is also that of the photos, so that two workers which could not
    read the same ones are noticed.
    Raises what `to_int8` raises, and ValueError if none of the photos can be read.
    """
    key = calibration.call, checksum
    if ready := _of_calls.get(key):
        return ready
    with _calibrating:  # otherwise two threads of a worker would both calibrate
        if ready := _of_calls.get(key):
            return ready
        contents = read_files(calibration.paths, storage_options)
        for content in contents:
            if isinstance(content, bytes):  # else it is the error
                checksum = zlib.crc32(content, checksum)
        model_in_int8 = dict(_of_calls.values()).get(checksum)  # of an earlier call with the same photos
        if not model_in_int8:
            model_in_int8 = to_int8(model, _images(contents, calibration.paths, transform))
        _of_calls[key] = checksum, model_in_int8
        if len(_of_calls) > CALLS_KEPT:
            _of_calls.pop(next(iter(_of_calls)))
        return _of_calls[key]


def _images(contents, paths, transform):
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        images, errors = load_on_cpu(contents, paths, transform, pool)
    if not len(images):
        raise ValueError(
            f"A model in int8 is calibrated with photos, and none of the {len(paths)} that were given for it can be "
            f"classified{f': {errors[0]}' if errors else ''}. Give photos that can be read, or precision='auto'."
        )
    return images


@ieee_float32()
@torch.inference_mode()
def to_int8(model: ResNet, images: torch.Tensor, batch_size: int = 16) -> nn.Module:
    """Return a copy of a float32 ResNet that computes in int8, on the CPU, from float32 images to float32 logits.

    images: (n, 3, h, w), for calibration: from the values that each layer has with them come its eight-bit steps. They
    should be like the images that the model will see. A forward pass takes `batch_size` of them.
    Raises WeightsError if the model's output is NaN or infinite, ValueError if PyTorch has no int8 on this processor,
    or no longer has this way to it.

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
    if not model(images[:1]).isfinite().all():
        raise WeightsError("The model's output is not a number (NaN) or infinite: its weights may be damaged.")
    prepared = _quantizable(model)
    prepared.fuse_model()  # each convolution with its BatchNorm and ReLU
    prepared.qconfig = get_default_qconfig(engine)
    prepare(prepared, inplace=True)
    for part in images.split(batch_size):
        prepared(part)
    return convert(prepared, inplace=True)


def _quantizable(model):
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
