"""The precision to compute in: bf16 where the machine is faster in it, and float32 without shortcuts."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import backends

PRECISIONS = ("auto", "fp32", "bf16")
_lock = threading.Lock()
_n_inside = 0  # threads of this process inside `ieee_float32`
_changed = ExitStack()  # puts back the settings that the first of them changed


def precision_of(precision: str = "auto", accepted: tuple[str, ...] = PRECISIONS) -> str:
    """Return what `precision` means on this machine: for "auto" it is "bf16" or "fp32", else the precision itself.

    Raises ValueError if it is not `accepted`.
    """
    if precision not in accepted:
        raise ValueError(f"precision is {precision!r}: write one of {', '.join(accepted)}.")
    if precision != "auto":
        return precision
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.get_device_capability()[0] >= 8 else "fp32"
    # A CPU that has to emulate bf16 is slower in it than in fp32. So is Intel's AVX512-BF16 without AMX: a forward pass
    # of ResNet-50 took 1.3 times as long.
    has = torch.cpu.get_capabilities().get
    fast = has("amx_bf16") or (has("avx512_bf16") and "Intel" not in has("cpu_name", ""))
    return "bf16" if fast else "fp32"


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Compute float32 with all its digits; afterwards PyTorch's settings are as they were.

    Unless told otherwise, PyTorch's convolutions on a GPU round to the 10 bits of TF32. The settings belong to the
    process, so the first thread that enters changes them, and the last one that leaves puts them back: PyTorch's own
    `torch.backends.flags` would put them back while another thread of a worker still computes.
    """
    global _n_inside
    with _lock:
        if _n_inside == 0:
            _set_ieee()
        _n_inside += 1
    try:
        yield
    finally:
        with _lock:
            _n_inside -= 1
            if _n_inside == 0:
                _changed.close()


def _set_ieee() -> None:
    # The general ones first: a setting that follows one of them needs no change, so it still follows afterwards.
    root: Any = backends
    general = root, root.cudnn
    operations = root.cudnn.conv, root.cudnn.rnn, root.cuda.matmul, root.mkldnn.conv, root.mkldnn.matmul
    for setting in general + operations:
        if setting.fp32_precision != "ieee":
            _changed.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
            setting.fp32_precision = "ieee"
