"""Notebook 06: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import sys

import cloudpickle
import torch
import torch.distributed as dist
from answers import judged
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils.exercises import distributed_training

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's functions: the workers cannot import it


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


def together(*, wrap=True, share="strided", divide_by="share", seed=0, returned="module", steps=1, no_zero_grad=False):
    """Return a `fit_together` that is right by default, and else wrong in one way."""

    def fit_together(images, labels, batch_size, n_epochs):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
        model = DistributedDataParallel(model) if wrap else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        part = batch_size // world_size
        if share == "set":
            mine = len(images) // world_size
            images, labels = (each[rank * mine :][:mine] for each in (images, labels))
            batch_size = part
        for _ in range(n_epochs):
            for start in range(0, len(images), batch_size):
                x, y = images[start : start + batch_size], labels[start : start + batch_size]
                mine = {
                    "strided": slice(rank, None, world_size),
                    "blocks": slice(rank * part, (rank + 1) * part),
                    "all": slice(None),
                    "set": slice(None),
                    "first": slice(0, part),
                    "overlapping": slice(rank, rank + part),
                    "one twice": slice(rank * (part - 1), (rank + 1) * part),
                }
                x, y = x[mine[share]], y[mine[share]]
                for piece in range(steps):
                    a, b = x[piece::steps], y[piece::steps]
                    total = cross_entropy(model(a), b, reduction="sum")
                    loss = total / {"share": batch_size / world_size, "part": len(a), "batch": batch_size}[divide_by]
                    loss.backward()
                    optimizer.step()
                    if not no_zero_grad:
                        optimizer.zero_grad()
        if returned == "module":
            return (model.module if wrap else model).state_dict()
        return {"wrapped": model.state_dict(), "nothing": None}[returned]

    return fit_together


test_fit_together = judged(
    lambda answer, client: distributed_training.check_fit_together(answer, fit, client),
    (together(), "Correct"),
    (together(share="blocks"), "Correct"),
    (fit, "nothing has changed"),
    (together(returned="nothing"), "0.weight"),
    (together(share="all"), "one image in 2"),
    (together(share="first"), "same images"),
    (together(share="overlapping"), "on no rank"),
    (together(share="one twice"), "an image is there twice"),
    (together(wrap=False), "different weights.*wrapped"),
    (together(returned="wrapped"), "begin with 'module.'"),
    (together(divide_by="batch"), "0.5 times.*divide"),
    (together(divide_by="part"), "last batch of 3 images.*divides by batch_size"),
    (together(divide_by="part", share="blocks"), "last batch of 3 images"),  # rank 1 divides by 0
    (together(seed=1), "begin with the same"),
    (together(steps=2), r"2, 2"),
    (together(no_zero_grad=True), "after 2 epochs"),
    (together(share="set", divide_by="batch"), r"step 1 of fit takes images 0 to 7; .* \[0, 1, 2, 3, 9, 10, 11, 12\]"),
)


def reported(n_right, n_images):
    if n_images == 0:
        return 0.0
    accuracy = torch.tensor(n_right / n_images)
    dist.all_reduce(accuracy)
    return (accuracy / dist.get_world_size()).item()


def mean_that_everybody_joins(n_right, n_images):
    accuracy = torch.tensor(n_right / max(1, n_images))
    dist.all_reduce(accuracy)
    return (accuracy / dist.get_world_size()).item()


def sums_that_a_rank_without_images_leaves(n_right, n_images):
    return accuracy_by(lambda sums: sums[0] / sums[1])(n_right, n_images) if n_images else 0.0


def divided_first(n_right, n_images):
    return accuracy_by(lambda sums: sums[0] / sums[1])(n_right / n_images * n_images, n_images)


def nan_first(n_right, n_images):
    sums = torch.tensor([n_right, n_images], dtype=torch.float64)
    weighted = sums[0] / sums[1] * sums[1]
    dist.all_reduce(weighted)
    dist.all_reduce(sums)
    return weighted / sums[1]


def accuracy_by(read):
    def global_accuracy(n_right, n_images):
        sums = torch.tensor([n_right, n_images], dtype=torch.float64)
        dist.all_reduce(sums)
        return read(sums)

    return global_accuracy


def by_objects(n_right, n_images):
    pairs = [None] * dist.get_world_size()
    dist.all_gather_object(pairs, (n_right, n_images))
    return sum(right for right, _ in pairs) / sum(n for _, n in pairs)


test_global_accuracy = judged(
    lambda answer, client: distributed_training.check_global_accuracy(answer, reported, client),
    (by_objects, "Correct"),
    (accuracy_by(lambda sums: round((sums[0] / sums[1]).item(), 2)), "Correct"),
    (reported, "nothing has changed"),
    (lambda n_right, n_images: None, "should return one number, not None"),
    (lambda n_right, n_images: n_right / max(1, n_images), "3 of 4, 4 of 8 right, they return 0.750, 0.500"),
    (mean_that_everybody_joins, "0.625, 0.625 is the mean"),
    (sums_that_a_rank_without_images_leaves, "0 of 0, 1 of 4.*on every rank, equally often"),
    (divided_first, "0 of 0, 1 of 4.*divides by zero"),
    (nan_first, "0 of 0, 1 of 4.*nan"),
    (accuracy_by(lambda sums: sums[0].item()), "number of right ones"),
    (accuracy_by(lambda sums: 100 * sums[0] / sums[1]), "between 0 and 1"),
    (accuracy_by(lambda sums: sums[0] / sums[1] / 3), "divide the sum"),
    (accuracy_by(lambda sums: sums), "one number, not tensor"),
)
