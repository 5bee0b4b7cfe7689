"""Checks of notebook 08 · Many models."""

import copy
import os
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from distributed import Client
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook

from workshop_utils.exercises import Function, exercise, expect, expect_type, passed
from workshop_utils.pet_names import NameLSTM, expand, find_names

State = dict[str, Any]
Data = tuple[torch.Tensor, torch.Tensor]

N_NAMES = 60  # enough for a second batch


def given_careful_epoch(state: State, data: Data, seed: int) -> State:
    """Train an epoch, carelessly: the stub of the exercise."""
    prefixes, targets, *_ = data
    model = NameLSTM(dropout=0.2)
    model.load_state_dict(state["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for chosen in torch.randperm(len(targets)).split(256):
        loss = cross_entropy(model(prefixes[chosen]), targets[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state["losses"].append(loss.item())
    state["model"] = model.state_dict()
    return state


@partial(exercise, given=given_careful_epoch)
def check_repeatable(careful_epoch: Function, client: Client) -> None:
    here = {"workers": list(client.nthreads())[:1], "pure": False}  # one worker, so that a changed state shows

    def epoch(state, seed=0, pid=0):
        return client.submit(_as_process, pid, careful_epoch, state, data, seed, **here)

    start, data = client.submit(_first_state, **here), client.submit(_data, **here)
    before = start.result()
    first_epoch = epoch(start)  # one after the other: two at once would share PyTorch's random numbers
    once, again = first_epoch.result(), epoch(start, pid=1).result()
    _expect_unchanged(before, start.result())
    _expect_new_state(before, once)
    expect(
        _same(once, again),
        "the same task, run twice, gives two results: where do its random numbers come from? Set them from `seed`, "
        "with torch.manual_seed, inside the task, and from nothing that differs between workers.",
    )
    expect(
        client.submit(_drops, careful_epoch, start, data, **here).result(),
        "your task trains without dropout: keep NameLSTM(dropout=0.2), in training mode.",
    )
    halved = {name: value / 2 for name, value in before["model"].items()}
    expect(
        not _same_weights(once, epoch({**before, "model": halved}).result()),
        "states with different weights end with the same: begin with those of the state, by "
        'model.load_state_dict(state["model"]).',
    )
    _expect_numbers_of_its_own(epoch, before, once)
    second = epoch(first_epoch).result()
    expect(second["losses"][:-1] == once["losses"], "a second epoch should put a second loss after those of its state.")
    expect(_same(once, first_epoch.result()), "your task changes the state that it was given. Copy its losses.")
    passed(
        "Each run gives the same result, and leaves its argument as it was: Dask may run it again, on any equal worker."
    )


def _first_state():
    torch.manual_seed(0)
    return {"losses": [], "model": NameLSTM().state_dict()}


def _data():
    return expand(find_names().names[:N_NAMES])


def _as_process(pid, function, *arguments):
    """Call a function on a worker, as if the worker's process had another number."""
    with patch("os.getpid", return_value=os.getpid() + pid):
        state = function(*arguments)
    parts = [state, *(state.values() if isinstance(state, dict) else ())]
    is_sent = not any(isinstance(part, nn.Module) for part in parts)  # one that is trained cannot be
    expect(is_sent, "your task returns a model: put its weights under 'model', by model.state_dict().")
    return state


def _drops(function, state, data):
    """Return whether dropout acts when a function is called, on a copy of the state."""
    acts = []

    def look(module, *_):
        if isinstance(module, nn.Dropout):
            acts.append(module.training and module.p > 0)

    hook = register_module_forward_hook(look)
    try:
        function(copy.deepcopy(state), data, 0)
    finally:
        hook.remove()
    return any(acts)


def _expect_unchanged(before, now):
    changes = "your task changes the state that it was given: on its worker, "
    expect(
        before["losses"] == now["losses"],
        f"{changes}its losses were {before['losses']} and are {now['losses']}. Make a new list.",
    )
    expect(_same_weights(before, now), f"{changes}its weights have changed. Return a new dict.")


def _expect_new_state(before, state):
    expect_type(state, dict, "your task should return a new state, a dict with 'losses' and 'model'")
    has_both = {"losses", "model"} <= set(state) and isinstance(state["losses"], list)
    expect(has_both, "your task should return a dict with 'losses', a list, and 'model', the weights.")
    n_losses = len(before["losses"]) + 1
    expect(
        len(state["losses"]) == n_losses, f"after an epoch there should be {n_losses} loss, not {len(state['losses'])}."
    )
    no_number = "the loss that you add is a tensor, and keeps what the backward pass needs: add loss.item()."
    expect(not isinstance(state["losses"][-1], torch.Tensor), no_number)
    expect(not _same_weights(before, state), "the weights are those it began with: return the trained ones.")


def _expect_numbers_of_its_own(epoch, before, once):
    """Check that no two epochs draw the same numbers: all begin with the same weights here, and should end apart."""
    other = epoch(before, seed=1).result()
    expect(
        not _same(once, other),
        "seeds 0 and 1 give the same first epoch: there, too, where the state has no losses, the number has to depend "
        "on `seed`. (PyTorch heeds its low 32 bits.)",
    )
    later, later_of_other = once, other
    for _ in range(10):  # later epochs of both seeds
        later_of_other = epoch({**later_of_other, "model": before["model"]}, seed=1).result()
        expect(
            not _same_weights(once, later_of_other),
            "the first epoch of seed 0 draws the same random numbers as a later one of seed 1. Make a number that no "
            "two share, such as 1000 * seed plus the number of epochs so far.",
        )
        later = epoch({**later, "model": before["model"]}).result()
        expect(
            not _same_weights(once, later),
            "the first and the second epoch draw the same random numbers, so each epoch takes the pairs in the same "
            'order. Set them from `seed` and from the number of epochs so far, len(state["losses"]).',
        )
        expect(
            not _same_weights(other, later),
            "the first epoch of seed 1 draws the same random numbers as a later one of seed 0. Make a number that no "
            "two share, such as 1000 * seed plus the number of epochs so far.",
        )


def _same(one, other):
    return one["losses"] == other["losses"] and _same_weights(one, other)


def _same_weights(one, other):
    return all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
