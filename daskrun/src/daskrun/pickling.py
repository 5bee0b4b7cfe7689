"""What travels, pickled: a call to the ranks, their results to the client, and to a child what it cannot import."""

import io
import pickle
from collections import ChainMap
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID, _get_or_create_tracker_id


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


class _ByValue(cloudpickle.Pickler):
    """Pickles for a child what it cannot import, such as a notebook's class, and lets it share a tensor's memory."""

    dispatch_table = ChainMap(cloudpickle.Pickler.dispatch_table, ForkingPickler._extra_reducers)  # type: ignore[attr-defined]


def by_value(value: Any) -> bytes:
    """Return `value` as a child can load it with `pickle`."""
    with io.BytesIO() as file:
        _ByValue(file).dump(value)
        return file.getvalue()


def send_by_value() -> None:
    """Let this process and its children send each other what a notebook's cell defines: where pickle cannot name it."""
    ForkingPickler.reducer_override = _reduced  # type: ignore[assignment]


def _reduced(pickler: ForkingPickler, value: Any) -> Any:
    if isinstance(value, (type, FunctionType)):
        try:
            pickle.dumps(value)
        except Exception:  # pickle raises errors of many types
            name = _get_or_create_tracker_id(value) if isinstance(value, type) else None
            return _received, (name, by_value(value))
    return NotImplemented


def _received(name: str | None, pickled: bytes) -> Any:
    send_by_value()  # a child's answers may be of such classes, too
    # Loading a class that this process has would give it the attributes, and copies of the functions, of the sender.
    known = _DYNAMIC_CLASS_TRACKER_BY_ID.get(name)
    return pickle.loads(pickled) if known is None else known
