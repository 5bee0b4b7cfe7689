"""Ranks that are threads of this process, for checks that ask an answer on two ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from workshop_utils.exercises import ranks


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "daskrun", Ranks(monkeypatch))


@pytest.fixture
def one_rank(monkeypatch):
    """Let the checks run their ranks' part here: in a group of one rank, parameters are in shards, too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = SimpleNamespace(run=lambda client, function, *args, **settings: [function(*args)])
    monkeypatch.setattr(ranks, "daskrun", run)
    yield
    dist.destroy_process_group()


class Ranks:
    """Two threads that stand for two ranks of `daskrun.run`, with the calls of torch.distributed that an answer needs.

    A rank waits until the other makes its next call or ends, so nothing depends on how busy the machine is.
    """

    def __init__(self, monkeypatch):
        self.own, self.changed = threading.local(), threading.Condition()
        for name in ("get_rank", "get_world_size", "barrier", "all_reduce", "all_gather_object", "broadcast"):
            monkeypatch.setattr(dist, name, getattr(self, name))

    def get_rank(self):
        return self.own.rank

    def get_world_size(self):
        return 2

    def barrier(self):
        self.meet("barrier", None)

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        combine = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.MIN: torch.amin}[op]
        tensor.copy_(combine(torch.stack(self.meet("all_reduce", tensor.clone())), 0))

    def broadcast(self, tensor, src):
        """Send what rank `src` has, without waiting for the other, as gloo does with little."""
        if self.own.rank == src:
            with self.changed:
                self.calls[src].append(("broadcast", tensor.clone()))
                self.changed.notify_all()
        else:
            tensor.copy_(self.meet("broadcast", None)[src])

    def all_gather_object(self, found, value):
        found[:] = self.meet("all_gather_object", value)

    def meet(self, name, value):
        rank = self.own.rank
        with self.changed:
            mine, others = self.calls[rank], self.calls[1 - rank]
            mine.append((name, value))
            here = len(mine) - 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(others) > here or self.ended[1 - rank])
            if len(others) <= here or others[here][0] != name:
                raise TimeoutError(
                    "Rank 0 had not returned after 15 s (rank 0: a.py:1 in all_reduce; rank 1: a.py:2 in f): rank 0 "
                    "waits. If all is well, give it longer."
                )
            return [self.calls[number][here][1] for number in (0, 1)]

    def run(self, client, function, *args, **settings):
        self.calls, self.ended = ([], []), [False, False]

        def on(rank):
            self.own.rank = rank
            try:
                return function(*args)
            finally:
                with self.changed:
                    self.ended[rank] = True
                    self.changed.notify_all()

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(on, (0, 1)))
