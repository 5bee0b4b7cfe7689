"""Checks of notebook 06 · Distributed training."""

from collections.abc import Callable

import torch
from distributed import Client

import daskrun
from workshop_utils.exercises import (
    Function,
    NotYet,
    exercise,
    expect,
    expect_equal,
    number,
    passed,
    unanswered,
)
from workshop_utils.exercises.ranks import ask_ranks, run_on_ranks

IMAGES_A_RANK = 4  # a rank's images of each batch in `check_fit_together`
EXACT = 1e-9  # the order of sums changes float64 weights by less
ROUNDED = 6e-3  # an accuracy may be rounded to two places


@exercise
def check_fit_together(fit_together: Function, fit: Callable, client: Client) -> None:
    expect(not _does_what(fit_together, fit), "fit_together still does what fit does: nothing has changed yet.")
    n_ranks = _n_ranks(client)
    batch_size, n_last = IMAGES_A_RANK * n_ranks, n_ranks + 1
    images = torch.rand(2 * batch_size + n_last, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    images[:, 0] = torch.arange(len(images)) / 1000  # identifies each image
    labels = torch.arange(len(images)) % 3
    one_batch = images[:batch_size], labels[:batch_size], batch_size
    short_batch = images[-n_last:], labels[-n_last:], batch_size

    # One step of SGD moves the weights in proportion to the gradient, so it also shows a wrong scale.
    [(first, _)], [(target, whole)] = (_fit_on_ranks(client, fit, *one_batch, n, n_workers=1) for n in (0, 1))
    ranks = _fit_on_ranks(client, fit_together, *one_batch, 1, n_workers=n_ranks)
    for weights, _ in ranks:
        expect(
            not any(name.startswith("module.") for name in weights),
            "the names begin with 'module.', which fit's network does not know: return the state of the network "
            "inside the wrapper.",
        )
        expect(weights.keys() == target.keys(), f"return the weights as fit does, a dict with {', '.join(target)}.")
    _expect_shares([seen for _, seen in ranks], whole[0], n_ranks)
    expect(
        all(_apart(weights, ranks[0][0]) <= EXACT for weights, _ in ranks),
        "the ranks end with different weights: nothing averages their gradients. Is the model wrapped?",
    )
    expect(_apart(ranks[0][0], target) <= EXACT, _wrong_step(first, ranks[0][0], target))

    [(target, whole)] = _fit_on_ranks(client, fit, images, labels, batch_size, 2, n_workers=1)
    ranks = _fit_on_ranks(client, fit_together, images, labels, batch_size, 2, n_workers=n_ranks)
    _expect_same_batches([seen for _, seen in ranks], whole)
    if not all(_apart(weights, target) <= EXACT for weights, _ in ranks):
        [(target, _)] = _fit_on_ranks(client, fit, *short_batch, 1, n_workers=1)
        short, _ = _fit_on_ranks(client, fit_together, *short_batch, 1, n_workers=n_ranks)[0]
        expect(
            _apart(short, target) <= EXACT,
            f"whole batches are right, a last batch of {n_last} images is not: there, too, fit divides by batch_size, "
            "not by the number of images that are left.",
        )
        raise NotYet("the first step is right, and after 2 epochs of 3 steps the weights differ from fit's.")
    passed("Every rank ends with the weights of one process.")


@exercise
def check_global_accuracy(global_accuracy: Function, given: Callable, client: Client) -> None:
    expect(
        not _does_what(global_accuracy, given),
        "global_accuracy still does what reported does: nothing has changed yet.",
    )
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
    """Return how many ranks a launch on all workers has, also while one that an earlier answer killed starts again."""
    return len(daskrun.run(client, int, backend="gloo"))


def _fit_on_ranks(client, function, images, labels, batch_size, n_epochs, n_workers):
    """Return for each rank (weights; numbers of the images of each forward pass)."""

    def on_each_rank():
        import torch

        seen = []

        def note(layer, inputs):
            if getattr(layer, "in_features", None) == 8:
                seen.append((inputs[0][:, 0] * 1000).round().int().tolist())

        hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
        try:
            weights = function(images, labels, batch_size, n_epochs)
        finally:
            hook.remove()
        found = weights.items() if isinstance(weights, dict) else ()  # a wrapped model could not be sent back
        return dict(found), seen

    return run_on_ranks(client, on_each_rank, n_workers=n_workers)


def _expect_shares(seen, whole, n_ranks):
    mine = [sorted(image for batch in batches for image in batch) for batches in seen]
    if n_ranks > 1:
        expect(
            any(one != sorted(whole) for one in mine),
            f"every rank computes the whole batch: give each rank its own part, one image in {n_ranks}.",
        )
        same = all(one == mine[0] for one in mine)
        expect(not same, f"every rank takes the same images, {mine[0]}: let its rank choose.")
    for image in sorted(whole):
        expect(any(image in one for one in mine), f"image {image} of a batch is on no rank.")
    expect(sum(map(len, mine)) == len(whole), f"the ranks take {mine}: an image is there twice.")
    n_steps = [len(batches) for batches in seen]
    expect(set(n_steps) == {1}, f"for one batch of fit, the ranks take {n_steps} steps: each should take one.")


def _expect_same_batches(seen, whole):
    for step, batch in enumerate(whole):
        together = sorted(image for batches in seen for part in batches[step : step + 1] for image in part)
        expect(
            together == sorted(batch),
            f"step {step + 1} of fit takes images {min(batch)} to {max(batch)}; in theirs, your ranks together take "
            f"{together or 'none'}. Cut each batch, not the whole set.",
        )
    n_steps = [len(batches) for batches in seen]
    expect(set(n_steps) == {len(whole)}, f"fit takes {len(whole)} steps, your ranks take {n_steps}.")


def _wrong_step(first, found, target):
    """Say how the weights after one step, `found`, differ from fit's, `target`; both began at `first`."""
    moved, wanted = (torch.cat([(after[name] - first[name]).ravel() for name in first]) for after in (found, target))
    scale = (moved @ wanted / (wanted @ wanted)).item()
    if torch.allclose(moved, scale * wanted, atol=EXACT):
        return (
            f"after one step the weights have moved {scale:.3g} times as far as fit's. "
            "DDP takes the mean over the ranks; what does the loss divide by?"
        )
    return (
        "after one step the weights differ from fit's, and not by a factor: do all ranks begin with the "
        "same weights, and with fit's loss?"
    )


def _does_what(answer, fit):
    return unanswered(answer, given=fit) and unanswered(fit, given=answer)


def _apart(weights, others):
    return max((weights[name] - others[name]).abs().max().item() for name in others)
