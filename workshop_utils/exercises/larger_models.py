"""Checks of notebook 11 · A model that does not fit."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, gelu

from workshop_utils.exercises import Answer, Function, NotYet, exercise, expect, expect_equal, passed
from workshop_utils.exercises.ranks import run_on_ranks
from workshop_utils.storage import new_shared_folder

N_BLOCKS, MOST_UNITS = 6, 10
N_STEPS, CLOSE = 5, 1e-5
KNOWN = {"ddp": "DDP", "fsdp": "FSDP2", "fsdp2": "FSDP2", "neither": "neither", "none": "neither"}


def _case(n_parameters: float, n_ranks: int, gpu_gb: float, unit: float) -> dict[str, float]:
    return {"n_parameters": n_parameters, "n_ranks": n_ranks, "gpu_gb": gpu_gb, "unit": unit}


CASES = (  # (arguments, right answer, what a wrong answer may have missed)
    (_case(7e9, 4, 80, 0.2e9), "FSDP2", "DDP would hold 112 GB, and FSDP2 28 GB and a unit of 1.6 GB."),
    (_case(1e9, 4, 80, 0.2e9), "DDP", "16 GB fit on each GPU, and DDP sends less."),
    (_case(4.5e9, 4, 80, 0.2e9), "FSDP2", "DDP would hold 72 GB, and of 80 a fifth has to stay free."),
    (_case(3.95e9, 4, 80, 0.2e9), "DDP", "63.2 GB fit into 64, and DDP gathers no unit on top."),
    (_case(4e9, 4, 80, 0.2e9), "DDP", "64 GB fit: exactly a fifth of 80 stays free."),
    (_case(70e9, 4, 80, 1e9), "neither", "its shards alone are 280 GB a rank."),
    (_case(70e9, 64, 80, 1e9), "FSDP2", "64 ranks hold shards of 17.5 GB each; a unit of 8 GB comes on top."),
    (_case(12e9, 4, 80, 12e9), "neither", "as one unit, 96 GB come on top of shards of 48 GB."),
    (_case(15e9, 4, 80, 0.6e9), "neither", "shards of 60 GB and a unit of 4.8 GB are more than 64 GB."),
    (_case(15e9, 4, 80, 0.4e9), "FSDP2", "shards of 60 GB and a unit of 3.2 GB fit into 64 GB."),
    (_case(0.5e9, 1, 11, 0.1e9), "DDP", "8 GB fit into 8.8."),
    (_case(2e9, 2, 24, 0.1e9), "FSDP2", "32 GB do not fit into 24, and half of that and 0.8 GB do."),
)


class Part(nn.Module):
    """A block of the tower: two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(gelu(self.wide(x)))


class Tower(nn.Module):
    """A model of (n,) int64 codes -> (n, 8) numbers, whose parameters are nearly all in `body`."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Embedding(64, width)
        self.body = nn.Sequential(*(Part(width) for _ in range(N_BLOCKS)))
        self.last = nn.Linear(width, 8)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.first(codes))).clone()  # FSDP2 warns of an answer that is a view


@exercise
def check_shard_evenly(shard_evenly: Function, client: Answer) -> None:
    found = run_on_ranks(client, _sharded, shard_evenly)[0]
    sizes, whole = found["units"], found["whole"]
    expect(sizes, "no part of the model is sharded: call fully_shard on modules.")
    expect(
        not whole,
        f"every rank holds {', '.join(whole)} whole: fully_shard(model), called last, takes what no other unit has.",
    )
    expect(
        "" in sizes,
        "the model itself is no unit. Each unit is then by itself, and keeps what it gathered after the forward pass: "
        "call fully_shard(model, mesh=mesh) last.",
    )
    name, largest = max(sizes.items(), key=lambda item: item[1])
    block = sum(weight.numel() for weight in Part(128).parameters())
    about = f"the unit {name!r}" if name else "the unit of the whole model"
    expect(
        largest <= 1.1 * block,
        f"{about} gathers {largest:,} parameters, and a block has {block:,}. Which blocks are in it together? A unit "
        "has what no unit inside it has, so the inner ones have to be made first.",
    )
    expect(
        found["at once"] <= 1.2 * block,
        f"{found['at once']:,} parameters are gathered at a time, and a block has {block:,}. Make a unit of each block "
        "by itself, and let it be thrown away after its forward and its backward pass, as is the default.",
    )
    expect(
        len(sizes) <= MOST_UNITS,
        f"{len(sizes)} units: each costs a message for a few bytes. A unit for each block is enough.",
    )
    expect(found["same"], "the sharded model answers otherwise than before: shard it, and change nothing else.")
    passed(f"{len(sizes)} units, and none gathers more than one block: the peak is low, and the messages are few.")


def _sharded(shard):
    """Return the units that `shard` makes of a tower, what it leaves whole, and whether its answers are the same."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    alone, model, codes = Tower(), Tower(), torch.arange(32)
    model.load_state_dict(alone.state_dict())
    try:
        shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    except TypeError as error:
        if "Invariant" not in str(error):
            raise
        raise NotYet(
            "a module was sharded after the unit around it: begin with the inner ones, end with the model."
        ) from None
    sizes = {name: 0 for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    whole = [name for name, weight in model.named_parameters() if not isinstance(weight, DTensor)]
    for name, weight in model.named_parameters():
        if name not in whole:
            inside = [unit for unit in sizes if not unit or name.startswith(f"{unit}.")]
            sizes[max(inside, key=len)] += weight.numel()
    gathered = []

    def note(*_):
        gathered.append(sum(weight.numel() for weight in model.parameters() if not isinstance(weight, DTensor)))

    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(note)
            part.register_full_backward_pre_hook(note)
    answers = model(codes)
    same = bool(sizes) and torch.allclose(answers, alone(codes), atol=1e-5)
    answers.sum().backward()
    return {"units": sizes, "whole": whole, "same": same, "at once": max(gathered, default=0)}


@exercise
def check_resume(resume: Function, client: Answer) -> None:
    path, saved_step = f"{new_shared_folder()}/checkpoint", random.randint(100, 999)  # which no answer can know
    saved = run_on_ranks(client, _train_and_save, path, saved_step)[0]
    question = "Which tensors did dcp.load get to fill, and who took them from there?"
    for rank, (step, losses) in enumerate(run_on_ranks(client, _go_on, resume, path)):
        about = f"on rank {rank}, "
        expect(step == saved_step, f"{about}resume returned {step!r}, and the checkpoint is of step {saved_step}.")
        right = saved["right"]
        expect_equal(
            losses[0],
            right[0],
            f"{about}the first loss after resume is {losses[0]:.4f}, and that of the undisturbed run {right[0]:.4f}: "
            "the model has not the weights that were saved.",
            within=CLOSE,
        )
        expect_equal(
            losses,
            right,
            f"something of the optimiser is lost. {question}",
            {f"AdamW's moments are still those of a new optimiser. {question}": saved["fresh optimiser"]},
            within=CLOSE,
            about=f"{about}the first loss is right, but the second is {losses[1]:.4f}, not {right[1]:.4f}: ",
        )
    passed("Weights, moments and step are back, and the next losses are those of the undisturbed run.")


def _start(seed):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model, mesh = Tower(width=16), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.body:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


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
    """Train, save as `step`, and return the next losses, with the optimiser that trained so far and with a new one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict

    model, optimizer = _start(seed=0)
    _steps(model, optimizer, range(N_STEPS))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer, "step": step}, checkpoint_id=path)
    other, fresh = _start(seed=0)
    set_model_state_dict(other, get_model_state_dict(model))
    later = range(N_STEPS, N_STEPS + 3)
    return {"fresh optimiser": _steps(other, fresh, later), "right": _steps(model, optimizer, later)}


def _go_on(resume, path):
    from torch.distributed.checkpoint import CheckpointException

    model, optimizer = _start(seed=1)
    try:
        step = resume(path, model, optimizer)
    except CheckpointException as error:  # no Exception; {rank: (what it raised, where)}
        reasons = dict.fromkeys(str(raised) for raised, _ in error.failures.values())
        raise NotYet(" ".join(reasons)) from None
    losses = _steps(model, optimizer, range(N_STEPS, N_STEPS + 3))
    return step.item() if isinstance(step, torch.Tensor) else step, losses


@exercise
def check_choose(choose: Function) -> None:
    for case, right, hint in CASES:
        given = ", ".join(f"{name}={value:g}" for name, value in case.items())
        answer = choose(**case)
        expect(answer is not None or right == "neither", f"choose({given}) is still None.")
        said = "neither" if answer is None else str(answer).strip().lower()
        expect(said in KNOWN, f"choose({given}) is {answer!r}: return one of 'DDP', 'FSDP2' and 'neither'.")
        expect(KNOWN[said] == right, f"choose({given}) is {answer!r}, but {hint}")
    passed("DDP where it fits. 7 billion parameters on four GPUs need FSDP2: 28 GB each instead of 112.")
