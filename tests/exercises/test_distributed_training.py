"""Notebook 06: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import sys
from contextlib import contextmanager

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from workshop_utils.cluster import start_cluster
from workshop_utils.exercises import (
    NotYet,
    distributed_training,
)


def mean_by(reduce):
    def global_mean(value):
        import torch.distributed as dist

        total = torch.tensor([value])
        return reduce(dist, total)

    return global_mean


def all_reduced(dist, total):
    dist.all_reduce(total)
    return total / dist.get_world_size()


def summed_only(dist, total):
    dist.all_reduce(total)
    return total.item()


def of_rank_0_alone(dist, total):
    dist.reduce(total, 0)
    return total.item() / dist.get_world_size()


@pytest.mark.parametrize(
    ("reduce", "hint"),
    [
        (lambda dist, total: None, "returns None"),
        (lambda dist, total: total, "returned .10.0, 20.0"),
        (summed_only, "that is the sum"),
        (of_rank_0_alone, "had .10.0, 20.0. and returned .15.0,"),
    ],
)
def test_no_wrong_mean_passes(reduce, hint, client):
    with by_value(), pytest.raises(NotYet, match=hint):
        distributed_training.check_global_mean(mean_by(reduce), client)


def test_the_mean_over_all_ranks_passes_as_a_tensor(client):
    with by_value():
        distributed_training.check_global_mean(mean_by(all_reduced), client)


def test_a_mean_on_a_single_worker_is_no_sum():
    client = start_cluster(1)
    try:
        with by_value():
            distributed_training.check_global_mean(mean_by(all_reduced), client)
    finally:
        client.shutdown()


@contextmanager
def by_value():
    """Send this module's functions to the workers by value, as a notebook's are, since they cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    ("share", "hint"),
    [
        (lambda n, rank, world: None, "returns None"),
        (lambda n, rank, world: list(range(n)), "counted twice"),
        (lambda n, rank, world: list(range(rank * (n // world), (rank + 1) * (n // world))), "somebody has to take"),
        (lambda n, rank, world: list(range(rank, n + n % world, world)), "there is no such image"),
        (lambda n, rank, world: list(range(rank, n, 2)), "with 96 images and 4 ranks.*counted twice"),
        (lambda n, rank, world: list(range(n)) if rank == 0 else [], "waits for the longest"),
        (lambda n, rank, world: list(DistributedSampler(range(n), world, rank, shuffle=False)), "counted twice"),
    ],
)
def test_no_wrong_share_passes(share, hint):
    with pytest.raises(NotYet, match=hint):
        distributed_training.check_my_share(share)


@pytest.mark.parametrize(
    "share",
    [
        lambda n, rank, world: range(rank, n, world),
        lambda n, rank, world: np.array_split(np.arange(n), world)[rank].tolist(),
    ],
)
def test_any_even_share_passes(share):
    distributed_training.check_my_share(share)
