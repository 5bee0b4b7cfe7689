"""What is the same for every launcher, and so no line of its user: model, images, settings, and the measuring."""

import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

N_RANKS = 2
BATCH_SIZE = 16  # images of 32 x 32 on each rank
EPOCHS, STEPS_PER_EPOCH = 3, 3  # with a checkpoint after each epoch
LR, MOMENTUM = 0.003, 0.9  # at 0.01, rounding alone changes the last loss by 5e-4


def build_model():
    """Return ResNet-18 as usual for 32 x 32 pixels, the same in every process.

    It has GroupNorm instead of BatchNorm, so that it learns the same whichever images of a step share a rank:
    DistributedSampler deals them out singly, Accelerate in blocks.
    """
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10, norm_layer=partial(torch.nn.GroupNorm, 8))
    model.conv1 = torch.nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = torch.nn.Identity()
    return model


def make_images():
    """Return a dataset of (image (3, 32, 32), label), whose images are noise, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    n_images = STEPS_PER_EPOCH * N_RANKS * BATCH_SIZE
    return TensorDataset(
        torch.randn(n_images, 3, 32, 32, generator=generator), torch.randint(10, (n_images,), generator=generator)
    )


def loss_alone():
    """Return the last step's loss of the job in one process, by the plainest loop: what each launcher must reach."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for _ in range(EPOCHS):
        for images, labels in torch.utils.data.DataLoader(make_images(), N_RANKS * BATCH_SIZE):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    return loss.item()


def step_done(folder, rank, epoch, loss):
    """Note on a rank that an optimiser step has ended; epoch: from 0; loss: of this rank's images before the step."""
    note(folder, rank=rank, epoch=epoch, loss=loss.item(), threads=torch.get_num_threads())


def jobs():
    """Yield (folder, restarts) of each job that the command line names; note when it is called, and what it raises."""
    restarts, *folders = sys.argv[1:]
    for folder in folders:

        def raised(kind, *error, folder=folder):
            note(folder, raised=kind.__name__)
            sys.__excepthook__(kind, *error)

        sys.excepthook = raised
        note(folder, called=True)
        yield folder, int(restarts)


def note(folder, **row):
    """Append a row, with the time and this process's id, to a file of this process in the job's folder."""
    row = {"time": time.time(), "pid": os.getpid(), **row}
    with Path(folder, f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows_of(folder):
    """Return what all processes have noted in a job's folder, in the order of time; a step has its number in `step`."""
    rows = []
    for path in folder.glob("*.jsonl"):
        of_process = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        epochs = [row.get("epoch") for row in of_process]
        rows += [row | {"step": epochs[:number].count(row.get("epoch"))} for number, row in enumerate(of_process)]
    return sorted(rows, key=lambda row: row["time"])


def first_step(rows):
    """Return when all ranks had done their first step."""
    times = {row["rank"]: row["time"] for row in reversed(rows) if "rank" in row}
    return max(times.values())


def step_s(rows):
    """Return the slower rank's median seconds a step; those that begin an epoch, after a checkpoint, do not count."""
    seconds = []
    for rank in range(N_RANKS):
        mine = [row for row in rows if row.get("rank") == rank]
        pairs = zip(mine, mine[1:], strict=False)
        seconds.append([b["time"] - a["time"] for a, b in pairs if a["epoch"] == b["epoch"]])
    return max(map(statistics.median, seconds))


def final_loss(rows):
    """Return the last step's loss, the mean over the ranks; None if not all of them came to it."""
    end = EPOCHS - 1, STEPS_PER_EPOCH - 1
    last = {row["rank"]: row["loss"] for row in rows if (row.get("epoch"), row["step"]) == end}
    return statistics.mean(last.values()) if len(last) == N_RANKS else None
