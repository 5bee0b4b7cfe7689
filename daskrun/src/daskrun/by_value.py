"""Let processes that a worker starts, such as those of a DataLoader, have classes and functions they cannot import."""

import pickle
from collections import ChainMap
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID, _get_or_create_tracker_id


class _ByValue(cloudpickle.Pickler):
    """Pickles for a child what it cannot import, such as a notebook's class, and lets it share a tensor's memory."""

    dispatch_table = ChainMap(cloudpickle.Pickler.dispatch_table, ForkingPickler._extra_reducers)  # type: ignore[attr-defined]


def by_value(value: Any) -> bytes:
    """Return `value` as a child can load it with `pickle`."""
    with BytesIO() as file:
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
