"""Notebook 10: wrong answers get a hint, never a traceback, and right ones pass however they are written."""

import os
from functools import partial
from math import ceil
from pathlib import Path

import nbformat
import pytest

from workshop_utils.exercises import NotYet, ours, unanswered
from workshop_utils.exercises import beyond_one_machine as exercises
from workshop_utils.models import checkpoint_exists, load_checkpoint, save_checkpoint

NOTEBOOK = Path(__file__).parents[2] / "notebooks/10-beyond-one-machine.ipynb"


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


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda *_: None, "None"),
        (lambda *_: 3, "cannot read"),
        (lambda *_: (1, 2, 3), "two numbers"),
        (changed(machines=lambda right, *_: right - 0.5), "round up"),
        (changed(machines=lambda _, *a: ceil(work_of(*a) / a[1])), "all of the 1 hours"),
        (changed(machines=lambda right, *_: right - 1), "0 machine.*not done"),
        (changed(machines=lambda right, *_: right + 1), "2 machines.*so do 1"),
        (changed(money=lambda _, n, *a: work_of(*a) * a[4]), "paid while it boots"),
        (changed(money=lambda _, n, *a: n * a[1] * a[4]), "until the deadline"),
        (changed(money=lambda _, n, *a: (a[3] + work_of(*a)) * a[4]), "boot of one machine"),
        (changed(money=lambda right, *_: right * 60), "at 0.5 an hour"),
        (without_a_way_out, "0.1 hours.*None"),
        (lambda *a: plan(*a) or (10**9, 0), "0.1 hours.*None"),
        (lambda *a: plan(*a) if a[1] != a[3] else 1 / 0, "ZeroDivisionError"),
    ],
)
def test_no_wrong_plan_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        exercises.check_plan(answer)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_right_plan_passes(kind, capsys):
    exercises.check_plan(lambda *arguments: (right := plan(*arguments)) and kind(right))
    assert capsys.readouterr().out.startswith("Correct. A shorter deadline")


def images_a_rank(n_ranks, gbit, gradients_mb, ms_an_image, bits=8, share=lambda n: 2 * (n - 1) / n, to=ceil, least=1):
    return max(least, to(share(n_ranks) * gradients_mb * bits / gbit / ms_an_image))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda *_: None, "still None"),
        (partial(images_a_rank, bits=1), "8 bits"),
        (partial(images_a_rank, share=lambda n: 1), "not all of them once"),
        (partial(images_a_rank, share=lambda n: 2), "not twice"),
        (partial(images_a_rank, share=lambda n: 2 * (n - 1)), "however many there are"),
        (partial(images_a_rank, to=lambda x: x), "round up"),
        (partial(images_a_rank, to=int), "round up, not down"),
        (lambda *a: 1000, "13000 ms.*625.8 ms"),
        (lambda *a: images_a_rank(*a) if a[0] > 1 else 0, "sends nothing"),
        (lambda *a: 0, "have at least one"),
        (lambda *a: "many", "cannot read"),
    ],
)
def test_no_wrong_number_of_images_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        exercises.check_images_a_rank(answer)


def test_the_right_number_of_images_passes(capsys):
    exercises.check_images_a_rank(images_a_rank)
    assert capsys.readouterr().out.startswith("Correct. On 1 Gbit/s, eight ranks of a ResNet-18 need 49 images each")


class TwoHosts:
    """A client that runs tasks here: the check gives each host a home folder of its own."""

    def nthreads(self):
        return {"tcp://a": 1, "tcp://b": 1}

    def submit(self, function, *args, workers, pure):
        self._result = function(*args)
        return self

    def result(self):
        return self._result


def move(shared, n_steps, at="{shared}/small.pt", done=1, exists=checkpoint_exists, skip=(), extra=0):
    model, optimizer = exercises.small_model()
    at, first, losses = at.format(shared=shared, home=Path.home()), 0, {}
    if exists(at):
        saved = load_checkpoint(at)
        for name, part in (("model", model), ("optimizer", optimizer)):
            if name not in skip:
                part.load_state_dict(saved[name])
        first = saved["step"]
    for step in range(first, n_steps + extra):
        losses[step] = exercises.take_step(model, optimizer, step)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save_checkpoint(at, step=step + done, **states)
    return losses


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda *_: None, "still None"),
        (lambda *_: [0.1], "not list"),
        (exercises.given_move, "`shared`"),
        (partial(move, extra=1), "steps 0 to 4"),
        (partial(move, at="{home}/small.pt"), "`shared`"),
        (partial(move, at="small.pt"), "`shared`"),
        (partial(move, exists=os.path.exists), "began anew"),
        (partial(move, done=0), "step 4"),
        (partial(move, done=2), "not 5 to 9"),
        (partial(move, skip=("optimizer",)), "step 6.*both states"),
        (partial(move, skip=("model",)), "step 5.*both states"),
        (lambda shared, n: Path(shared, "small.pt").read_bytes(), "FileNotFoundError"),
    ],
)
def test_no_wrong_move_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        exercises.check_move(answer, TwoHosts())


@pytest.mark.parametrize("at", ["{shared}/small.pt", "{shared}/of-mine/checkpoint"])
def test_a_right_move_passes_and_the_home_folder_is_as_before(at, capsys):
    before = os.environ.get("HOME"), os.getcwd()
    exercises.check_move(partial(move, at=at), TwoHosts())
    assert capsys.readouterr().out.startswith("Correct. Host b went on where host a had stopped")
    assert before == (os.environ.get("HOME"), os.getcwd())


def test_the_notebooks_stub_repeats_the_given_function():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (stub,) = [cell.source for cell in notebook.cells if cell.source.startswith("def move(")]
    written: dict = {}
    exec(stub, written)
    assert unanswered(written["move"], given=exercises.given_move)


RIGHT = {"ntasks": 8, "signal": "TERM@300", "open_mode": "append", "checkpoint": "{shared}/model.pt"}


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ("--ntasks=8", "should be a dict"),
        ({"ntasks": 8}, "checkpoint, open_mode, signal"),
        (RIGHT | {"ntasks": 6}, "six tasks leave four"),
        (RIGHT | {"ntasks": 7}, "seven tasks leave five"),
        (RIGHT | {"ntasks": 12}, "12 tasks are 10 ranks"),
        (RIGHT | {"ntasks": "many"}, "cannot read"),
        (RIGHT | {"signal": "B:TERM@300"}, "batch script"),
        (RIGHT | {"signal": "TERM"}, "names no time"),
        (RIGHT | {"signal": "USR1@300"}, "train saves on SIGTERM"),
        (RIGHT | {"signal": "TERM@5"}, "5 s"),
        (RIGHT | {"signal": "TERM@14000"}, "too early"),
        (RIGHT | {"open_mode": "truncate"}, "empties"),
        (RIGHT | {"open_mode": "w"}, "append or truncate"),
        (RIGHT | {"checkpoint": "/tmp/model.pt"}, "belongs to one host"),
        (RIGHT | {"checkpoint": "~/model.pt"}, "home folder"),
        (RIGHT | {"checkpoint": "model.pt"}, "no address below"),
        (RIGHT | {"checkpoint": "{shared}"}, "no address below"),
    ],
)
def test_no_wrong_allocation_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        exercises.check_allocation(answer)


@pytest.mark.parametrize(
    "answer",
    [
        RIGHT,
        RIGHT | {"ntasks": "8", "signal": "SIGTERM@120"},
        RIGHT | {"signal": "15@600", "checkpoint": "s3://bucket/model.pt"},
        RIGHT | {"signal": "term@60", "open_mode": "Append", "nodes": 2},
    ],
)
def test_a_right_allocation_passes(answer, capsys):
    exercises.check_allocation(answer)
    assert capsys.readouterr().out.startswith("Correct. Eight tasks for six ranks")


def test_the_solution_is_named_as_ours(capsys):
    exercises.check_allocation(ours(dict(RIGHT)))
    assert capsys.readouterr().out.startswith("That was our solution.")
