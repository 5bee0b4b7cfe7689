"""Checks of notebook 06 · Distributed training."""

from collections.abc import Callable

import torch
from distributed import Client

from workshop_utils import ddp
from workshop_utils.exercises import Answer, NotYet, exercise, expect, passed, unanswered, which_mistake

IMAGES_A_RANK = 4  # a rank's images of each batch in `check_fit_together`
EXACT = 1e-9  # the order of sums changes float64 weights by less


@exercise
def check_fit_together(answer: Answer, fit: Callable, client: Client) -> None:
    expect(callable(answer), "fit_together should be a function.")
    expect(not _does_what(answer, fit), "fit_together still does what fit does: nothing has changed yet.")
    n_ranks = len(client.nthreads())
    batch_size = IMAGES_A_RANK * n_ranks
    images = torch.rand(3 * batch_size, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    images[:, 0] = torch.arange(len(images)) / len(images)  # identifies each image
    labels = torch.arange(len(images)) % 3
    one_batch = images[:batch_size], labels[:batch_size], batch_size

    # One step of SGD moves the weights in proportion to the gradient, so it also shows a wrong scale.
    [(first, _)], [(target, whole)] = (_on_ranks(client, fit, *one_batch, n, n_workers=1) for n in (0, 1))
    ranks = _on_ranks(client, answer, *one_batch, 1)
    for weights, _ in ranks:
        expect(weights.keys() == target.keys(), f"return the weights as fit does, a dict with {', '.join(target)}.")
    _expect_shares([seen for _, seen in ranks], whole[0], n_ranks)
    expect(
        all(_apart(weights, ranks[0][0]) <= EXACT for weights, _ in ranks),
        "the ranks end with different weights: nothing averages their gradients. Is the model wrapped?",
    )
    expect(_apart(ranks[0][0], target) <= EXACT, _wrong_step(first, ranks[0][0], target))
    [(target, _)] = _on_ranks(client, fit, images, labels, batch_size, 2, n_workers=1)
    apart = max(_apart(weights, target) for weights, _ in _on_ranks(client, answer, images, labels, batch_size, 2))
    expect(apart <= EXACT, f"the first step is right; after 2 epochs of 3 steps a weight differs by {apart:.1e}.")
    passed("Every rank ends with the weights of one process.")


@exercise
def check_global_accuracy(answer: Answer, client: Client) -> None:
    def on_each_rank():
        import torch.distributed as dist

        rank = dist.get_rank()
        n_right, n_images = 3 + rank, 4 * (rank + 1)
        return answer(n_right, n_images), n_right, n_images

    try:
        ranks = ddp.run(client, on_each_rank, backend="gloo", timeout=30)
    except TimeoutError:
        raise NotYet("the ranks wait for each other: each of them has to call all_reduce, equally often.") from None
    given, n_right, n_images = zip(*ranks, strict=True)
    expect(None not in given, "global_accuracy returns None; return the accuracy as a number.")
    found = [float(value) for value in given]
    about = f"the ranks had {', '.join(f'{a} of {b}' for a, b in zip(n_right, n_images, strict=True))} right"
    mean = sum(a / b for a, b in zip(n_right, n_images, strict=True)) / len(ranks)
    expect(max(found) - min(found) < 1e-6, f"{about} and returned {found}: it should be one number.")
    mistakes = {f"{about}; {found[0]:.3f} is the mean of their accuracies: add up right ones, and images.": mean}
    otherwise = f"{about}, and returned {found[0]:.3f}: divide two sums."
    hint = which_mistake(lambda wrong: abs(found[0] - wrong) < 1e-6, mistakes, otherwise)
    expect(abs(found[0] - sum(n_right) / sum(n_images)) < 1e-6, hint)
    passed("One number on every rank, and each image counts once.")


def _on_ranks(client, function, images, labels, batch_size, n_epochs, n_workers=None):
    """Return for each rank (weights, without a wrapper's prefix; numbers of the images of each forward pass)."""

    def on_each_rank():
        import torch

        seen = []

        def note(layer, inputs):
            if getattr(layer, "in_features", None) == 8:
                seen.append((inputs[0][:, 0] * n_images).round().int().tolist())

        hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
        try:
            weights = function(images, labels, batch_size, n_epochs)
        finally:
            hook.remove()
        found = weights.items() if isinstance(weights, dict) else ()  # a wrapped model could not be sent back
        return {name.removeprefix("module."): weight for name, weight in found}, seen

    n_images = 3 * batch_size  # the images of all batches, even where `images` is the first batch alone
    try:
        return ddp.run(client, on_each_rank, n_workers=n_workers, backend="gloo", timeout=30)
    except TimeoutError:
        raise NotYet("the ranks wait for each other: all of them have to take the same number of steps.") from None


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
