"""Checks of notebook 09 · Horovod."""

import os
import tempfile
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial

import torch
from torch.nn.functional import cross_entropy

import daskrun
from daskrun.horovod import available
from workshop_utils.checkpoint import WeightsError, load_checkpoint, save_checkpoint
from workshop_utils.exercises import (
    Answer,
    Function,
    NotYet,
    exercise,
    expect,
    expect_equal,
    expect_type,
    passed,
    shown,
)
from workshop_utils.exercises.horovod_stand_in import END, WAITING, in_threads
from workshop_utils.shared import new_shared_folder

IMAGES_A_STEP = 1680  # divisible by 1 to 8, 10, 12, 14, 15 and 16 ranks
STOPPED_AFTER, N_STEPS = 5, 10
CLOSE = 1e-4  # equal losses may differ by so much
STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")  # of BatchNorm in with_statistics()
CASES: tuple[tuple[str, ...], ...] = ((), ("0.bias",), STATISTICS, ("1.running_var", "3.weight"))  # what differs


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a step's images, (n, 8) float32, and labels, (n,) int64; n is 1680 / size."""
    drawn = torch.Generator().manual_seed(step)
    # Sorted labels: ranks that do not average drift apart.
    labels = torch.randint(3, (IMAGES_A_STEP,), generator=drawn).sort()[0]
    images = torch.randn(IMAGES_A_STEP, 8, generator=drawn) + 2 * torch.eye(3, 8)[labels]
    return images.tensor_split(size)[rank], labels.tensor_split(size)[rank]


def train_alone(folder: str | os.PathLike, seed: int = 0) -> list[float]:
    """Train ten steps in this process; return the loss of each.

    After five steps, it writes a checkpoint that rank 0 alone finds: `of-rank-0.pt` in `folder`.
    """
    model, optimizer = _begin(seed)
    losses = _steps(model, optimizer, range(STOPPED_AFTER))
    save_checkpoint(f"{folder}/of-rank-0.pt", model=model.state_dict(), optimizer=optimizer.state_dict())
    return losses + _steps(model, optimizer, range(STOPPED_AFTER, N_STEPS))


def go_on(resume: Callable, folder: str) -> dict:
    """Return the losses of steps 6 to 10, averaged over ranks, of a job that goes on as `resume` prepares it.

    A rank's path ends in its number, and there is a file for rank 0 only, as if each had a disk of its own.
    """
    import horovod.torch as hvd

    rank, size = hvd.rank(), hvd.size()
    model, optimizer = _begin(seed=100 + rank)
    optimizer = resume(f"{folder}/of-rank-{rank}.pt", model, optimizer)
    if not all(hvd.allgather_object(isinstance(optimizer, torch.optim.Optimizer), name=END)):
        return {"losses": None, "returned": shown(optimizer)}
    losses = []
    for step in range(STOPPED_AFTER, N_STEPS):
        images, labels = batch(step, rank, size)
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return {"losses": losses, "averages": hasattr(optimizer, "synchronize")}


def given_resume(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    # The exercise asks to repair this; the notebook's stub repeats it.
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if hvd.rank() == 0:
        saved = load_checkpoint(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    return hvd.DistributedOptimizer(optimizer, model.named_parameters())


@exercise
def check_resume(resume: Function, client: Answer) -> None:
    _in_both_places(client, _judge_resume, resume)
    passed("As if the run had never stopped: rank 0's weights and momentum are on all ranks, in the right optimiser.")


def _judge_resume(on_ranks, folder, resume):
    expected = train_alone(folder, seed=1)[STOPPED_AFTER:]
    try:
        answers = on_ranks(go_on, resume, folder)
    except (WeightsError, FileNotFoundError) as error:
        raise NotYet(
            f"resume looks for a file that is not there ({str(error).split(': ')[0]}). Only rank 0 finds the "
            "checkpoint: let rank 0 read it, and send to all what it has read."
        ) from None
    for rank, answer in enumerate(answers):
        about = f"on rank {rank}, resume returned {answer.get('returned')}"
        expect(answer["losses"], f"{about}: return the optimiser that makes the steps.")
    _compare(answers[0], expected, folder, len(answers))


def _compare(answer, expected, folder, size):
    losses = answer["losses"]
    expect_equal(
        losses[0],
        expected[0],
        f"the first loss, of step 6, is {losses[0]:.4f}, and that of the undisturbed run {expected[0]:.4f}. No "
        "optimiser has moved yet, so some rank has other weights than the checkpoint's: what did each rank load or "
        "receive, in which order?",
        within=CLOSE,
    )
    expect(answer["averages"], "nobody averages the gradients: return what hvd.DistributedOptimizer(...) returned.")
    large = f"too large, by the factor {size}: who divides by the size?"
    mistakes = {
        "The momentum is gone: look at the optimiser that was given the state, and at the one that steps.": (
            _resumed(folder, momentum=False)
        ),
        f"The gradients are {large}": _resumed(folder, scale=size),
        f"The momentum is gone, and the gradients are {large}": _resumed(folder, momentum=False, scale=size),
    }
    otherwise = "Is the checkpoint's momentum on all ranks, in the optimiser that steps? Is the rate unchanged?"
    about = (
        f"step 6 is right, but the losses of steps 7 to 10 are {_in_words(losses[1:])}, not {_in_words(expected[1:])}. "
    )
    expect_equal(losses, expected, otherwise, mistakes, within=CLOSE, about=about)


def _in_words(losses):
    return ", ".join(f"{loss:.4f}" for loss in losses)


def _begin(seed):
    model, drawn = torch.nn.Linear(8, 3), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=drawn) / 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _resumed(folder, momentum=True, scale=1.0):
    saved, (model, optimizer) = load_checkpoint(f"{folder}/of-rank-0.pt"), _begin(seed=0)
    model.load_state_dict(saved["model"])
    if momentum:
        optimizer.load_state_dict(saved["optimizer"])
    return _steps(model, optimizer, range(STOPPED_AFTER, N_STEPS), scale)


def _steps(model, optimizer, steps, scale=1.0):
    losses = []
    for step in steps:
        images, labels = batch(step)
        loss = cross_entropy(model(images), labels)
        (scale * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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
    _steps(model, torch.optim.SGD(model.parameters(), lr=0.1), range(40))
    return model.state_dict()


@exercise
def check_unequal(unequal: Function, client: Answer) -> None:
    _in_both_places(client, _judge_unequal, unequal)
    passed("The weights agree, and BatchNorm's statistics do not: share model.state_dict(), which has both.")


def _judge_unequal(on_ranks, _, unequal):
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


def _in_both_places(client, judge, answer):
    """Call judge(on_ranks, folder, answer) with threads for ranks, then with ranks on the cluster, if Horovod is built.

    on_ranks(function, *args): what the function returns on each rank. folder: one that all ranks see.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            judge(in_threads, folder, answer)  # shows at once who waits for whom, also if the cluster has one worker
        except NotYet:
            raise
        except Exception:
            if not available():
                raise
            # Horovod itself may have what the stand-in lacks; if not, its error is the better one.
    if available():
        judge(partial(_on_cluster, client), new_shared_folder(), answer)


def _on_cluster(client, function, *args):
    try:
        limits = {"timeout": 90, "wait_for_workers": 60}  # workers may be new
        return daskrun.run(client, function, *args, backend="horovod", **limits)
    except TimeoutError as error:
        raise NotYet(f"{error} {WAITING}") from None
