"""Notebook 05: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from workshop_utils.exercises import (
    NotYet,
    training_data,
)

CLASSES = ["n02085620-Chihuahua", "n02106166-Border_collie", "n02113186-Cardigan"]


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ([151], "1 entries"),
        ([0, 1, 2], "the labels themselves"),
        ([151, 231, 264], "Border_collie does not become 231"),
        ([151, 232, 474], "Cardigan does not become 474"),
        ([264, 232, 151], "their order is not"),
        ({}, "0 entries"),
        (151, "151 is one value; make a list"),
        (["a"] * 3, "cannot read this answer .*'a'"),
    ],
)
def test_no_wrong_join_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        training_data.check_to_imagenet(answer, CLASSES)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_the_join_by_id_passes_in_any_type(kind):
    training_data.check_to_imagenet(kind([151, 232, 264]), CLASSES)


def sampled(n_photos, told=True, **how):
    def order(rank, epoch):
        sampler = DistributedSampler(range(n_photos), **{"num_replicas": 2, "rank": rank, **how})
        sampler.set_epoch(epoch * told)
        return list(sampler)

    return order


@pytest.mark.parametrize(
    ("order", "hint"),
    [
        (lambda rank, epoch: None, "returns None"),
        (lambda rank, epoch: range(rank, 10, 2), "returns a range"),
        (lambda rank, epoch: list(range(rank, 10, 2)), "epoch 1 has epoch 0's order"),
        (lambda rank, epoch: torch.randperm(10).tolist()[rank::2], "both ranks visit|it answers differently"),
        (lambda rank, epoch: sampled(10)(rank, 0 if rank else epoch), "both ranks visit the same"),
        (sampled(10, told=False), "call set_epoch"),
        (sampled(10, rank=0), "both ranks visit the same"),
        (sampled(10, num_replicas=3), "both ranks visit|together they visit"),
        (sampled(8), "together they visit 8 of 10"),
        (sampled(10, num_replicas=1, rank=0), "rank 0 visits every photo"),
        (lambda rank, epoch: [index + 1000 for index in sampled(10)(rank, epoch)], "indices go from 0 to 9"),
        (lambda rank, epoch: sampled(10, shuffle=False)(rank, epoch), "leave shuffling on"),
    ],
)
def test_no_wrong_order_passes(order, hint):
    with pytest.raises(NotYet, match=hint):
        training_data.check_order(order, 10)


@pytest.mark.parametrize("n_photos, how", [(10, {}), (9, {}), (9, {"drop_last": True}), (10, {"seed": 7})])
def test_a_right_order_passes(n_photos, how):
    training_data.check_order(sampled(n_photos, **how), n_photos)
