"""A model in int8, for CPUs: weights and activations of eight bits make its forward pass shorter than in bf16."""

import copy
import warnings

import torch
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from workshop_utils.precision import ieee_float32


@ieee_float32()
@torch.inference_mode()
def to_int8(model: torch.nn.Module, images: torch.Tensor, batch_size: int = 16) -> torch.nn.Module:
    """Return a copy of a float32 model that computes in int8, on the CPU, from float32 images to float32 logits.

    images: (n, 3, h, w), for calibration: from the values that each layer has with them come its eight-bit steps. They
    should be like the images that the model will see. A forward pass takes `batch_size` of them.

    PyTorch's static quantization, by torch.ao.quantization. Its successor torchao needs a C++ compiler on every worker
    to be as fast.
    """
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated, and warns of its own observers
        prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping(engine), (images[:1],))
        for part in images.split(batch_size):
            prepared(part)
        return convert_fx(prepared)
