"""Notebook 08: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import copy
import os
import time
from functools import partial

import pytest
import torch
from answers import judged
from torch.nn.functional import cross_entropy

from workshop_utils.exercises import many_models
from workshop_utils.names import NameLSTM, expand


def last(of):
    return of[-1]


def asha(losses, n_given, n_most, *, deepest=True, past_only=False, loss=last):
    """The rule of the exercise; each named argument makes another mistake."""
    levels = range(1, n_most)
    for k in reversed(levels) if deepest else levels:
        past = {model: loss(of[:k]) for model, of in losses.items() if len(of) >= k}
        if past_only:
            past = {model: value for model, value in past.items() if n_given[model] == k}
        for model in sorted(past, key=past.get)[: len(past) // 2]:
            if n_given[model] == k == len(losses[model]):
                return model
    return next((model for model, n in n_given.items() if n == 0), None)


def new_ones_first(losses, n_given, n_most):
    return next((model for model, n in n_given.items() if n == 0), None) or asha(losses, n_given, n_most)


def runs_twice(losses, n_given, n_most):
    running = (model for model, n in n_given.items() if n > len(losses[model]))
    return next(running, None) or asha(losses, n_given, n_most)


def empties(losses, n_given, n_most):
    answer = asha(losses, n_given, n_most)
    losses.clear()
    return answer


def ignores_the_most(losses, n_given, n_most):
    return asha(losses, n_given, 4)


def last_of_them(losses, n_given, n_most):
    for k in range(n_most - 1, 0, -1):
        past = {model: of[k - 1] for model, of in losses.items() if len(of) >= k}
        for model in reversed(sorted(past, key=past.get)[: len(past) // 2]):
            if n_given[model] == k:
                return model
    return max((model for model, n in n_given.items() if n == 0), default=None)


test_next_model = pytest.mark.smoke(
    judged(
        many_models.check_next_model,
        (asha, "Correct"),
        (last_of_them, "Correct"),
        (lambda losses, n_given, n_most: None, "never started.*'a'"),
        (lambda losses, *rest: None if "d" in losses else asha(losses, *rest), "may have their next task: .'b'"),
        (
            lambda losses, *rest: None if losses == {"a": [2.5], "b": [2.5]} else asha(losses, *rest),
            "may have their next task: .'a', 'b'",
        ),
        (new_ones_first, "a new one, .*: .'b'"),
        (partial(asha, deepest=False), "the furthest first"),
        (partial(asha, past_only=True), "rounded down to 2.*still count"),
        (partial(asha, loss=min), "not in the better half after task 2"),  # the lowest loss so far
        (runs_twice, "still running"),
        (lambda losses, n_given, n_most: 0, "returns 0"),
        (empties, "changes the dicts"),
        (ignores_the_most, "all 2 tasks"),
    )
)


def of_both(seed, n_epochs):
    return 1000 * seed + n_epochs


def epoch(state, data, seed, *, seeds=of_both, new_state=True, loads=True, trains=True, keeps=True, dropout=0.2):
    """The task of the exercise; each named argument makes another mistake."""
    if seeds:
        torch.manual_seed(seeds(seed, len(state["rows"])))
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
        state["rows"].append(loss.item())
        state["model"] = model.state_dict()
        return state
    rows = [*state["rows"], loss.item()] if keeps else [loss.item()]
    return {"rows": rows, "model": model.state_dict() if trains else state["model"]}


@pytest.fixture
def first(client):
    future = client.submit(lambda: {"rows": [], "model": NameLSTM().state_dict()}, pure=False)
    yield future
    assert future.result()["rows"] == [], "the notebook's first state stays as it was"
    future.cancel()  # held by a caught exception, it would run again after each death of a worker


@pytest.fixture
def data(client):
    future = client.submit(lambda: (*expand(["anne-marie", "o'hara"] * 40), None, None), pure=False)
    yield future
    future.cancel()  # held by a caught exception, it would run again after each death of a worker


def task(**mistake):
    return lambda state, data, seed: epoch(state, data, seed, **mistake)


def with_weights_put_into_the_old_state(state, data, seed):
    after = epoch(state, data, seed)
    state["model"] = after["model"]
    return after


def with_the_newest_row_first(state, data, seed):
    after = epoch(state, data, seed)
    return {**after, "rows": after["rows"][::-1]}


def with_a_tensor_in_its_row(state, data, seed):
    after = epoch(state, data, seed)
    return {**after, "rows": [*state["rows"], torch.tensor(after["rows"][-1])]}


def with_the_time_in_its_row(state, data, seed):
    after = epoch(state, data, seed)
    return {**after, "rows": [*state["rows"], time.perf_counter()]}


test_repeatable = judged(
    lambda task, client, first, data: many_models.check_repeatable(task, client, first, data),
    (epoch, "Correct"),
    (lambda state, data, seed: None, "a new state, .*, not None"),
    (task(new_state=False), "its rows were .. and are"),
    (with_weights_put_into_the_old_state, "its weights are others now"),
    (with_a_tensor_in_its_row, "a tensor.*loss.item"),
    (task(seeds=None), "manual_seed"),
    (with_the_time_in_its_row, "gives two results"),
    (task(seeds=lambda seed, n_epochs: 1000 * seed + n_epochs + os.getpid()), "gives two results.*another worker"),
    (task(dropout=0.0), "without dropout"),
    (task(seeds=lambda seed, n_epochs: 0), "same first epoch"),
    (task(seeds=lambda seed, n_epochs: seed), "the same order"),  # in every epoch
    (task(seeds=lambda seed, n_epochs: seed + n_epochs), "first epoch of seed 1 .* later one of seed 0"),
    (task(seeds=lambda seed, n_epochs: 1000 + seed - n_epochs), "first epoch of seed 0 .* later one of seed 1"),
    (task(loads=False), "load_state_dict"),
    (task(trains=False), "it began with"),
    (task(keeps=False), "second row"),
    (with_the_newest_row_first, "second row after"),
    (lambda state, data, seed: {"rows": 1}, "'rows', a list"),
    (lambda state, data, seed: {"rows": [1.0], "model": NameLSTM()}, "by model.state_dict"),
    (lambda state, data, seed: copy.deepcopy(state), "1 row, not 0"),
)
