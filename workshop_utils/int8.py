"""A ResNet in int8, for CPUs: weights and activations of eight bits make its forward pass shorter than in bf16."""

import warnings
from collections.abc import Iterator
from itertools import chain, islice

import torch
from torch import nn
from torch.ao.quantization import convert, get_default_qconfig, prepare
from torchvision.models import ResNet
from torchvision.models.quantization.resnet import QuantizableBasicBlock, QuantizableBottleneck, QuantizableResNet
from torchvision.models.resnet import BasicBlock

from workshop_utils.models import WeightsError
from workshop_utils.precision import ieee_float32

CALIBRATION = 32  # photos from which a model learns the range of its values: ResNet-50 takes 12 s of a core


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


@ieee_float32()
@torch.inference_mode()
def to_int8(model: ResNet, images: torch.Tensor, batch_size: int = 16) -> nn.Module:
    """Return a copy of a float32 ResNet that computes in int8, on the CPU, from float32 images to float32 logits.

    images: (n, 3, h, w), for calibration: from the values that each layer has with them come its eight-bit steps. They
    should be like the images that the model will see. A forward pass takes `batch_size` of them.
    Raises WeightsError if the model's output is NaN or infinite, ValueError if PyTorch has no int8 on this processor.

    PyTorch's static quantization, by torch.ao.quantization. Its successor torchao needs a C++ compiler on every worker
    to be as fast. Tracing by torch.fx would break forward passes in other threads meanwhile, so it is not used.
    """
    engine = torch.backends.quantized.engine
    if engine == "none":
        raise ValueError("PyTorch has no kernels for int8 on this processor: write precision='auto'.")
    if not model(images[:1]).isfinite().all():
        raise WeightsError("The model's output is not a number (NaN) or infinite: its weights may be damaged.")
    prepared = _quantizable(model)
    prepared.fuse_model()  # each convolution with its BatchNorm and ReLU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated, and warns of its own observers
        prepared.qconfig = get_default_qconfig(engine)
        prepare(prepared, inplace=True)
        for part in images.split(batch_size):
            prepared(part)
        return convert(prepared, inplace=True)


def _quantizable(model):
    """Return torchvision's quantizable twin of a ResNet, with the same weights and strides."""
    block = QuantizableBasicBlock if isinstance(model.layer1[0], BasicBlock) else QuantizableBottleneck
    layers = [len(stage) for stage in (model.layer1, model.layer2, model.layer3, model.layer4)]
    about = {"groups": model.groups, "width_per_group": model.base_width, "num_classes": model.fc.out_features}
    twin = QuantizableResNet(block, layers, **about).eval()
    twin.load_state_dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            twin.get_submodule(name).stride = module.stride  # ResNet v1 has others
    return twin
