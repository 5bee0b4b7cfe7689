"""Checks of notebook 09 · Horovod."""

from collections.abc import Iterable
from copy import deepcopy
from functools import partial

import torch
from torch.nn.functional import cross_entropy

import daskrun
from workshop_utils.exercises import (
    Answer,
    Function,
    NotYet,
    exercise,
    expect,
    expect_type,
    passed,
)
from workshop_utils.exercises.horovod_stand_in import END, WAITING, in_threads
from workshop_utils.horovod import available, with_horovod

IMAGES_A_STEP = 1680  # divisible by 1 to 8, 10, 12, 14, 15 and 16 ranks
STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")  # of BatchNorm in with_statistics()
CASES: tuple[tuple[str, ...], ...] = ((), ("0.bias",), STATISTICS, ("1.running_var", "3.weight"))  # what differs


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a step's images, (n, 8) float32, and labels, (n,) int64; n is 1680 / size."""
    drawn = torch.Generator().manual_seed(step)
    # Sorted labels: ranks that do not average drift apart.
    labels = torch.randint(3, (IMAGES_A_STEP,), generator=drawn).sort()[0]
    images = torch.randn(IMAGES_A_STEP, 8, generator=drawn) + 2 * torch.eye(3, 8)[labels]
    return images.tensor_split(size)[rank], labels.tensor_split(size)[rank]


def with_statistics(seed: int) -> torch.nn.Module:
    """Return a small model with BatchNorm, whose weights are drawn from `seed`."""
    linear, norm, last = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight, scale in ((linear.weight, 1), (linear.bias, 10), (last.weight, 1), (last.bias, 1)):
            weight.copy_(scale * torch.randn(weight.shape, generator=drawn))  # far from 0: statistics matter
    return torch.nn.Sequential(linear, norm, torch.nn.ReLU(), last)


def trained_state() -> dict[str, torch.Tensor]:
    """Return the state of `with_statistics`, trained for 40 steps in this process."""
    model = with_statistics(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        images, labels = batch(step)
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@exercise
def check_unequal(unequal: Function, client: Answer) -> None:
    _in_both_places(client, unequal)
    passed("The weights agree, and BatchNorm's statistics do not: share model.state_dict(), which has both.")


def _judge(on_ranks, unequal):
    for rank, found in enumerate(on_ranks(_differences, unequal)):
        for case, (names, overwrites) in zip(CASES, found, strict=True):
            _compare_names(rank, case, names, overwrites)


def _differences(unequal):
    """Return, for each case, what `unequal` finds on this rank, and whether it has changed the model.

    Names that are no list, such as those of a generator, come as a list.
    """
    import horovod.torch as hvd

    found = []
    for case, differ in enumerate(CASES):
        model = with_statistics(seed=100 + case)  # another each time: an answer has to ask rank 0
        if hvd.rank() > 0:
            for name in differ:
                _turn_around(model.state_dict()[name])
        before = deepcopy(model.state_dict())
        names = unequal(model)
        hvd.allgather_object(None, name=END)
        if isinstance(names, Iterable) and not isinstance(names, str):
            names = [str(name) for name in names]
        after = model.state_dict()
        overwrites = any(not torch.equal(tensor, after[name]) for name, tensor in before.items())
        found.append((names, overwrites))
    return found


def _turn_around(tensor):
    # The numbers stay the same, in another order, where they are not all equal: their sum does not tell.
    with torch.no_grad():
        tensor.copy_(tensor.flip(0) if tensor.dim() and (tensor != tensor.flip(0)).any() else tensor + 1)


def _compare_names(rank, case, names, overwrites):
    expect_type(names, list, "on every rank, unequal should return a list of names")
    unknown = set(names) - set(with_statistics(seed=0).state_dict())
    expect(not unknown, f"{sorted(unknown)} are no names: those in model.state_dict() look like '0.weight'.")
    if rank == 0:
        expect(not names, f"on rank 0, unequal found {sorted(set(names))}: rank 0 is not unlike itself.")
        return
    missed, too_many = set(case) - set(names), set(names) - set(case)
    hint = "Compare every tensor of model.state_dict() with the one that rank 0 sent, number by number."
    if overwrites:
        hint = "It overwrites this rank's tensors before it compares them: keep clones, or use hvd.broadcast_object."
    elif missed <= set(STATISTICS):
        hint = "BatchNorm's statistics are no parameters; model.state_dict() has them, too."
    expect(not missed, f"on rank {rank}, {sorted(missed)} differ, and unequal does not say so. {hint}")
    expect(not too_many, f"on rank {rank}, {sorted(too_many)} are equal to rank 0's.")


def _in_both_places(client, unequal):
    """Judge an answer on threads for ranks, then on the ranks of the cluster, if Horovod is built."""
    try:
        _judge(in_threads, unequal)  # shows at once who waits for whom, also if the cluster has one worker
    except NotYet:
        raise
    except Exception:
        if not available():
            raise
        # Horovod itself may have what the stand-in lacks; if not, its error is the better one.
    if available():
        _judge(partial(_on_cluster, client), unequal)


def _on_cluster(client, function, *args):
    try:
        # Workers may be new.
        return daskrun.run(client, with_horovod(function), *args, backend=None, time_limit=90, wait_for_workers=60)
    except TimeoutError as error:
        raise NotYet(f"{error} {WAITING}") from None
