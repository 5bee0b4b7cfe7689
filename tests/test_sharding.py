"""FSDP2 and distributed checkpoints (DCP) in `daskrun.run`: nothing that is learnt or saved depends on the ranks.

Most of it is PyTorch's, so it is weekly. What is ours, the launcher and notebook 11, is tested every day.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import daskrun
from workshop_utils.cluster import start_cluster

pytestmark = pytest.mark.weekly
BATCH, STEPS = 12, 4  # images a step, which all ranks share; 12 is divided by 1, 2 and 3 ranks


def model_and_optimizer():
    """Return an MLP, sharded where there are several ranks, and an optimiser that shows a wrong scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 50), nn.GELU(), nn.Linear(50, 31), nn.GELU(), nn.Linear(31, 3))
    if dist.is_initialized():
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(model, optimizer, first=0, n=STEPS):
    """Train on batches first … first + n - 1, each rank on its part of each."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(first, first + n):
        x = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(step))
        loss = model(x[rank::ranks]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def whole(model):
    """Return the model's parameters as plain tensors, on all ranks."""
    return {
        name: part.full_tensor() if isinstance(part, DTensor) else part for name, part in model.state_dict().items()
    }


def state_of(model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def plain(n_steps):
    model, optimizer = model_and_optimizer()
    steps(model, optimizer, n=n_steps)
    return whole(model)


def sharded(n_steps):
    model, optimizer = model_and_optimizer()
    steps(model, optimizer, n=n_steps)
    held = sum(part.to_local().numel() for part in model.state_dict().values())
    return whole(model), held


def saved(url, options, n_steps=STEPS):
    """Train and save; return the whole parameters."""
    model, optimizer = model_and_optimizer()
    steps(model, optimizer, n=n_steps)
    dcp.save(state_of(model, optimizer), storage_writer=dcp.FsspecWriter(url, **options))
    return whole(model)


def gone_on(url, options, first=STEPS, n_steps=STEPS):
    """Load, train on, and return (parameters as loaded, parameters at the end)."""
    model, optimizer = model_and_optimizer()
    state = state_of(model, optimizer)
    dcp.load(state, storage_reader=dcp.FsspecReader(url, **options))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = {name: part.clone() for name, part in whole(model).items()}
    steps(model, optimizer, first, n_steps)
    return loaded, whole(model)


@pytest.fixture(scope="module")
def three():
    with start_cluster(3) as client, client.cluster:
        yield client


def test_sharded_ranks_learn_what_one_process_learns_and_hold_their_part_alone(three):
    alone = plain(STEPS)
    n_parameters = sum(part.numel() for part in alone.values())
    for n_ranks in (2, 3):
        results = daskrun.run(three, sharded, STEPS, n_workers=n_ranks)
        for parameters, _ in results:
            torch.testing.assert_close(parameters, alone)
        held = [held for _, held in results]
        assert sum(held) == n_parameters and max(held) < 1.2 * n_parameters / n_ranks


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_what_some_ranks_saved_others_go_on_from(three, place, request, tmp_path):
    url, options = str(tmp_path / "checkpoint"), {}
    if place == "s3":
        admin = request.getfixturevalue("s3_admin")
        url = f"s3://workshop/{tmp_path.name}"
        options = {"key": admin.key, "secret": admin.secret, "client_kwargs": admin.client_kwargs}
    at_save, at_end = plain(STEPS), plain(2 * STEPS)
    for n_saving, n_loading in ((2, 3), (3, 1), (1, 2)):
        there = f"{url}/{n_saving}"
        parameters = daskrun.run(three, saved, there, options, n_workers=n_saving)[0]
        for loaded, trained in daskrun.run(three, gone_on, there, options, n_workers=n_loading):
            assert all(torch.equal(loaded[name], part) for name, part in parameters.items())
            torch.testing.assert_close(loaded, at_save)
            torch.testing.assert_close(trained, at_end)
