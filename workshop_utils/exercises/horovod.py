"""Checks of notebook 09 · Horovod."""

import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from torch.nn.functional import cross_entropy

from workshop_utils import horovod
from workshop_utils.exercises import Answer, exercise, expect, passed, which_mistake
from workshop_utils.models import load_checkpoint, save_checkpoint
from workshop_utils.results import log_metrics

IMAGES_A_STEP = 1680  # divisible by 1 to 8, 10, 12, 14, 15 and 16 ranks
STOPPED_AFTER, N_STEPS = 5, 10
exercises = sys.modules[__name__]  # the notebook's name for this module, which given_resume repeats
_asked: list = []  # (step, rank, size) of each part that ranks in this process have taken


@exercise
def check_plan(plan: Answer) -> None:
    for size, accumulate in ((2, 1), (8, 1), (8, 4), (1, 1), (3, 2)):
        about = f"with {size} ranks and {accumulate} parts"
        images = 16 * size * accumulate
        answer = plan(size, accumulate)
        expect(answer is not None, "plan(...) is still None.")
        expect(len(answer) == 3, "plan should return three numbers: images a step, rate, steps an epoch.")
        n_images, rate, n_steps = map(float, answer)
        expect(n_images != 16 * size or accumulate == 1, f"{about}, each rank computes {accumulate} times 16 images.")
        expect(n_images == images, f"{about}, {n_images:g} images a step cannot be: a part has 16, on each rank.")
        expect(abs(rate - 0.005 * images / 32) < 1e-9, f"{about}, the rate {rate:g} does not grow as the images do.")
        expect(n_steps == int(n_steps), f"{about}, {n_steps:g} is no whole number of steps: leave the rest out.")
        expect(n_steps == 288 // images, f"{about}, an epoch of 288 images does not have {n_steps:g} whole steps.")
    passed("Eight ranks leave two steps an epoch. Four parts want 512 images a step, of 288: no step.")


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a step's images, (n, 8) float32, and labels, (n,) int64; n is 1680 / size."""
    _asked.append((step, rank, size))
    log_metrics(step=step, part=rank, of=size)
    drawn = torch.Generator().manual_seed(step)
    labels = torch.randint(3, (IMAGES_A_STEP,), generator=drawn).sort()[
        0
    ]  # sorted: ranks that do not average drift apart
    images = torch.randn(IMAGES_A_STEP, 8, generator=drawn) + 2 * torch.eye(3, 8)[labels]
    return images.tensor_split(size)[rank], labels.tensor_split(size)[rank]


def train_alone(path: str | os.PathLike, seed: int = 0) -> list[float]:
    """Train ten steps in this process, with a checkpoint at `path` after five; return the loss of each step."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = _steps(model, optimizer, range(STOPPED_AFTER))
    save_checkpoint(path, model=model.state_dict(), optimizer=optimizer.state_dict())
    return losses + _steps(model, optimizer, range(STOPPED_AFTER, N_STEPS))


def given_resume(path: str) -> list[float]:
    # The exercise asks to repair this; the notebook's stub repeats it.
    import horovod.torch as hvd

    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if hvd.rank() == 0:
        saved = load_checkpoint(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    losses = []
    for step in range(5, 10):
        images, labels = exercises.batch(step, hvd.rank(), hvd.size())
        loss = cross_entropy(model(images), labels)
        (loss / hvd.size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return losses


@exercise
def check_resume(resume: Answer, client: Answer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "small.pt"))
        expected = train_alone(path, seed=1)[STOPPED_AFTER:]
        answers, asked = _on_cluster(client, resume, path) if horovod.available() else _in_threads(resume, path)
        size, n = len(answers), N_STEPS - STOPPED_AFTER
        expect(all(answer is not None for answer in answers), "resume(...) is still None on some rank.")
        lengths = {len(answer) for answer in answers}
        expect(lengths == {n}, f"resume should return {n} losses, of steps 6 to 10, not {sorted(lengths)}.")
        parts = {(step, rank, size) for step in range(STOPPED_AFTER, N_STEPS) for rank in range(size)}
        expect(asked >= parts, "some images were not looked at: each rank takes batch(step, hvd.rank(), hvd.size()).")
        expect(asked == parts, "some rank took images of others, or other steps: batch(step, hvd.rank(), hvd.size()).")
        answers = [[float(loss) for loss in answer] for answer in answers]
        agree = all(_close(answer, answers[0]) for answer in answers)
        expect(agree, "the ranks return different losses: report the mean over all ranks, with hvd.allreduce.")
        _compare(answers[0], expected, path, size)
    passed("As if the run had never stopped: weights and momentum on all ranks, and gradients averaged once.")


def _compare(losses, expected, path, size):
    expect(
        _close(losses[:1], expected[:1]),
        f"the first loss, of step 6, is {losses[0]:.4f}, and that of the undisturbed run {expected[0]:.4f}. No "
        "optimiser has moved yet, so some rank has other weights than the checkpoint's: what did each rank load or "
        "receive, in which order?",
    )
    small = f"too small, by the factor {size}"
    mistakes = {
        "The momentum is gone: look at the optimiser that was given the state, and at the one that steps.": (
            _resumed(path, momentum=False)
        ),
        f"The gradients are {small}: who divides by the size, and how often?": _resumed(path, scale=1 / size),
        f"Two mistakes are left: the momentum is gone, and the gradients are {small}.": (
            _resumed(path, momentum=False, scale=1 / size)
        ),
    }
    otherwise = "Is the optimiser's state on all ranks, in the optimiser that makes the steps?"
    hint = which_mistake(lambda wrong: _close(losses, wrong), mistakes, otherwise)
    for step, (loss, right) in enumerate(zip(losses, expected, strict=True), start=STOPPED_AFTER + 1):
        expect(
            _close([loss], [right]),
            f"step 6 is right, but the loss of step {step} is {loss:.4f}, not {right:.4f}. {hint}",
        )


def _resumed(path, momentum=True, scale=1.0):
    saved, model = load_checkpoint(path), torch.nn.Linear(8, 3)
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if momentum:
        optimizer.load_state_dict(saved["optimizer"])
    return _steps(model, optimizer, range(STOPPED_AFTER, N_STEPS), scale)


def _steps(model, optimizer, steps, scale=1.0):
    losses = []
    for step in steps:
        images, labels = batch(step, 0, 1)
        loss = cross_entropy(model(images), labels)
        (scale * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _close(losses, others):
    return all(abs(loss - other) <= 1e-4 * abs(other) for loss, other in zip(losses, others, strict=True))


def _on_cluster(client, resume, path):
    job = horovod.launch(client, resume, path, timeout=60)
    answers, rows = job.result(), job.metrics()
    expect({"step", "part", "of"} <= set(rows), "no rank called exercises.batch: that is where the images come from.")
    return answers, {tuple(map(int, row)) for row in rows[["step", "part", "of"]].dropna().to_numpy()}


# --- Where Horovod is not built, two threads stand in for the ranks.


def _in_threads(resume, path, size=2):
    _asked.clear()
    package, stand_in = ModuleType("horovod"), _StandIn(size)
    vars(package)["torch"] = stand_in
    with patch.dict(sys.modules, {"horovod": package, "horovod.torch": stand_in}), ThreadPoolExecutor(size) as pool:
        answers = list(pool.map(lambda rank: stand_in.on(rank, resume, path), range(size)))
    return answers, set(_asked)


class _StandIn(ModuleType):
    Average, Sum = "average", "sum"

    def __init__(self, size):
        super().__init__("horovod.torch")
        self._here, self._slots = threading.local(), [None] * size
        self._all = threading.Barrier(size, timeout=10)
        self.size, self.rank = lambda: size, lambda: self._here.rank
        self.local_size, self.local_rank = self.size, self.rank

    def on(self, rank, function, *args):
        self._here.rank = rank
        try:
            return function(*args)
        except Exception:
            self._all.abort()
            raise

    def _exchange(self, value):
        self._slots[self.rank()] = value
        self._all.wait()
        values = deepcopy(self._slots)  # each rank gets copies, as if they had been sent
        self._all.wait()
        return values

    def allreduce(self, tensor, average=None, name=None, op="average", **_):
        total = sum(self._exchange(tensor))
        return total if op == self.Sum or average is False else total / self.size()

    def broadcast_object(self, value, root_rank=0, name=None, **_):
        return self._exchange(value)[root_rank]

    def broadcast(self, tensor, root_rank, name=None, **_):
        return self._exchange(tensor)[root_rank]

    def broadcast_parameters(self, params, root_rank):
        for _, tensor in dict(params).items():
            tensor.data.copy_(self.broadcast(tensor.data, root_rank))

    def broadcast_optimizer_state(self, optimizer, root_rank):
        optimizer.load_state_dict(self.broadcast_object(optimizer.state_dict(), root_rank))

    def DistributedOptimizer(self, optimizer, named_parameters=None, **_):
        def average_gradients(*_):
            for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
                weight.grad = self.allreduce(weight.grad)

        distributed = type(optimizer)(optimizer.param_groups)  # without the optimiser's state, as Horovod's own
        distributed.register_step_pre_hook(average_gradients)
        return distributed
