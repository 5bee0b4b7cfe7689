"""Checks of notebook 10 · Beyond one machine."""

import os
import re
import sys
import tempfile
from contextlib import chdir
from math import ceil
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from workshop_utils.exercises import Answer, exercise, expect, passed, which_mistake
from workshop_utils.models import load_checkpoint, save_checkpoint
from workshop_utils.storage import open_address

MOVED_AFTER, N_STEPS = 5, 10
exercises = sys.modules[__name__]  # the notebook's name for this module, which given_move repeats


@exercise
def check_plan(plan: Answer) -> None:
    questions = (1e6, 12, 77.7, 0.1, 0.5), (1e6, 1, 77.7, 0.25, 0.5), (36e4, 1.5, 100, 0.5, 2), (1e6, 100, 50, 0, 1)
    for n_images, deadline_h, rate, boot_h, price in questions:
        about = f"plan({n_images:g}, {deadline_h}, {rate}, {boot_h}, {price})"
        answer, work_h = plan(n_images, deadline_h, rate, boot_h, price), n_images / rate / 3600
        right = ceil(round(work_h / (deadline_h - boot_h), 9))
        expect(answer is not None, f"{about} is None, but {right} machine(s) can make it.")
        expect(len(answer) == 2, "plan should return two numbers: machines, money.")
        machines, money = map(float, answer)
        expect(machines == right, f"{about}: {_wrong_machines(machines, right, work_h, deadline_h, boot_h)}")
        due = (right * boot_h + work_h) * price
        expect(_close(money, due), f"{about}: {_wrong_money(money, right, work_h, deadline_h, boot_h, price)}")
    for deadline_h in (0.1, 0.25):
        late = plan(1e6, deadline_h, 77.7, 0.25, 0.5)
        expect(
            late is None,
            f"with a deadline of {deadline_h} hours, and a boot of 0.25, no number of machines is "
            f"done in time: return None, not {late!r}.",
        )
    passed("A shorter deadline costs more machines, and hardly more money, until starting them is most of the bill.")


def _wrong_machines(machines, right, work_h, deadline_h, boot_h):
    if machines != int(machines):
        return f"{machines:g} machines cannot be rented; round up."
    if machines == ceil(work_h / deadline_h):
        return f"{machines:g} machines would need all of the {deadline_h} hours for work, and each boots for {boot_h}."
    if machines < right:
        return f"{machines:g} machine(s) are not done after {deadline_h} hours."
    return f"{machines:g} machines make it, and so do {right}."


def _wrong_money(money, machines, work_h, deadline_h, boot_h, price):
    mistakes = {
        "pays for the work, but each machine is paid while it boots, too.": work_h * price,
        "pays for all machines until the deadline; they are done, and given back, before.": (
            machines * deadline_h * price
        ),
        f"pays for the boot of one machine; {machines} of them boot.": (boot_h + work_h) * price,
    }
    otherwise = (
        f"is wrong: all machines work {work_h:.2f} hours, and boot {machines} times {boot_h}, at {price} an hour."
    )
    return f"{money:.2f} {which_mistake(lambda wrong: _close(money, wrong), mistakes, otherwise)}"


@exercise
def check_images_a_rank(images_a_rank: Answer) -> None:
    for n, gbit, mb, ms in ((8, 1, 44.7, 13), (8, 10, 44.7, 0.5), (64, 100, 100, 0.5), (2, 1, 44.7, 13), (2, 10, 1, 5)):
        about = f"with {n} ranks, {gbit} Gbit/s, {mb} MB and {ms} ms an image"
        answer = images_a_rank(n, gbit, mb, ms)
        expect(answer is not None, "images_a_rank(...) is still None.")
        answer, right = float(answer), _images(n, gbit, mb, ms)
        expect(answer == int(answer), f"{about}: {answer:g} images cannot be: round up.")
        expect(answer >= 1, f"{about}: a rank without an image computes nothing; have at least one.")
        expect(answer == right, f"{about}: {answer:g} images? {_wrong_images(answer, n, gbit, mb, ms)}")
    alone = images_a_rank(1, 1, 44.7, 13)
    expect(alone == 1, f"one rank alone sends nothing and needs one image, not {alone!r}.")
    passed(f"On 1 Gbit/s, eight ranks of a ResNet-18 need {_images(8, 1, 44.7, 13)} images each, at 13 ms an image.")


def _images(n_ranks, gbit, mb, ms_an_image):
    return max(1, ceil(round(2 * (n_ranks - 1) / n_ranks * mb * 8 / gbit / ms_an_image, 9)))


def _wrong_images(images, n, gbit, mb, ms):
    ring = 2 * (n - 1) / n
    the_ring = "The ring sends 2 (n - 1) / n times the gradients"
    mistakes = {
        "A byte has 8 bits.": _images(n, gbit, mb / 8, ms),
        f"{the_ring}, not all of them once.": _images(n, gbit, mb / ring, ms),
        f"{the_ring}, not twice.": _images(n, gbit, mb * 2 / ring, ms),
        f"{the_ring} from each rank, however many there are.": _images(n, gbit, mb * n, ms),
        "They take less than sending does: round up, not down.": _images(n, gbit, mb, ms) - 1,
    }
    otherwise = f"They compute {images * ms:g} ms, and sending takes {ring * mb * 8 / gbit:.1f} ms."
    return which_mistake(lambda wrong: images == wrong, mistakes, otherwise)


def small_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return (model of (n, 8) to (n, 3), SGD with momentum), always the same ones."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train on the 96 images of a step; return their loss, which was computed before the optimiser moved."""
    drawn = torch.Generator().manual_seed(step)
    images, labels = torch.randn(96, 8, generator=drawn), torch.randint(3, (96,), generator=drawn)
    loss = cross_entropy(model(images + 2 * torch.eye(3, 8)[labels]), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def given_move(shared: str, n_steps: int) -> dict[int, float]:
    # The exercise asks to repair this; the notebook's stub repeats it.
    model, optimizer = exercises.small_model()
    checkpoint, first, losses = Path("~/small.pt").expanduser(), 0, {}
    if checkpoint.exists():
        saved = load_checkpoint(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, n_steps):
        losses[step] = exercises.take_step(model, optimizer, step)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save_checkpoint(checkpoint, step=step, **states)
    return losses


@exercise
def check_move(move: Answer, client: Answer) -> None:
    model, optimizer = small_model()
    right = [take_step(model, optimizer, step) for step in range(N_STEPS)]
    first_host, second_host = list(client.nthreads())[:2]
    with tempfile.TemporaryDirectory() as folder:
        shared, homes = f"file://{folder}/shared", [f"{folder}/home-{host}" for host in "ab"]
        before = client.submit(_at_home, homes[0], move, shared, MOVED_AFTER, workers=first_host, pure=False).result()
        expect(before is not None, "move(...) is still None.")
        expect(isinstance(before, dict), f"move should return {{step: loss}}, not {type(before).__name__}.")
        expect(
            list(before) == list(range(MOVED_AFTER)),
            f"on the first host it should take the steps 0 to 4, not {list(before)}.",
        )
        fs, place = open_address(shared)
        left = fs.find(place) if fs.exists(place) else []
        after = client.submit(_at_home, homes[1], move, shared, N_STEPS, workers=second_host, pure=False).result()
    expect(left, "the first host left nothing in `shared`, where the second could find it: where is the checkpoint?")
    expect(
        0 not in after,
        f"{Path(left[0]).name} is in `shared`, but the second host began anew: does it look at the "
        "same address, with checkpoint_exists?",
    )
    expect(MOVED_AFTER - 1 not in after, "step 4 was taken on both hosts: how many steps are done once it has been?")
    in_order = list(after) == list(range(MOVED_AFTER, N_STEPS))
    expect(in_order, f"the second host took the steps {list(after)}, not 5 to 9.")
    for step, loss in after.items():
        expect(
            _close(float(loss), right[step]),
            f"the loss of step {step} is {loss:.4f}, not {right[step]:.4f} as "
            "without a move: load both states, the model's and the optimiser's, into what is trained.",
        )
    passed("Host b went on where host a had stopped, as if nothing had happened.")


@exercise
def check_allocation(answer: Answer) -> None:
    expect(answer is not None, "allocation is still None.")
    expect(isinstance(answer, dict), f"allocation should be a dict, not {type(answer).__name__}.")
    missing = {"ntasks", "signal", "open_mode", "checkpoint"} - set(answer)
    expect(not missing, f"allocation lacks {', '.join(sorted(missing))}.")
    n_tasks, signal = int(answer["ntasks"]), str(answer["signal"]).upper().replace("SIG", "")
    expect(n_tasks != 6, "six tasks leave four for ranks: SLURMRunner takes one as scheduler and one as client.")
    expect(n_tasks != 7, "seven tasks leave five for ranks: the scheduler needs a task, and so does the client.")
    expect(n_tasks == 8, f"{n_tasks} tasks are {n_tasks - 2} ranks, a scheduler and a client; six ranks are wanted.")
    found = re.fullmatch(r"(R?B:|R:)?(TERM|15)@(\d+)", signal)
    expect("B:" not in signal, "with B:, the batch script alone hears the signal, and the ranks are killed later.")
    expect("@" in signal, f"{signal!r} names no time: Slurm's default is 60 seconds before; write TERM@SECONDS.")
    expect(found, f"{answer['signal']!r}: train saves on SIGTERM, so write TERM@ and a number of seconds.")
    seconds = int(found[3]) if found else 0
    expect(seconds >= 30, f"{seconds} s: all ranks have to finish a step and write a checkpoint; give them more.")
    expect(seconds <= 3600, f"{seconds} s before the end, of four hours, is too early; some minutes are enough.")
    mode, checkpoint = str(answer["open_mode"]).lower(), str(answer["checkpoint"])
    expect(mode != "truncate", "truncate empties the log of the job before, which may say why it ended.")
    expect(mode == "append", f"open_mode is {mode!r}: write append or truncate.")
    expect(not checkpoint.startswith("/tmp"), "/tmp belongs to one host, and the next job may get others.")
    expect(
        not checkpoint.startswith("~"),
        "~ is the home folder: on some clusters shared, on your two hosts it was not. Use what was made for it.",
    )
    expect(re.match(r"\{shared\}/.|\w+://.", checkpoint), f"{checkpoint!r} is no address below {{shared}}.")
    passed("Eight tasks for six ranks; all of them hear the signal; the next job finds the log and the checkpoint.")


def _at_home(home, function, *args):
    # On real hosts, the home folder and the current folder are the host's own.
    os.makedirs(home, exist_ok=True)
    before = os.environ.get("HOME")
    os.environ["HOME"] = home
    try:
        with chdir(home):
            return function(*args)
    finally:
        del os.environ["HOME"]
        if before:
            os.environ["HOME"] = before


def _close(one, other):
    return abs(one - other) <= 1e-4 * max(1.0, abs(other))
