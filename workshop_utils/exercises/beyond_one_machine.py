"""Checks of notebook 10 · Beyond one machine."""

import os
import re
import sys
import tempfile
from math import ceil
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from workshop_utils.exercises import Answer, exercise, expect, passed
from workshop_utils.models import load_checkpoint, save_checkpoint
from workshop_utils.storage import open_address

MOVED_AFTER, N_STEPS = 5, 10
exercises = sys.modules[__name__]  # as the notebook calls this module


@exercise
def check_plan(plan: Answer) -> None:
    for n_images, deadline_h, rate, boot_h, price in ((1e6, 12, 77.7, 0.1, 0.5), (1e6, 1, 77.7, 0.25, 0.5),
                                                      (36e4, 1.5, 100, 0.5, 2), (1e6, 100, 50, 0, 1)):  # fmt: skip
        about = f"plan({n_images:g}, {deadline_h}, {rate}, {boot_h}, {price})"
        answer, work_h = plan(n_images, deadline_h, rate, boot_h, price), n_images / rate / 3600
        right = ceil(round(work_h / (deadline_h - boot_h), 9))
        expect(answer is not None, f"{about} is None, but {right} machine(s) can make it.")
        expect(len(answer) == 2, "plan should return two numbers: machines, money.")
        machines, money = map(float, answer)
        expect(machines == int(machines), f"{about}: {machines:g} machines cannot be rented; round up.")
        all_work = ceil(work_h / deadline_h)
        expect(machines == right or machines != all_work, f"{about}: {all_work} machines would need all of the "
               f"{deadline_h} hours for work, and each boots for {boot_h} first.")  # fmt: skip
        expect(machines >= right, f"{about}: {machines:g} machine(s) are not done after {deadline_h} hours.")
        expect(machines == right, f"{about}: {machines:g} machines make it, and so do {right}.")
        due = (right * boot_h + work_h) * price
        expect(_close(money, due) or not _close(money, work_h * price), f"{about}: {money:.2f} pays for the work, but "
               "each machine is paid while it boots, too.")  # fmt: skip
        expect(_close(money, due) or not _close(money, right * deadline_h * price), f"{about}: {money:.2f} pays for "
               "all machines until the deadline; they are done, and given back, before.")  # fmt: skip
        once = (boot_h + work_h) * price
        expect(_close(money, due) or not _close(money, once), f"{about}: {money:.2f} pays for the boot of one machine; "
               f"{right} of them boot.")  # fmt: skip
        expect(_close(money, due), f"{about}: all machines together work {work_h:.2f} hours and boot {right} times "
               f"{boot_h}; at {price} an hour that is not {money:.2f}.")  # fmt: skip
    for deadline_h in (0.1, 0.25):
        late = plan(1e6, deadline_h, 77.7, 0.25, 0.5)
        expect(late is None, f"with a deadline of {deadline_h} hours, and a boot of 0.25, no number of machines is "
               f"done in time: return None, not {late!r}.")  # fmt: skip
    passed("A shorter deadline costs more machines, and hardly more money, until starting them is most of the bill.")


@exercise
def check_images_a_rank(images_a_rank: Answer) -> None:
    for n, gbit, mb, ms in ((8, 1, 44.7, 13), (8, 10, 44.7, 0.5), (64, 100, 100, 0.5), (2, 1, 44.7, 13), (2, 10, 1, 5)):
        about = f"with {n} ranks, {gbit} Gbit/s, {mb} MB and {ms} ms an image"
        answer = images_a_rank(n, gbit, mb, ms)
        expect(answer is not None, "images_a_rank(...) is still None.")
        answer, right, ring = float(answer), _images(n, gbit, mb, ms), 2 * (n - 1) / n
        wrong = {
            "a byte has 8 bits": _images(n, gbit, mb / 8, ms),
            "the ring sends 2 (n - 1) / n times the gradients, not all of them once": _images(n, gbit, mb / ring, ms),
            "the ring sends 2 (n - 1) / n times the gradients, not twice": _images(n, gbit, mb * 2 / ring, ms),
            "the ring sends 2 (n - 1) / n times the gradients from each rank, however many there are":
                _images(n, gbit, mb * n, ms),
        }  # fmt: skip
        expect(answer == int(answer), f"{about}: {answer:g} images cannot be: round up.")
        expect(answer >= 1, f"{about}: a rank without an image computes nothing; have at least one.")
        for hint, value in wrong.items():
            expect(answer == right or answer != value, f"{about}: {answer:g} images? {hint}.")
        expect(answer != right - 1, f"{about}: {answer:g} images take less than sending does: round up, not down.")
        expect(answer == right, f"{about}: {answer:g} images compute {answer * ms:g} ms, and sending takes "
               f"{ring * mb * 8 / gbit:.1f} ms.")  # fmt: skip
    alone = images_a_rank(1, 1, 44.7, 13)
    expect(alone == 1, f"one rank alone sends nothing and needs one image, not {alone!r}.")
    passed(f"On 1 Gbit/s, eight ranks of a ResNet-18 need {_images(8, 1, 44.7, 13)} images each, at 13 ms an image.")


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
    # What the exercise asks to repair; the notebook's stub repeats it.
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
        expect(list(before) == list(range(MOVED_AFTER)), f"on the first host it should take the steps 0 to 4, not "
               f"{list(before)}.")  # fmt: skip
        fs, place = open_address(shared)
        left = fs.find(place) if fs.exists(place) else []
        after = client.submit(_at_home, homes[1], move, shared, N_STEPS, workers=second_host, pure=False).result()
    expect(left, "the first host left nothing in `shared`, where the second could find it: where is the checkpoint?")
    expect(0 not in after, f"{Path(left[0]).name} is in `shared`, but the second host began anew: does it look at the "
           "same address, with checkpoint_exists?")  # fmt: skip
    expect(MOVED_AFTER - 1 not in after, "step 4 was taken on both hosts: how many steps are done once it has been?")
    in_order = list(after) == list(range(MOVED_AFTER, N_STEPS))
    expect(in_order, f"the second host took the steps {list(after)}, not 5 to 9.")
    for step, loss in after.items():
        expect(_close(float(loss), right[step]), f"the loss of step {step} is {loss:.4f}, not {right[step]:.4f} as "
               "without a move: load both states, the model's and the optimiser's, into what is trained.")  # fmt: skip
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
    expect(not checkpoint.startswith("~"), "~ is the home folder: on some clusters shared, on your two hosts it was "
           "not. Use what was made for it.")  # fmt: skip
    expect(re.match(r"\{shared\}/.|\w+://.", checkpoint), f"{checkpoint!r} is no address below {{shared}}.")
    passed("Eight tasks for six ranks; all of them hear the signal; the next job finds the log and the checkpoint.")


def _images(n_ranks, gbit, mb, ms_an_image):
    return max(1, ceil(round(2 * (n_ranks - 1) / n_ranks * mb * 8 / gbit / ms_an_image, 9)))


def _at_home(home, function, *args):
    # A process has one home folder and one current folder; on real hosts, both are the host's own.
    os.makedirs(home, exist_ok=True)
    before = os.environ.get("HOME"), os.getcwd()
    os.environ["HOME"] = home
    os.chdir(home)
    try:
        return function(*args)
    finally:
        os.chdir(before[1])
        del os.environ["HOME"]
        os.environ |= {"HOME": before[0]} if before[0] else {}


def _close(one, other):
    return abs(one - other) <= 1e-4 * max(1.0, abs(other))
