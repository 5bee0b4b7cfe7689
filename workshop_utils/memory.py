"""How much memory a training needs: a limit for it, its peak, and what its tensors hold."""

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor

SAMPLE_S = 0.005  # between two samples of a process's size
M_MMAP_THRESHOLD = -3  # of glibc's mallopt: larger tensors go back to the system as soon as they're freed


@contextmanager
def peak_memory(limit_mb: float | None = None) -> Iterator[dict[str, float]]:
    """Measure the memory that a block of code needs: on the GPU if PyTorch sees one, else of this process.

    On a GPU that's what PyTorch's allocator reserves. In main memory it's the process's resident size, sampled every
    5 ms, so a shorter peak is missed.

    Args:
        limit_mb: What the block may allocate, in MB. Beyond that, PyTorch raises in the line that allocates:
            ``torch.OutOfMemoryError`` on a GPU, another RuntimeError in main memory, where only Linux has such a limit.

    Yields:
        A dict that has, after the block, also if that raises, ``"peak MB"`` (10^6 bytes).

    >>> with peak_memory() as memory:
    ...     numbers = torch.ones(12_500_000)  # 50 MB
    >>> memory["peak MB"] > 40
    True
    """
    gc.collect()
    found: dict[str, float] = {}
    with _on_gpu(found, limit_mb) if torch.cuda.is_available() else _in_main_memory(found, limit_mb):
        yield found


@contextmanager
def _on_gpu(found, limit_mb):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    idle = torch.cuda.memory_reserved()
    if limit_mb is not None:
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (idle + 1e6 * limit_mb) / total))
    try:
        yield
    finally:
        if limit_mb is not None:
            torch.cuda.set_per_process_memory_fraction(1.0)
        found["peak MB"] = (torch.cuda.max_memory_reserved() - idle) / 1e6


@contextmanager
def _in_main_memory(found, limit_mb):
    with suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 1_000_000)
        libc.malloc_trim(0)
    torch.zeros(2**15 * torch.get_num_threads()).sin_()  # starts PyTorch's threads, whose stacks would count
    process, done = psutil.Process(), threading.Event()
    sizes = [process.memory_info().rss]

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            sizes.append(process.memory_info().rss)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        with _limited_data(process, limit_mb):
            yield
    finally:
        sizes.append(process.memory_info().rss)  # what the block still holds
        done.set()
        sampler.join()
        found["peak MB"] = (max(sizes) - sizes[0]) / 1e6


@contextmanager
def _limited_data(process, limit_mb):
    if limit_mb is None or sys.platform != "linux":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (process.memory_info().data + int(1e6 * limit_mb), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def held_mb(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return what a training's tensors hold on this rank, in MB: parameters, gradients and the optimizer's state.

    Of a parameter that's sharded, only this rank's shard counts.
    """
    parameters: list[torch.Tensor] = list(model.parameters())
    tensors: dict[str, list[torch.Tensor]] = {
        "parameters": parameters,
        "gradients": [weight.grad for weight in parameters if weight.grad is not None],
        "optimizer": [tensor for state in optimizer.state.values() for tensor in state.values()],
    }
    return {kind: sum(_local(tensor).nbytes for tensor in each) / 1e6 for kind, each in tensors.items()}


def activations_mb(module: nn.Module, x: torch.Tensor) -> float:
    """Return the MB that autograd keeps for the backward pass of ``module(x)``, without the module's parameters."""
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = module(x)
    for weight in module.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    del y
    return sum(kept.values()) / 1e6


def gathered_mb(model: nn.Module, parts: list[nn.Module], loss: Callable[[], torch.Tensor]) -> list[float]:
    """Run one forward and backward pass of an FSDP model, and record how many of its parameters are whole, in MB.

    Args:
        model: A model that ``fully_shard`` was called on.
        parts: Modules of it; a record is made before the forward and before the backward pass of each.
        loss: Runs the model, and returns its loss.

    Returns:
        The records: one before, one for each part forward, one for each part backward, and one after.
    """
    records: list[float] = []

    def record(*_: object) -> None:
        whole = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        records.append(sum(weight.nbytes for weight in whole) / 1e6)

    record()
    handles = [part.register_forward_pre_hook(record) for part in parts]
    handles += [part.register_full_backward_pre_hook(record) for part in parts]
    loss().backward()
    for handle in handles:
        handle.remove()
    record()
    return records


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
