"""Checks of notebook 06 · Distributed training."""

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import daskrun
from workshop_utils.exercises import (
    Function,
    NotYet,
    exercise,
    expect,
    expect_equal,
    number,
    passed,
)
from workshop_utils.exercises.ranks import ask_ranks, run_on_ranks

if TYPE_CHECKING:  # as in `ranks`
    from distributed import Client

IMAGES_A_RANK = 4  # a rank's images of a whole batch in `check_fit_together`
EXACT = 1e-9  # the order of sums changes float64 weights by less
ROUNDED = 6e-3  # an accuracy may be rounded to two places


def given_fit_together(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, batch_size: int, n_epochs: int
) -> dict[str, torch.Tensor]:
    """Train in one process: the stub of exercise 1, and what all ranks together have to equal."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(n_epochs):
        batches = zip(images.split(batch_size), labels.split(batch_size))  # noqa: B905  as in the notebook
        for x, y in batches:
            loss = cross_entropy(model(x), y, reduction="sum") / batch_size
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def given_global_accuracy(n_right: int, n_images: int) -> float:
    """Return the mean of the ranks' accuracies: the stub of exercise 2."""
    if n_images == 0:
        return 0.0
    accuracy = torch.tensor(n_right / n_images)
    dist.all_reduce(accuracy)
    return (accuracy / dist.get_world_size()).item()


@partial(exercise, given=given_fit_together)
def check_fit_together(fit_together: Function, client: "Client") -> None:
    n_ranks = _n_ranks(client)
    batch_size = IMAGES_A_RANK * n_ranks

    # One step of SGD moves the weights in proportion to the gradient, so it also shows a wrong scale.
    found, target = _fit_both(client, fit_together, n_ranks, _data(batch_size), batch_size, 1)
    if not _equal(found, target):
        first, _ = _fit(given_fit_together, _data(batch_size), batch_size, 0)
        raise NotYet(_wrong_step(first, found, target))

    found, target = _fit_both(client, fit_together, n_ranks, _data(2 * batch_size + 1), batch_size, 2)
    if not _equal(found, target):
        found, target = _fit_both(client, fit_together, n_ranks, _data(1), batch_size, 1)
        expect(
            _equal(found, target),
            "whole batches are right, a last batch of 1 image is not: there, too, the given loop divides by "
            "batch_size, not by the number of images that are left.",
        )
        raise NotYet(
            "the first step is right, and after 2 epochs of 3 steps the weights differ from those of one process."
        )
    passed("Every rank ends with the weights of one process.")


@partial(exercise, given=given_global_accuracy)
def check_global_accuracy(global_accuracy: Function, client: "Client") -> None:
    ranks = range(_n_ranks(client))
    _expect_accuracy(client, global_accuracy, [3 + rank for rank in ranks], [4 * (rank + 1) for rank in ranks])
    if len(ranks) > 1:
        _expect_accuracy(client, global_accuracy, [rank for rank in ranks], [4 * rank for rank in ranks])
    passed("One number on every rank, and each image counts once.")


def _expect_accuracy(client, global_accuracy, n_right, n_images):
    """Expect the same accuracy over all images on every rank. n_right, n_images: a number for each rank."""
    of_ranks = list(zip(n_right, n_images, strict=True))
    about = f"where the ranks have {', '.join(f'{right} of {n}' for right, n in of_ranks)} right, "
    try:
        answers = ask_ranks(client, global_accuracy, of_ranks, about)
    except ZeroDivisionError:
        raise NotYet(f"{about}one divides by zero: add up over the ranks first, then divide.") from None
    found = [number(answer, "global_accuracy should return one number") for answer in answers]
    expect(all(value == value for value in found), f"{about}you return nan: add up first, then divide.")
    shown = ", ".join(f"{value:.3f}" for value in found)
    expect(max(found) - min(found) < ROUNDED, f"{about}they return {shown}: it should be one number on all of them.")
    right = sum(n_right) / sum(n_images)
    of_each = [right / n for right, n in of_ranks if n]
    mean = f"{shown} is the mean of their accuracies: a rank with few images counts as much as one with many."
    mistakes = {
        mean: sum(of_each) / len(of_each),
        f"{mean} One without images counts, too.": sum(of_each) / len(n_images),
        f"you return {shown}, the number of right ones: divide it by the number of images.": sum(n_right),
        f"you return {shown}, which is in percent: return a number between 0 and 1.": 100 * right,
    }
    otherwise = f"you return {shown}: divide the sum of the right ones by the sum of the images."
    expect_equal(found[0], right, otherwise, mistakes, within=ROUNDED, about=about)


def _n_ranks(client):
    """Return how many ranks a launch on all workers has."""
    return len(daskrun.run(client, int, backend="gloo"))


def _data(n_images):
    """Return (images, labels) for `fit_together`; the first number of an image identifies it."""
    images = torch.rand(n_images, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    images[:, 0] = torch.arange(n_images) / 1000
    return images, torch.arange(n_images) % 3


def _small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def _fit(function, data, batch_size, n_epochs):
    """Return (weights, numbers of the images of each forward pass) of one process or rank."""
    seen = []

    def note(layer, inputs):
        if getattr(layer, "in_features", None) == 8:
            seen.append((inputs[0][:, 0] * 1000).round().int().tolist())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        with torch.random.fork_rng(devices=[]):
            weights = function(_small_net(), *data, batch_size, n_epochs)
    finally:
        hook.remove()
    found = weights.items() if isinstance(weights, dict) else ()  # a wrapped model could not be sent back
    return dict(found), seen


def _fit_both(client, fit_together, n_ranks, data, batch_size, n_epochs):
    """Return the weights of all ranks, and those of one process; expect shared batches and equal weights."""
    n_images = len(data[0])
    about = f"with {n_images} images in batches of {batch_size}, "
    if n_images % batch_size:
        about += f"the last of {n_images % batch_size}, "
    target, whole = _fit(given_fit_together, data, batch_size, n_epochs)
    try:
        ranks = run_on_ranks(client, _fit, fit_together, data, batch_size, n_epochs, n_workers=n_ranks, about=about)
    except IndexError as error:
        cure = "does a rank take images beyond those of the batch?"
        if "tuple" in str(error):
            cure = "`chunk` may give fewer parts than there are ranks; `tensor_split` gives each one, some empty."
        raise NotYet(f"{about}fit_together raised IndexError: {error}: {cure}") from None
    for weights, _ in ranks:
        expect(
            not any(name.startswith("module.") for name in weights),
            "the names begin with 'module.', which the network doesn't know: return the state of the network "
            "inside the wrapper.",
        )
        expect(weights.keys() == target.keys(), f"return the weights as given, a dict with {', '.join(target)}.")
        expect(all(map(torch.is_tensor, weights.values())), "return the weights as given: each is a tensor.")
    _expect_shares([seen for _, seen in ranks], whole, batch_size)
    found = ranks[0][0]
    expect(
        all(_equal(weights, found) for weights, _ in ranks),
        f"{about}the ranks end with different weights: nothing averages their gradients. Is the model wrapped, and is "
        "it the wrapper that you call?",
    )
    return found, target


def _expect_shares(seen, whole, batch_size):
    """Expect that in each step the ranks share a batch of the given loop.

    seen: for each rank, the images of each of its forward passes. whole: the images of each pass of the given loop.
    """
    seen = [_with_skipped(batches, whole, len(seen)) for batches in seen]
    n_passes = [len(batches) for batches in seen]
    expect(
        set(n_passes) == {len(whole)},
        f"calls of the network: {len(whole)} in the given loop, {n_passes} on your ranks. Cut each batch, not the "
        "whole set, and let each rank call the network once for each batch, with its own part.",
    )
    for step, batch in enumerate(whole):
        parts = [sorted(batches[step]) for batches in seen]
        _expect_parts(
            parts, sorted(batch), f"step {step + 1} of the given loop takes images {min(batch)} to {max(batch)}; "
        )
        if len(batch) == batch_size:
            expect(all(parts), f"of a whole batch, the ranks take {parts}: one of them has nothing to do.")


def _with_skipped(batches, whole, n_ranks):
    """Return a rank's passes, with an empty one where it may have skipped a batch that has no image for it."""
    left, passes = list(batches), []
    for batch in whole:
        skipped = len(batch) < n_ranks and not (left and set(left[0]) <= set(batch))
        passes += [[]] if skipped else left[:1]
        left = left if skipped else left[1:]
    passes += left
    return passes if len(passes) == len(whole) else batches


def _expect_parts(parts, batch, about):
    n_ranks = len(parts)
    if n_ranks > 1:
        expect(
            any(part != batch for part in parts),
            f"every rank computes the whole batch: give each rank its own part, one image in {n_ranks}.",
        )
        differ = not any(parts) or any(part != parts[0] for part in parts)
        expect(differ, f"every rank takes the same images, {parts[0]}: let its rank choose.")
    together = sorted(image for part in parts for image in part)
    others, missing = sorted(set(together) - set(batch)), sorted(set(batch) - set(together))
    about += f"your ranks take {parts}"
    expect(not (others and missing), f"{about}. Take each batch as given, and cut that, not the whole set.")
    expect(not others, f"{about}: {others} on top. (A DistributedSampler repeats images until each rank has as many.)")
    expect(not missing, f"{about}: {missing} on no rank.")
    expect(together == batch, f"{about}: an image is there twice.")


def _wrong_step(first, found, target):
    """Say how `found`, the weights after one step from `first`, differ from `target`, those of one process."""
    moved, wanted = (torch.cat([(after[name] - first[name]).ravel() for name in first]) for after in (found, target))
    scale = (moved @ wanted / (wanted @ wanted)).item()
    if torch.allclose(moved, scale * wanted, atol=EXACT):
        return (
            f"after one step the weights have moved {scale:.3g} times as far as those of one process. "
            "DDP takes the mean over the ranks; what does the loss divide by, and is the rate the given one?"
        )
    return (
        "after one step the weights differ from those of one process, and not by a factor: do the ranks begin "
        "with the given weights, does each image keep its label, and is the loss the given one?"
    )


def _equal(weights, others):
    return all(torch.allclose(weights[name], others[name], rtol=0, atol=EXACT) for name in others)
