"""Restore what a job changes in a worker's process, and the next job or a plain Dask task would meet.

That is what the two functions name. Other things stay: imported modules and what they hold, sys.path, the umask, signal
handlers, filters of warnings that make no errors, other settings of PyTorch. A function runs in the worker itself all
the same: that is warm, the dashboard shows its CPU and memory, and `get_worker` works.
"""

import os
import random
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any


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
def settings_as_found() -> Iterator[None]:
    """Restore settings of PyTorch, and what would break plain Dask tasks, after the block.

    That is the default timeout of sockets, and that warnings are no errors. The block may end in the midst of a change.
    Else the next job in this process would run with others than its ranks in new processes. What is drawn at random
    afterwards is new: else a seed that all ranks set would let the ranks of the next job draw the same.
    """
    import numpy as np
    import torch

    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision, deterministic = _matmul_precision(), torch.get_deterministic_debug_mode()
    timeout, filters = socket.getdefaulttimeout(), list(warnings.filters)
    exact, caches = torch.backends.cudnn.deterministic, torch.is_autocast_cache_enabled()
    autocast = {of: (torch.is_autocast_enabled(of), torch.get_autocast_dtype(of)) for of in ("cpu", "cuda")}
    device, searches, warns = torch.get_default_device(), torch.backends.cudnn.benchmark, torch.is_warn_always_enabled()
    with torch.set_grad_enabled(torch.is_grad_enabled()), torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled()):
        try:
            yield
        finally:
            socket.setdefaulttimeout(timeout)
            # Only these: the filters that an import has set are set once.
            warnings.filters[:] = [one for one in warnings.filters if one[0] != "error" or one in filters]  # type: ignore[index]
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            if precision not in (None, _matmul_precision()):
                torch.set_float32_matmul_precision(precision)
            torch.set_deterministic_debug_mode(deterministic)
            if torch.get_default_device() != device:
                torch.set_default_device(None if device.type == "cpu" else device)
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = searches, exact
            for of, (enabled, autocast_dtype) in autocast.items():
                torch.set_autocast_enabled(of, enabled)
                torch.set_autocast_dtype(of, autocast_dtype)
            torch.set_autocast_cache_enabled(caches)
            torch.set_warn_always(warns)
            torch.seed()
            np.random.seed()
            random.seed()


def _matmul_precision() -> Any:
    """Return the precision of products; None if `torch.backends.cuda.matmul.fp32_precision` contradicts it."""
    import torch

    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None
