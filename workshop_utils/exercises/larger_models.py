"""Checks of notebook 11 · A model that doesn't fit."""

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import gelu

from workshop_utils.exercises import Function, exercise, expect, passed
from workshop_utils.exercises.ranks import run_on_ranks, run_ours

if TYPE_CHECKING:  # as in `ranks`
    from distributed import Client
    from torch.distributed.device_mesh import DeviceMesh

N_BLOCKS, MOST_UNITS = 6, 10
GRADIENTS_CLOSE = 1e-4  # of a gradient's norm; a reduction in bf16 is 20 times as far off


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


def given_shard_evenly(model: nn.Module, mesh: "DeviceMesh") -> None:
    """Shard each of the model's parts, however large: the stub of exercise 1."""
    for part in model.children():
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def show_units(client: "Client") -> None:
    """Print how many parameters each unit of the tower has, sharded as in the stub."""
    sizes = run_ours(client, _sizes_of_units)[0]
    for name, size in sizes.items():
        print(f"{name or 'the rest':8} {size:9,} parameters")


def _sizes_of_units():
    with torch.device("meta"):
        model = Tower()
    given_shard_evenly(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return _parameters_per_unit(model)


@partial(exercise, given=given_shard_evenly)
def check_shard_evenly(shard_evenly: Function, client: "Client") -> None:
    found = run_on_ranks(client, _sharded, shard_evenly)[0]
    sizes, whole = found["units"], found["whole"]
    expect(sizes, "no part of the model is sharded: call fully_shard on modules.")
    expect(
        not whole,
        f"every rank holds {', '.join(whole)} whole: fully_shard(model), called last, claims what is left.",
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
        "holds the parameters that no inner unit has claimed, so make one of each block first.",
    )
    at_once = f"{found['at once']:,} parameters are gathered at a time, and a block has {block:,}"
    left = found["left"]
    expect(
        found["at once"] <= 1.2 * block or not left,
        f"{at_once}: no unit was made of {' and '.join(left)}, so it is gathered with the rest of the model, which "
        "stays gathered beside each block.",
    )
    expect(
        found["at once"] <= 1.2 * block,
        f"{at_once}: a unit stays gathered after its forward pass, as with reshard_after_forward=False.",
    )
    expect(
        len(sizes) <= MOST_UNITS,
        f"{len(sizes)} units: each costs messages of its own. A unit for each block is enough.",
    )
    _expect_the_same(found)
    passed(f"{len(sizes)} units, and none gathers more than one block: the peak is low, and the messages are few.")


def _expect_the_same(found):
    """Expect the answers and gradients of the model before."""
    expect(found["same"], "the sharded model gives other answers than before: shard it, and change nothing else.")
    without, wrong = found["gradients"]
    expect(
        not without,
        f"a backward pass gives no gradient to {_first_of(without)}: shard the model, and change "
        "nothing else. set_requires_gradient_sync(False), for one, leaves gradients on their ranks.",
    )
    expect(
        not wrong,
        f"gradients are not those of the model before, in {_first_of(wrong)}: shard it, and change "
        "nothing else, such as the mp_policy or the divisor of gradients.",
    )


def _first_of(names):
    return f"{names[0]} and {len(names) - 1} more" if names[1:] else "".join(names)


def _sharded(shard):
    """Return what `shard` makes of a tower.

    "units": {name: parameters}. "at once": the most parameters that are gathered at a time. Names: "whole" of
    parameters that are in no unit, "left" of blocks that are no unit. "same": whether the answers are as before.
    "gradients": names of parameters without one after a backward pass, and of those with a wrong one.
    """
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    alone, model, codes = Tower(), Tower(), torch.arange(32)
    model.load_state_dict(alone.state_dict())
    is_inner_last = _shards_inner_last(shard, model)
    unit_of = _units(model)
    left = [name for name, part in model.named_modules() if isinstance(part, Part) and name not in unit_of]
    whole = [name for name, weight in model.named_parameters() if not isinstance(weight, DTensor)]
    sizes = _parameters_per_unit(model)
    expect(
        not is_inner_last,
        "a module was sharded after the unit around it: begin with the inner ones, end with the model.",
    )
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    expect(not frozen, f"no gradient is asked for {_first_of(frozen)}: shard the model, and change nothing else.")
    answers, at_once = _step(model, codes)
    right = alone(codes)
    right.sum().backward()
    same = bool(sizes) and torch.allclose(answers.float(), right, atol=1e-5)
    return {
        "units": sizes,
        "at once": at_once,
        "whole": whole,
        "left": left,
        "same": same,
        "gradients": _gradients_that_differ(model, alone),
    }


def _shards_inner_last(shard, model):
    """Shard the model; return whether PyTorch fails because a unit inside another one is made after it."""
    try:
        shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    except TypeError as error:
        if "Invariant" not in str(error):
            raise
        return True
    except AssertionError as error:
        expect(
            "already been applied" not in str(error),
            "fully_shard was called twice on the same module: call it once on each block, and once on the model.",
        )
        raise
    return False


def _parameters_per_unit(model):
    from torch.distributed.tensor import DTensor

    unit_of = _units(model)
    sizes = dict.fromkeys(unit_of.values(), 0)
    for name, weight in model.named_parameters():
        if isinstance(weight, DTensor):
            around = [module for module in unit_of if not module or name.startswith(f"{module}.")]
            expect(
                around,
                "weights were sharded with a module that is no part of the model. A slice such as model.body[:3] makes "
                "a new nn.Sequential, which the model never calls. Make a unit of each block.",
            )
            sizes[unit_of[max(around, key=len)]] += weight.numel()
    return sizes


def _units(model):
    """Return {module: unit} by names. A unit of several modules, as of a list, has all their names."""
    modules_of: dict = {}  # by the state that the modules of a unit share
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            modules_of.setdefault(fully_shard.state(module), []).append(name)  # type: ignore[attr-defined]
    return {name: " and ".join(names) for names in modules_of.values() for name in names}


def _gradients_that_differ(model, alone):
    """Return the names of parameters without a gradient, and of those whose gradient is not the one in `alone`."""
    from torch.distributed.tensor import DTensor

    without, wrong = [], []
    for (name, weight), (_, other) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        gradient, right = weight.grad, other.grad
        if gradient is None:
            without.append(name)
            continue
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if not torch.dist(gradient, right) <= GRADIENTS_CLOSE * right.norm():
            wrong.append(name)
    return without, wrong


def _step(model, codes):
    """Run a tower forwards and backwards; return its answers, and the most weights that were whole at a time."""
    from torch.distributed.tensor import DTensor

    gathered = []

    def note(part, *_):
        dtype = part.weight.dtype
        expect(
            dtype == torch.float32,
            f"a layer computes in {dtype}, not in torch.float32 as before: shard the model, and change nothing else, "
            "such as its type or its mp_policy.",
        )
        gathered.append(sum(weight.numel() for weight in model.parameters() if not isinstance(weight, DTensor)))

    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(note)
            part.register_full_backward_pre_hook(note)
    answers = model(codes)
    answers.sum().backward()
    return answers, max(gathered, default=0)
