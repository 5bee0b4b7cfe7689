"""Checks of notebook 08 · Many models."""

import copy
import os
import random
from unittest.mock import patch

import torch
from distributed import Client, Future
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from workshop_utils.exercises import Function, exercise, expect, expect_type, passed, shown

Losses = dict[str, list[float]]  # each model's losses after its first, second, … task
Given = dict[str, int]  # number of tasks that each model has been given


@exercise
def check_next_model(next_model: Function) -> None:
    for losses, given, most in SCENES:
        _ask(next_model, losses, given, most)
    for seed, n_workers in enumerate((1, 2, 3, 5)):
        _play(next_model, random.Random(seed), n_workers)
    passed("No worker waits while a model may go on, or a new one may start.")


def _ask(function, losses, given, most):
    """Check what the attendee's rule returns, and return it: the name of a model that may be taken, or None."""
    seen = copy.deepcopy((losses, given))
    answer = function(*seen, most)
    expect(seen == (losses, given), "your rule changes the dicts that it is given; work on copies.")
    may, new = [model for model in losses if _may_go_on(model, losses, given, most)], _new(given)
    furthest = max((given[model] for model in may), default=0)
    about = f"With losses = {losses}, n_given = {given} and n_most = {most}, your rule returns {shown(answer)}"
    if answer is None:
        expect(not may, f"{about}, and a worker stays idle, but these may have their next task: {may}.")
        expect(not new, f"{about}, and a worker stays idle, but these were never started: {new}.")
        return None
    expect(isinstance(answer, str) and answer in losses, f"{about}: return one model's name, or None.")
    k = given[answer]
    expect(k < most, f"{about}, which has had all {most} tasks.")
    expect(k == len(losses[answer]), f"{about}, whose last task is still running.")
    if k == 0:
        expect(not may, f"{about}, a new one, but these may go on, and that comes first: {may}.")
    else:
        past = {model: of[k - 1] for model, of in losses.items() if len(of) >= k}
        half = f"the better half after task {k}, {past}, rounded down to {len(past) // 2}"
        expect(answer in may, f"{about}, which is not in {half}. Those that went on since then still count there.")
        expect(k == furthest, f"{about}, but another has come further and may go on: the furthest first.")
    return answer


def _may_go_on(model, losses, given, most):
    k = given[model]
    if not 0 < k == len(losses[model]) < most:
        return False
    past = [of[k - 1] for of in losses.values() if len(of) >= k]
    return sum(loss < losses[model][-1] for loss in past) < len(past) // 2  # of equal losses, either may go on


def _new(given):
    return [model for model, n in given.items() if n == 0]


def _play(function, chance, n_workers):
    """Let the rule keep `n_workers` busy with 8 models, whose tasks take a random time."""
    losses: Losses = {f"model {letter}": [] for letter in "abcdefgh"}
    given = dict.fromkeys(losses, 0)
    running: list = []
    while True:
        while len(running) < n_workers and (model := _ask(function, losses, given, 4)):
            given[model] += 1
            running.append((chance.random() * given[model], model))
        if not running:
            return
        running.sort()
        model = running.pop(0)[1]
        before = losses[model][-1] if losses[model] else 3.0
        losses[model].append(round(before + chance.random() / 4 - 0.15, 2))  # a loss may rise


SCENES: list[tuple[Losses, Given, int]] = [  # losses so far, tasks given, and the most that a model may have
    ({"a": [], "b": [], "c": []}, {"a": 0, "b": 0, "c": 0}, 4),  # any of them may start
    ({"a": [2.5], "b": [], "c": []}, {"a": 1, "b": 0, "c": 0}, 4),  # half of one is none
    ({"a": [2.5], "b": [2.5]}, {"a": 1, "b": 1}, 4),  # of equal losses, either may go on
    ({"a": [2.5], "b": [2.4], "c": [], "d": []}, {"a": 1, "b": 1, "c": 1, "d": 0}, 4),  # b before a new one
    ({"a": [2.4], "b": [2.5], "c": [], "d": []}, {"a": 2, "b": 1, "c": 1, "d": 0}, 4),  # a is busy and counts
    ({"a": [2.4], "b": [2.5], "c": []}, {"a": 2, "b": 1, "c": 1}, 4),  # nobody may
    ({"a": [2.6, 2.1], "b": [2.5], "c": [2.55], "d": [2.7], "e": []}, {"a": 2, "b": 2, "c": 1, "d": 1, "e": 0}, 4),
    (
        {"a": [2.5, 2.3], "b": [2.4, 2.2], "c": [2.45], "d": [2.6], "e": [2.6], "f": [2.7]},
        {"a": 2, "b": 2, "c": 1, "d": 1, "e": 1, "f": 1},
        4,
    ),  # b has come further than c
    (
        {"a": [2.4, 2.9], "b": [2.5, 3.0], "c": [2.45], "d": [2.6], "e": [2.7], "f": [2.8]},
        {"a": 2, "b": 2, "c": 1, "d": 1, "e": 1, "f": 1},
        4,
    ),  # a has come further than c, with a higher loss
    ({"a": [2.1], "b": [2.2], "c": [2.3], "d": [2.4], "e": [2.5]}, {"a": 2, "b": 2, "c": 1, "d": 1, "e": 1}, 4),
    ({"a": [2.5, 2.3], "b": [2.4, 2.2]}, {"a": 2, "b": 2}, 3),
    ({"a": [2.5, 2.3], "b": [2.4, 2.2]}, {"a": 2, "b": 2}, 2),  # both have had all
    ({"a": [2.2, 2.6], "b": [2.5, 2.4]}, {"a": 2, "b": 2}, 3),  # a was better earlier
]


@exercise
def check_repeatable(careful_epoch: Function, client: Client, first: Future, data: Future) -> None:
    here = {"workers": list(client.nthreads())[:1], "pure": False}  # one worker, so that a changed state shows

    def epoch(state, seed=0, pid=0):
        return client.submit(_as_process, pid, careful_epoch, state, data, seed, **here)

    start = client.submit(copy.deepcopy, first, **here)
    before = start.result()
    first_epoch = epoch(start)  # one after the other: two at once would share PyTorch's random numbers
    once, again = first_epoch.result(), epoch(start, pid=1).result()
    _expect_unchanged(before, start.result())
    _expect_new_state(before, once)
    expect(
        _same(once, again),
        "the same task, run twice, gives two results: where do its random numbers come from? Set them from `seed`, "
        "with torch.manual_seed, inside the task, and from nothing else that another worker would not have.",
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
    expect(second["rows"][:-1] == once["rows"], "a second epoch should put a second row after those of its state.")
    expect(_same(once, first_epoch.result()), "your task changes the state that it was given. Copy its rows.")
    passed(
        "Each run gives the same result, and leaves its argument as it was: Dask may run it again, on any equal worker."
    )


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
        before["rows"] == now["rows"],
        f"{changes}its rows were {before['rows']} and are {now['rows']}. Make a new list.",
    )
    expect(_same_weights(before, now), f"{changes}its weights are others now. Return a new dict.")


def _expect_new_state(before, state):
    expect_type(state, dict, "your task should return a new state, a dict with 'rows' and 'model'")
    has_both = {"rows", "model"} <= set(state) and isinstance(state["rows"], list)
    expect(has_both, "your task should return a dict with 'rows', a list, and 'model', the weights.")
    n_rows = len(before["rows"]) + 1
    expect(len(state["rows"]) == n_rows, f"after an epoch there should be {n_rows} row, not {len(state['rows'])}.")
    no_number = "the row that you add is a tensor, and keeps what the backward pass needs: add loss.item()."
    expect(not isinstance(state["rows"][-1], torch.Tensor), no_number)
    expect(not _same_weights(before, state), "the weights are those it began with: return the trained ones.")


def _expect_numbers_of_its_own(epoch, before, once):
    """Check that no two epochs draw the same numbers: all begin with the same weights here, and should end apart."""
    other = epoch(before, seed=1).result()
    expect(
        not _same(once, other),
        "seeds 0 and 1 give the same first epoch: there, too, where the state has no rows, the number has to depend "
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
            'order. Set them from `seed` and from the number of epochs so far, len(state["rows"]).',
        )
        expect(
            not _same_weights(other, later),
            "the first epoch of seed 1 draws the same random numbers as a later one of seed 0. Make a number that no "
            "two share, such as 1000 * seed plus the number of epochs so far.",
        )


def _same(one, other):
    return one["rows"] == other["rows"] and _same_weights(one, other)


def _same_weights(one, other):
    return all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
