"""Restore what a job changes in a worker's process, and the next job or a plain Dask task would meet.

That is what the two functions name. Other things stay: imported modules and what they hold, sys.path, the umask, signal
handlers, filters of warnings that make no errors, other settings of PyTorch. A function runs in the worker itself all
the same: that is warm, the dashboard shows its CPU and memory, and `get_worker` works.
"""

import os
import random
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
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
    deterministic = torch.get_deterministic_debug_mode()
    timeout, filters = socket.getdefaulttimeout(), list(warnings.filters)
    exact, caches = torch.backends.cudnn.deterministic, torch.is_autocast_cache_enabled()
    autocast = {of: (torch.is_autocast_enabled(of), torch.get_autocast_dtype(of)) for of in ("cpu", "cuda")}
    device, searches, warns = torch.get_default_device(), torch.backends.cudnn.benchmark, torch.is_warn_always_enabled()
    with (
        torch.set_grad_enabled(torch.is_grad_enabled()),
        torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled()),
        _float32_as_found(),
    ):
        try:
            yield
        finally:
            socket.setdefaulttimeout(timeout)
            # Only these: the filters that an import has set are set once.
            warnings.filters[:] = [one for one in warnings.filters if one[0] != "error" or one in filters]  # type: ignore[index]
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
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


@contextmanager
def _float32_as_found() -> Iterator[None]:
    """Restore after the block how float32 is rounded: PyTorch's two older settings, and `fp32_precision`, the newer.

    An older one sets newer ones, too, and cannot be read while one of these contradicts it: it is then left alone.
    """
    import torch

    of: Any = torch.backends
    modules = [of, of.cudnn, of.mkldnn]  # first, as the others follow these
    modules += of.cudnn.conv, of.cudnn.rnn, of.cuda.matmul, of.mkldnn.conv, of.mkldnn.matmul, of.mkldnn.rnn
    older, newer = _older_settings(), [module.fp32_precision for module in modules]
    try:
        yield
    finally:
        for (write, value), (_, now) in zip(older, _older_settings(), strict=True):
            if value not in (None, now):
                write(value)
        for module, value in zip(modules, newer, strict=True):
            if module.fp32_precision != value:
                module.fp32_precision = value


def _older_settings() -> list[tuple[Callable[[Any], None], Any]]:
    """Return how to set products' precision, and convolutions' on a GPU, and what they are: None where unreadable."""
    import torch
    from torch.backends import cudnn

    values: list[Any] = [None, None]
    with suppress(RuntimeError):
        values[0] = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        values[1] = cudnn.allow_tf32
    return [(torch.set_float32_matmul_precision, values[0]), (partial(setattr, cudnn, "allow_tf32"), values[1])]
