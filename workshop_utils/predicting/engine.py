"""OpenVINO instead of PyTorch's own kernels for a model's forward passes on a CPU: the same answers, sooner."""

import copy
import importlib.util
import threading
import warnings
from weakref import WeakKeyDictionary

import torch
from distributed import get_worker, warn
from torch import nn

ENGINES = ("auto", "eager", "openvino")
# A conversion of ResNet-50 takes three seconds of a core, and saves 8 to 26 ms a photo.
WORTH_IT = 500  # photos for each thread of a cluster
# How far logits may be from eager PyTorch's, as a share of the largest one.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def is_installed() -> bool:
    """Return whether this process could import OpenVINO."""
    return importlib.util.find_spec("openvino") is not None


class EngineError(RuntimeError):
    """OpenVINO can't compute this model, or computes something else."""


class OpenVINOModule(nn.Module):
    """A module that OpenVINO computes, on as many threads as PyTorch has for each task; it has no parameters.

    Args:
        model: In eval mode, on the CPU. Its parameters' dtype is what OpenVINO computes in, float32 or bfloat16.
        images: (n, 3, h, w) of that dtype, to trace the model with.
    """

    def __init__(self, model: nn.Module, images: torch.Tensor) -> None:
        import openvino

        super().__init__()
        # PyTorch deprecates the tracing that OpenVINO reads. Ignored for good: `catch_warnings` isn't for threads.
        warnings.filterwarnings("ignore", "`torch.jit.", FutureWarning)
        exact = copy.deepcopy(model).float()  # of a model in bfloat16, OpenVINO would make one in float16
        traced = torch.jit.trace(exact, images[:2].float(), strict=False, check_trace=False)
        n_tasks = _threads_of_worker()
        self._compiled = openvino.Core().compile_model(
            openvino.convert_model(traced),
            "CPU",
            {
                "ENABLE_CPU_PINNING": False,  # each process would take the first core, and two would share it
                "INFERENCE_NUM_THREADS": n_tasks * torch.get_num_threads(),
                "INFERENCE_PRECISION_HINT": "bf16" if images.dtype == torch.bfloat16 else "f32",
                "NUM_STREAMS": n_tasks,
            },
        )
        self._of_thread = threading.local()  # a request serves one thread at a time

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the model's output for (n, 3, h, w) float32 images, as float32."""
        if not hasattr(self._of_thread, "request"):
            self._of_thread.request = self._compiled.create_infer_request()
        return torch.from_numpy(self._of_thread.request.infer(images.contiguous().numpy())[0].copy())


_converted: WeakKeyDictionary[nn.Module, OpenVINOModule | EngineError] = WeakKeyDictionary()
_converting = threading.Lock()


def module_for(engine: str, model: nn.Module, images: torch.Tensor) -> nn.Module:
    """Return the module that computes images: `model`, or its conversion, made by the first call for it.

    Args:
        engine: "eager", "openvino", or "auto" for OpenVINO if its answers for these images agree with eager PyTorch's.
        images: (n, 3, h, w) float32.

    Raises:
        EngineError: For "openvino" if it isn't installed, can't compute the model, or disagrees.
    """
    if engine == "eager" or (engine == "auto" and not is_installed()):
        return model
    with _converting:
        if model not in _converted:
            try:
                _converted[model] = _convert(model, images)
            except Exception as error:
                _converted[model] = EngineError(f"OpenVINO can't compute this model: {type(error).__name__}: {error}")
                if engine == "auto":
                    warn(f"{_converted[model]}. Eager PyTorch computes it.")
        found = _converted[model]
    if isinstance(found, OpenVINOModule):
        return found
    if engine == "auto":
        return model
    raise found


@torch.inference_mode()
def _convert(model: nn.Module, images: torch.Tensor) -> OpenVINOModule:
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    images = images.to(dtype)
    module = OpenVINOModule(model, images)
    expected, found = model(images).float(), module(images.float())
    off = ((found - expected).abs().max() / expected.abs().max()).item()
    if not off <= TOLERANCE[dtype]:
        raise ValueError(f"its outputs are off by {off:.1%} of the largest, and {TOLERANCE[dtype]:.1%} are allowed")
    return module


def _threads_of_worker() -> int:
    try:
        return get_worker().state.nthreads
    except ValueError:  # in no task
        return 1
