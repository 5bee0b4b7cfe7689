"""Notebook 10: wrong answers get a hint, never a traceback, and right ones pass however they are written."""

import os
from functools import partial
from math import ceil

import pytest
from answers import judged

from workshop_utils.checkpoint import checkpoint_exists, load_checkpoint, save_checkpoint
from workshop_utils.exercises import beyond_one_machine as exercises


def plan(n_images, deadline_h, images_per_s, boot_h, price):
    work_h = n_images / (3600 * images_per_s)
    if deadline_h <= boot_h:
        return None
    machines = ceil(work_h / (deadline_h - boot_h))
    return machines, machines * price * (boot_h + work_h / machines)


def changed(machines=lambda right, *_: right, money=lambda right, *_: right):
    def answer(*arguments):
        right = plan(*arguments)
        return right and (machines(right[0], *arguments), money(right[1], right[0], *arguments))

    return answer


def work_of(n_images, deadline_h, rate, *_):
    return n_images / rate / 3600


def without_a_way_out(n_images, deadline_h, rate, boot_h, price):
    work_h = work_of(n_images, deadline_h, rate)
    machines = ceil(round(work_h / (deadline_h - boot_h), 9))  # divides by zero where all of the time is booting
    return machines, (machines * boot_h + work_h) * price


test_plan = pytest.mark.smoke(
    judged(
        exercises.check_plan,
        (plan, "Correct"),
        (changed(money=lambda right, *_: round(right, 2)), "Correct"),
        (lambda *_: None, "None"),
        (lambda *_: (1, 2, 3), "two numbers.*not .1, 2, 3"),
        (changed(machines=lambda right, *_: right - 0.5), "round up"),
        (changed(machines=lambda _, *a: ceil(work_of(*a) / a[1])), "all of the 1 hours"),
        (changed(machines=lambda _, *a: max(1, round(work_of(*a) / (a[1] - a[3])))), "2 machine.*not done"),
        (changed(machines=lambda _, *a: ceil(3600 * work_of(*a) / (a[1] - a[3]))), "by 3600"),
        (changed(machines=lambda right, *_: right + 1), "2 machines.*but 1 would"),
        (changed(money=lambda _, n, *a: work_of(*a) * a[4]), "paid while it boots"),
        (changed(money=lambda _, n, *a: n * a[1] * a[4]), "until the deadline"),
        (changed(money=lambda _, n, *a: (a[3] + work_of(*a)) * a[4]), "boot of one machine"),
        (changed(money=lambda right, *_: right * 60), "at 0.5 an hour"),
        (without_a_way_out, "0.1 hours.*None"),
        (lambda *a: plan(*a) if a[1] != a[3] else 1 / 0, "divides by zero.*None"),
    )
)


class TwoHosts:
    """A client that runs tasks here: the check gives each host a home folder of its own."""

    def nthreads(self):
        return {"tcp://a": 1, "tcp://b": 1}

    def submit(self, function, *args, workers, pure):
        self._result = function(*args)
        return self

    def result(self):
        return self._result


def move(shared, n_steps, at="{shared}/small.pt", done=1, exists=checkpoint_exists, skip=(), every=1, out=dict):
    model, optimizer = exercises.small_model()
    at, first, losses = at.format(shared=shared), 0, {}

    def save(step):
        save_checkpoint(at, step=step + done, model=model.state_dict(), optimizer=optimizer.state_dict())

    if exists(at):
        saved = load_checkpoint(at)
        for name, part in (("model", model), ("optimizer", optimizer)):
            if name not in skip:
                part.load_state_dict(saved[name])
        first = saved["step"]
    try:
        for step in range(first, n_steps):
            losses[step] = exercises.take_step(model, optimizer, step)
            if every and (step + 1) % every == 0:
                save(step)
    finally:  # a host that is taken away does not get here
        if not every:
            save(step)
    return out(losses)


class OneHost(TwoHosts):
    def nthreads(self):
        return {"tcp://a": 1}


def test_with_one_host_the_check_says_what_is_missing():
    with pytest.raises(exercises.NotYet, match="a single worker is left: start one on the other host"):
        exercises.check_move(move, OneHost())


test_no_wrong_move_passes = judged(
    lambda answer: exercises.check_move(answer, TwoHosts()),
    (lambda *_: None, "takes no step"),
    (partial(move, out=list), "not .5, 6, 7, 8, 9"),
    (partial(move, every=None), "after each step"),
    (partial(move, every=5), "gone before step 6.*step 5 was taken on both.*after each step"),
    (partial(move, exists=os.path.exists), "began again"),
    (partial(move, at="{shared}small.pt"), "with a / before the name"),
    (partial(move, at="{shared}"), "nothing was left below"),
    (partial(move, at="memory://other/small.pt"), "whole address used"),
    (partial(move, exists=lambda _: True), "ask checkpoint_exists"),
    (partial(move, done=0), "step 4"),
    (partial(move, done=2), "not 5 to 9"),
    (partial(move, skip=("optimizer",)), "step 6.*both states"),
)


@pytest.mark.parametrize("at", ["{shared}/small.pt", "{shared}/of-mine/checkpoint"])
def test_a_right_move_passes_and_the_home_folder_is_as_before(at, capsys):
    before = os.environ.get("HOME"), os.getcwd()
    exercises.check_move(partial(move, at=at), TwoHosts())
    assert capsys.readouterr().out.startswith("Correct. Host b went on where host a had stopped")
    assert before == (os.environ.get("HOME"), os.getcwd())
