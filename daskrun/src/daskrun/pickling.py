"""What travels, pickled: a call to the ranks, and their results to the client."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle


def pickled(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    """Return a call as it travels to the ranks. Raises TypeError."""
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:  # pickling raises many kinds
        name = getattr(fn, "__name__", fn)
        raise TypeError(
            f"{name!r} or one of its arguments cannot be sent to workers ({error}): make files, locks, clients and "
            "DataLoaders inside the function."
        ) from error


def packed(value: object) -> bytes:
    """Return a result as it travels: pickled here, with every tensor on the CPU. Raises TypeError."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:  # pickling raises many kinds
        raise TypeError(
            "What the function returned cannot be sent back: return numbers, text, tensors or a state_dict instead of "
            "generators, files, locks or DataLoaders."
        ) from error
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:  # the client may have no GPU
        import torch

        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            on_cpu = value.detach().cpu()
            if isinstance(value, torch.nn.Parameter):
                on_cpu = torch.nn.Parameter(on_cpu, value.requires_grad)
            return on_cpu.__reduce_ex__(self.proto)
        return super().reducer_override(value)


def unpacked(rank: int, result: bytes) -> Any:
    """Return what a rank returned, from what `packed` made of it. Raises TypeError."""
    try:
        return pickle.loads(result)
    except Exception as error:  # unpickling raises many kinds
        raise TypeError(
            f"What rank {rank} returned cannot be read here ({error!r}): return numbers, text, tensors or a "
            "state_dict, or install here what the workers have."
        ) from error
