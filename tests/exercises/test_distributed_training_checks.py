"""Notebook 06: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import sys
from contextlib import contextmanager

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils.exercises import NotYet, distributed_training


@contextmanager
def by_value():
    """Send this module's functions to the workers by value, as a notebook's are, since they cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def fit(images, labels, batch_size, n_epochs):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(n_epochs):
        for start in range(0, len(images), batch_size):
            x, y = images[start : start + batch_size], labels[start : start + batch_size]
            loss = cross_entropy(model(x), y, reduction="sum") / batch_size
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def together(*, wrap=True, share="strided", divide_by="part", seed=0, returned="module", steps=1, no_zero_grad=False):
    """Return a `fit_together` that is right by default, and else wrong in one way."""

    def fit_together(images, labels, batch_size, n_epochs):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
        model = DistributedDataParallel(model) if wrap else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        part = batch_size // world_size
        for _ in range(n_epochs):
            for start in range(0, len(images), batch_size):
                x, y = images[start : start + batch_size], labels[start : start + batch_size]
                mine = {
                    "strided": slice(rank, None, world_size),
                    "blocks": slice(rank * part, (rank + 1) * part),
                    "all": slice(None),
                    "first": slice(0, part),
                    "overlapping": slice(rank, rank + part),
                }
                x, y = x[mine[share]], y[mine[share]]
                for piece in range(steps):
                    a, b = x[piece::steps], y[piece::steps]
                    total = cross_entropy(model(a), b, reduction="sum")
                    loss = total / {"part": len(a), "batch": batch_size}[divide_by]
                    loss.backward()
                    optimizer.step()
                    if not no_zero_grad:
                        optimizer.zero_grad()
        if returned == "module":
            return (model.module if wrap else model).state_dict()
        return {"wrapped": model.state_dict(), "nothing": None, "model": model}[returned]

    return fit_together


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "should be a function"),
        (fit, "nothing has changed"),
        (together(returned="nothing"), "0.weight"),
        (together(returned="model"), "return the weights"),
        (together(share="all"), "one image in 2"),
        (together(share="first"), "same images"),
        (together(share="overlapping"), "on no rank"),
        (together(wrap=False), "different weights.*wrapped"),
        (together(divide_by="batch"), "0.5 times.*divide"),
        (together(seed=1), "begin with the same"),
        (together(steps=2), r"2, 2"),
        (together(no_zero_grad=True), "after 2 epochs"),
        (lambda images, labels, batch_size, n_epochs: images.nothing, "AttributeError"),
        (lambda images: None, "TypeError"),
    ],
)
def test_no_wrong_ddp_loop_passes(answer, hint, client):
    with by_value(), pytest.raises(NotYet, match=hint):
        distributed_training.check_fit_together(answer, fit, client)


@pytest.mark.parametrize("how", [{}, {"share": "blocks"}, {"returned": "wrapped"}])
def test_a_right_ddp_loop_passes_however_it_shares(how, client, capsys):
    with by_value():
        distributed_training.check_fit_together(together(**how), fit, client)
    assert capsys.readouterr().out == "Correct. Every rank ends with the weights of one process.\n"


def accuracy_by(reduce):
    def global_accuracy(n_right, n_images):
        return reduce(torch.tensor([n_right, n_images], dtype=torch.float64))

    return global_accuracy


def over_all(sums):
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def mean_of_the_ranks(sums):
    accuracy = sums[0] / sums[1]
    dist.all_reduce(accuracy)
    return (accuracy / dist.get_world_size()).item()


def rights_alone(sums):
    dist.all_reduce(sums)
    return sums[0].item()


def on_rank_0_alone(sums):
    dist.reduce(sums, 0)
    return (sums[0] / sums[1]).item()


@pytest.mark.parametrize(
    ("reduce", "hint"),
    [
        (lambda sums: None, "returns None"),
        (lambda sums: (sums[0] / sums[1]).item(), "3 of 4, 4 of 8"),
        (mean_of_the_ranks, "0.625 is the mean"),
        (rights_alone, "divide two sums"),
        (on_rank_0_alone, "one number"),
        (lambda sums: sums, "cannot read|raised"),
    ],
)
def test_no_wrong_accuracy_passes(reduce, hint, client):
    with by_value(), pytest.raises(NotYet, match=hint):
        distributed_training.check_global_accuracy(accuracy_by(reduce), client)


@pytest.mark.parametrize("as_type", [float, torch.as_tensor])
def test_the_accuracy_over_all_images_passes(as_type, client):
    with by_value():
        distributed_training.check_global_accuracy(accuracy_by(lambda sums: as_type(over_all(sums))), client)
