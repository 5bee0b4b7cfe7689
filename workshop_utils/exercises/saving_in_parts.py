"""The check of the deep dive about saving in parts."""

import os
import random
import re
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from workshop_utils.exercises import Function, NotYet, exercise, expect, expect_equal, passed, shown
from workshop_utils.exercises.larger_models import Tower
from workshop_utils.exercises.ranks import run_on_ranks, run_ours
from workshop_utils.shared import new_shared_folder

try:
    from torch.distributed.checkpoint import FsspecWriter
except ImportError:  # not public yet in PyTorch 2.11
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

if TYPE_CHECKING:  # as in `ranks`
    from distributed import Client

N_STEPS, RATE, LATER_RATE = 5, 0.01, 0.002  # learning rates of a new optimizer, and of the one that is saved
CLOSE = 1e-5


class DiesAfterWriting(FsspecWriter):
    """A storage writer with which rank 1 is killed as soon as it has written its part of a checkpoint."""

    def write_data(self, *args: Any) -> Any:
        """Write this rank's part, and kill rank 1."""
        written = super().write_data(*args)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def given_resume(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Resume with a new optimizer's state: the stub of exercise 1."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 0,
    }
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])  # type: ignore[arg-type]
    optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
    return state["step"]  # type: ignore[return-value]


@partial(exercise, given=given_resume)
def check_resume(resume: Function, client: "Client") -> None:
    """Save a training, resume it on other weights, and compare the next losses."""
    path, saved_step = f"{new_shared_folder()}/checkpoint", random.randint(100, 999)  # which no answer can know
    saved = run_ours(client, _train_and_save, path, saved_step)[0]
    about_moments = "Does a new optimizer have any when dcp.load fills what it is given? get_state_dict makes them."
    for rank, (step, losses) in enumerate(run_on_ranks(client, _go_on, resume, path)):
        about = f"on rank {rank}, "
        expect(step == saved_step, f"{about}resume returned {shown(step)}, and the checkpoint is of step {saved_step}.")
        right = saved["right"]
        expect_equal(
            losses[0],
            right[0],
            f"{about}the first loss after resume is {losses[0]:.4f}, and that of the undisturbed run {right[0]:.4f}: "
            "the model does not have the saved weights.",
            within=CLOSE,
        )
        expect_equal(
            losses,
            right,
            "something of the optimizer is lost: its moments, or its learning rate.",
            {
                f"AdamW's moments are still those of a new optimizer. {about_moments}": saved["no moments"],
                f"AdamW's moments and its learning rate are a new optimizer's. {about_moments}": saved["weights alone"],
                "the moments are back, and the learning rate is a new optimizer's. dcp.load fills no number in place: "
                "it goes into the dictionary, and set_optimizer_state_dict takes it from there.": saved["no rate"],
            },
            within=CLOSE,
            about=f"{about}the first loss is right, but the second is {losses[1]:.4f}, not {right[1]:.4f}: ",
        )
    passed("Weights, moments, learning rate and step are back, and the next losses are those of the undisturbed run.")


def _start(seed):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model, mesh = Tower(width=16), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.body:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)


def _steps(model, optimizer, steps):
    losses = []
    for step in steps:
        codes = torch.randint(64, (32,), generator=torch.Generator().manual_seed(step))  # the same on all ranks
        loss = cross_entropy(model(codes), codes % 8)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _train_and_save(path, step):
    """Train, lower the learning rate, save as `step`, and return the next losses: "right", and those of three mistakes.

    "weights alone": with a new optimizer. "no moments": one with the rate. "no rate": one with the moments.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = _start(seed=0)
    _steps(model, optimizer, range(N_STEPS))
    optimizer.param_groups[0]["lr"] = LATER_RATE
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer, "step": step}, checkpoint_id=path)
    later, losses = range(N_STEPS, N_STEPS + 3), {}
    for mistake in ("weights alone", "no moments", "no rate"):
        other, fresh = _start(seed=1)
        state = {"model": other.state_dict()}
        if mistake == "no moments":
            fresh.param_groups[0]["lr"] = LATER_RATE
        if mistake == "no rate":
            state["model"], state["optimizer"] = get_state_dict(other, fresh)
        dcp.load(state, checkpoint_id=path)  # fills the tensors of `other`, and of `fresh`, in place
        losses[mistake] = _steps(other, fresh, later)
    return losses | {"right": _steps(model, optimizer, later)}


def _go_on(resume, path):
    from torch.distributed.checkpoint import CheckpointException

    model, optimizer = _start(seed=1)
    try:
        step = resume(path, model, optimizer)
    except CheckpointException as error:  # no Exception; {rank: (what it raised, where)}
        why = " ".join(dict.fromkeys(str(raised) for raised, _ in error.failures.values()))
        if re.search(r"optimizer\.state\.\d", why):
            why += " optimizer.state_dict() numbers parameters; the checkpoint has their names, as get_state_dict does."
        raise NotYet(why) from None
    losses = _steps(model, optimizer, range(N_STEPS, N_STEPS + 3))
    return step.item() if isinstance(step, torch.Tensor) else step, losses
