"""Notebook 06: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import sys
from functools import partial

import cloudpickle
import torch
import torch.distributed as dist
from answers import judged
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from workshop_utils.exercises import distributed_training

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's functions: the workers cannot import it


def fit_on_a_rank(
    model,
    images,
    labels,
    batch_size,
    n_epochs,
    *,
    wrap=DistributedDataParallel,
    call=lambda model: model,
    cut=lambda x, rank, world_size, part: x[rank::world_size],
    cut_labels=None,
    divide_by=lambda x, batch_size, world_size: batch_size / world_size,
    pieces=1,
    drop_last=False,
    zero_grad=True,
    after_backward=lambda model: None,
    returned=lambda model: model.module.state_dict(),
):
    """Train as `fit`, on the ranks: right by default, and else wrong in one way."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    part = batch_size // world_size
    for _ in range(n_epochs):
        for start in range(0, len(images) - drop_last * (batch_size - 1), batch_size):
            x, y = images[start : start + batch_size], labels[start : start + batch_size]
            x, y = cut(x, rank, world_size, part), (cut_labels or cut)(y, rank, world_size, part)
            for piece in range(pieces):
                a, b = x[piece::pieces], y[piece::pieces]
                total = cross_entropy(call(model)(a), b, reduction="sum")
                (total / divide_by(a, batch_size, world_size)).backward()
                after_backward(model)
                optimizer.step()
                if zero_grad:
                    optimizer.zero_grad()
    return returned(model)


def together(**changes):
    return partial(fit_on_a_rank, **changes)


def as_arrays(model):
    return {name: value.numpy() for name, value in model.module.state_dict().items()}


def blocks(x, rank, world_size, part):
    return x[rank * part : (rank + 1) * part]


def a_block_of_the_set(x, rank, world_size):
    n = len(x) // world_size
    return x[rank * n : (rank + 1) * n]


def its_images(x, batch_size, world_size):
    return len(x)


def the_mean(x, batch_size, world_size):  # loss = cross_entropy(model(x), y) * len(x) * world_size / batch_size
    return batch_size / world_size * torch.tensor(1.0 * len(x)) / len(x)


def in_smaller_batches(model, images, labels, batch_size, n_epochs):
    def everything(x, rank, world_size, part):
        return x

    return fit_on_a_rank(model, images, labels, batch_size // dist.get_world_size(), n_epochs, cut=everything)


def of_a_part_of_the_set(cut):
    """Return a `fit_together` that cuts the whole set, not each batch."""

    def fit_together(model, images, labels, batch_size, n_epochs):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = [cut(each, rank, world_size) for each in (images, labels)]
        part = batch_size // world_size
        return fit_on_a_rank(model, *mine, part, n_epochs, cut=lambda x, *others: x, divide_by=lambda *others: part)

    return fit_together


def with_a_sampler(model, images, labels, batch_size, n_epochs):
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    dataset = TensorDataset(images, labels)
    part = batch_size // dist.get_world_size()
    for _ in range(n_epochs):
        for x, y in DataLoader(dataset, part, sampler=DistributedSampler(dataset, shuffle=False)):
            (cross_entropy(model(x), y, reduction="sum") / part).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.module.state_dict()


def without_a_pass_of_nothing(model, images, labels, batch_size, n_epochs):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(n_epochs):
        for start in range(0, len(images), batch_size):
            x = images[start : start + batch_size][rank::world_size]
            y = labels[start : start + batch_size][rank::world_size]
            optimizer.zero_grad()
            if len(x):
                (cross_entropy(model(x), y, reduction="sum") / batch_size).backward()
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                dist.all_reduce(weight.grad)
            optimizer.step()
    return model.state_dict()


def with_new_weights(model):
    torch.manual_seed(1)
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return DistributedDataParallel(model)


def sum_gradients(model):
    for weight in model.parameters():
        dist.all_reduce(weight.grad)


unwrapped = {"wrap": lambda model: model, "returned": lambda model: model.state_dict()}

test_fit_together = judged(
    lambda answer, client: distributed_training.check_fit_together(answer, client),
    (together(), "Correct"),
    (together(cut=blocks), "Correct"),
    (together(divide_by=the_mean), "Correct"),
    (together(**unwrapped, divide_by=lambda x, size, world: size, after_backward=sum_gradients), "Correct"),
    (without_a_pass_of_nothing, "Correct"),
    (together(cut=lambda x, rank, world, part: x.chunk(world)[rank]), "IndexError.*tensor_split"),
    (together(cut=lambda x, rank, world, part: x[[rank * part + i for i in range(part)]]), "IndexError.*beyond"),
    (together(cut=lambda x, rank, world, part: x.tensor_split(world)[rank]), "Correct"),
    (distributed_training.given_fit_together, "one image in 2"),
    (together(returned=lambda model: None), "0.weight"),
    (together(cut=lambda x, *others: x), "one image in 2"),
    (in_smaller_batches, r"1 in the given loop, \[2, 2\] on your ranks"),
    (together(cut=lambda x, rank, world, part: x[:part]), "same images"),
    (together(cut=lambda x, rank, world, part: x[rank : rank + part]), "on no rank"),
    (together(cut=lambda x, rank, world, part: x[rank * (part - 1) : (rank + 1) * part]), "an image is there twice"),
    (together(cut=lambda x, rank, *others: x[: len(x) * (1 - rank)]), "nothing to do"),
    (together(cut_labels=blocks), "does each image keep its label"),
    (together(**unwrapped), "different weights.*wrapped"),
    (together(call=lambda model: model.module), "different weights.*the wrapper that you call"),
    (together(returned=lambda model: model.state_dict()), "begin with 'module.'"),
    (together(returned=as_arrays), "each is a tensor"),
    (together(divide_by=lambda x, size, world: size), "0.5 times.*divide"),
    (together(divide_by=its_images), "last batch of 1 image.*divides by batch_size"),
    (together(wrap=with_new_weights), "begin with the given weights"),
    (together(pieces=2), r"2, 2"),
    (together(drop_last=True), r"\[16\] on no rank"),
    (together(zero_grad=False), "after 2 epochs"),
    (of_a_part_of_the_set(a_block_of_the_set), "not the whole set"),
    (with_a_sampler, r"\[0\] on top"),
)


def mean_that_everybody_joins(n_right, n_images):
    accuracy = torch.tensor(n_right / max(1, n_images))
    dist.all_reduce(accuracy)
    return (accuracy / dist.get_world_size()).item()


def sums_that_a_rank_without_images_leaves(n_right, n_images):
    return accuracy_by(lambda sums: sums[0] / sums[1])(n_right, n_images) if n_images else 0.0


def divided_first(n_right, n_images):
    return accuracy_by(lambda sums: sums[0] / sums[1])(n_right / n_images * n_images, n_images)


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
    lambda answer, client: distributed_training.check_global_accuracy(answer, client),
    (by_objects, "Correct"),
    (accuracy_by(lambda sums: round((sums[0] / sums[1]).item(), 2)), "Correct"),
    (distributed_training.given_global_accuracy, "is the mean of their accuracies"),
    (lambda n_right, n_images: None, "should return one number, not None"),
    (lambda n_right, n_images: n_right / max(1, n_images), "3 of 4, 4 of 8 right, they return 0.750, 0.500"),
    (mean_that_everybody_joins, "0.625, 0.625 is the mean"),
    (sums_that_a_rank_without_images_leaves, "0 of 0, 1 of 4.*on every rank, the same number"),
    (divided_first, "0 of 0, 1 of 4.*divides by zero"),
    (accuracy_by(lambda sums: sums[0].item()), "number of right ones"),
    (accuracy_by(lambda sums: 100 * sums[0] / sums[1]), "between 0 and 1"),
    (accuracy_by(lambda sums: sums[0] / sums[1] / 3), "divide the sum"),
    (accuracy_by(lambda sums: sums), "one number, not tensor"),
)
