"""Horovod for ranks that are threads of this process: it needs no build, and notices at once who waits for whom."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from types import ModuleType
from typing import Any

import torch

from workshop_utils.exercises import expect

END = "the end of your function"  # the name of an operation in which all ranks meet there
WAITING = (
    "So Horovod waits for ever: all ranks have to call the same operations, in the same order and with the same names."
)


def in_threads(function: Callable, *args: Any, size: int = 2) -> list[Any]:
    """Return what function(*args) returns on each rank; meanwhile, `import horovod.torch` gives it the stand-in."""
    package, stand_in = ModuleType("horovod"), _StandIn(size)
    vars(package)["torch"] = stand_in
    with _imported({"horovod": package, "horovod.torch": stand_in}), ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(stand_in.on, rank, function, *args) for rank in range(size)]
    errors = [error for rank in ranks if (error := rank.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error  # rather than that of a rank that waited for the one that failed
    return [rank.result() for rank in ranks]


@contextmanager
def _imported(stand_ins):
    """Have these modules imported in the block, by name, and after it what was there before.

    `patch.dict` would empty `sys.modules` for a moment. What another thread imports then is made anew, and a second
    `io` breaks `torch.load`.
    """
    before = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(before)


class _StandIn(ModuleType):
    """horovod.torch for ranks that are threads of this process; it notices when they wait for different operations."""

    Average, Sum, global_process_set = "average", "sum", None

    def __init__(self, size):
        super().__init__("horovod.torch")
        self._here, self._slots = threading.local(), list[Any]([None] * size)
        self._all = threading.Barrier(size, timeout=10)
        self.size, self.rank = lambda: size, lambda: self._here.rank
        self.init = self.shutdown = lambda *_: None  # both have been called for your function, on the cluster too

    def __getattr__(self, name):
        raise AttributeError(f"the stand-in for Horovod, which is not built here, has no {name!r}")

    def on(self, rank, function, *args):
        self._here.rank = rank
        try:
            return function(*args)
        except Exception:
            self._all.abort()
            raise

    def _exchange(self, operation, name, value):
        where = f"is at {END}" if name == END else f"waits in {operation}" + (f", named {name!r}" if name else "")
        self._slots[self.rank()] = (operation, name), where, value
        self._all.wait()
        operations, places, values = zip(*self._slots, strict=True)
        values = deepcopy(values)  # each rank gets copies, as if they had been sent
        self._all.wait()
        standing = "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
        expect(len(set(operations)) == 1, f"{standing}. {WAITING}")
        return values

    def allreduce(self, tensor, average=None, name=None, op="average", **_):
        total = sum(self._exchange("allreduce", name, tensor.detach()))
        return total if op == self.Sum or average is False else total / self.size()

    def allgather(self, tensor, name=None, **_):
        return torch.cat(self._exchange("allgather", name, tensor.detach()))

    def allgather_object(self, value, name=None):
        return list(self._exchange("allgather_object", name or type(value).__name__, value))

    def broadcast_object(self, value, root_rank=0, name=None, **_):
        return self._exchange("broadcast_object", name or type(value).__name__, value)[root_rank]

    def broadcast(self, tensor, root_rank, name=None, **_):
        return self._exchange("broadcast", name, tensor.detach())[root_rank]

    def broadcast_(self, tensor, root_rank, name=None, **_):
        return tensor.data.copy_(self.broadcast(tensor, root_rank, name))

    def broadcast_parameters(self, params, root_rank):
        if not isinstance(params, dict | list):
            raise ValueError(f"invalid params of type: {type(params)}")  # as Horovod does
        named = params.items() if isinstance(params, dict) else params
        tensors = [item[-1] if isinstance(item, tuple) else item for item in named]
        for mine, theirs in zip(tensors, self._exchange("broadcast_parameters", None, tensors)[root_rank], strict=True):
            mine.data.copy_(theirs)
