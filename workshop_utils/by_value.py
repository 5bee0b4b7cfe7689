"""Let processes that a worker starts, such as those of a DataLoader, have classes and functions they cannot import."""

import pickle
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import cloudpickle


def send_by_value() -> None:
    """Let this process and its children send each other what a notebook's cell defines: where pickle cannot name it."""
    ForkingPickler.reducer_override = _reduced  # type: ignore[assignment]


def _reduced(pickler: ForkingPickler, value: Any) -> Any:
    if isinstance(value, (type, FunctionType)):
        try:
            pickle.dumps(value)
        except Exception:  # pickle raises errors of many types
            return _received, (cloudpickle.dumps(value),)
    return NotImplemented


def _received(pickled: bytes) -> Any:
    send_by_value()  # a child's answers may be of such classes, too
    return pickle.loads(pickled)
