"""Leave a worker's process as a job has found it: its environment, its folder, PyTorch's settings."""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block; afterwards all are as before, also those that the block set itself.

    So is the working directory.

    Other threads of the worker always see the variables that do not change, as they would not with `patch.dict`.
    """
    before, folder = dict(os.environ), None
    with suppress(FileNotFoundError):  # somebody removed it
        folder = os.getcwd()
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
        if folder:
            with suppress(OSError):
                os.chdir(folder)


@contextmanager
def torch_as_found() -> Iterator[None]:
    """Restore PyTorch's settings after the block, which may end in the midst of a change.

    Else the next job in this process would run with others than its ranks in new processes. What is drawn at random
    afterwards is new: else a seed that all ranks set would let the ranks of the next job draw the same.
    """
    import numpy as np
    import torch

    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision, deterministic = torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode()
    exact, autocast = torch.backends.cudnn.deterministic, {of: torch.is_autocast_enabled(of) for of in ("cpu", "cuda")}
    device, searches, warns = torch.get_default_device(), torch.backends.cudnn.benchmark, torch.is_warn_always_enabled()
    with torch.set_grad_enabled(torch.is_grad_enabled()), torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled()):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            torch.set_deterministic_debug_mode(deterministic)
            if torch.get_default_device() != device:
                torch.set_default_device(None if device.type == "cpu" else device)
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = searches, exact
            for of, enabled in autocast.items():
                torch.set_autocast_enabled(of, enabled)
            torch.set_warn_always(warns)
            torch.seed()
            np.random.seed()
            random.seed()
