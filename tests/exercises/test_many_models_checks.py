"""Notebook 08: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import copy
import os
import time

import torch
from answers import judged
from torch.nn.functional import cross_entropy

from workshop_utils.exercises import many_models
from workshop_utils.pet_names import NameLSTM


def of_both(seed, n_epochs):
    return 1000 * seed + n_epochs


def epoch(state, data, seed, *, seeds=of_both, new_state=True, loads=True, trains=True, keeps=True, dropout=0.2):
    """The task of the exercise; each named argument makes another mistake."""
    if seeds:
        torch.manual_seed(seeds(seed, len(state["losses"])))
    prefixes, targets, *_ = data
    model = NameLSTM(dropout=dropout)
    if loads:
        model.load_state_dict(state["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for chosen in torch.randperm(len(targets)).split(256):
        loss = cross_entropy(model(prefixes[chosen]), targets[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not new_state:
        state["losses"].append(loss.item())
        state["model"] = model.state_dict()
        return state
    losses = [*state["losses"], loss.item()] if keeps else [loss.item()]
    return {"losses": losses, "model": model.state_dict() if trains else state["model"]}


def task(**mistake):
    return lambda state, data, seed: epoch(state, data, seed, **mistake)


def with_weights_put_into_the_old_state(state, data, seed):
    after = epoch(state, data, seed)
    state["model"] = after["model"]
    return after


def with_the_newest_loss_first(state, data, seed):
    after = epoch(state, data, seed)
    return {**after, "losses": after["losses"][::-1]}


def with_a_tensor_as_its_loss(state, data, seed):
    after = epoch(state, data, seed)
    return {**after, "losses": [*state["losses"], torch.tensor(after["losses"][-1])]}


def with_the_time_as_its_loss(state, data, seed):
    after = epoch(state, data, seed)
    return {**after, "losses": [*state["losses"], time.perf_counter()]}


test_repeatable = judged(
    lambda task, client: many_models.check_repeatable(task, client),
    (epoch, "Correct"),
    (lambda state, data, seed: None, "a new state, .*, not None"),
    (task(new_state=False), "its losses were .. and are"),
    (with_weights_put_into_the_old_state, "its weights have changed"),
    (with_a_tensor_as_its_loss, "a tensor.*loss.item"),
    (task(seeds=None), "manual_seed"),
    (with_the_time_as_its_loss, "gives two results"),
    (task(seeds=lambda seed, n_epochs: 1000 * seed + n_epochs + os.getpid()), "gives two results.*between workers"),
    (task(dropout=0.0), "without dropout"),
    (task(seeds=lambda seed, n_epochs: 0), "same first epoch"),
    (task(seeds=lambda seed, n_epochs: seed), "the same order"),  # in every epoch
    (task(seeds=lambda seed, n_epochs: seed + n_epochs), "first epoch of seed 1 .* later one of seed 0"),
    (task(seeds=lambda seed, n_epochs: 1000 + seed - n_epochs), "first epoch of seed 0 .* later one of seed 1"),
    (task(loads=False), "load_state_dict"),
    (task(trains=False), "it began with"),
    (task(keeps=False), "second loss"),
    (with_the_newest_loss_first, "second loss after"),
    (lambda state, data, seed: {"losses": 1}, "'losses', a list"),
    (lambda state, data, seed: {"losses": [1.0], "model": NameLSTM()}, "by model.state_dict"),
    (lambda state, data, seed: copy.deepcopy(state), "1 loss, not 0"),
)
