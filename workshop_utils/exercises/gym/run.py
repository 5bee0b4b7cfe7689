"""What a rank of the gym runs: the reference training on small sketches, with instruments, and with a fault or none."""

import multiprocessing
import zlib
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torchvision.transforms.functional import to_tensor

from workshop_utils import photos, train
from workshop_utils.exercises.gym.faults import EPOCHS, RESUMED_AT, SAVED_EVERY, Diagnosis
from workshop_utils.exercises.gym.pieces import Piece, Pieces
from workshop_utils.photos import HELD_OUT, ImageFolder
from workshop_utils.storage import open_address
from workshop_utils.train import COMPRESSIONS
from workshop_utils.training.batches import TrainBatches, world
from workshop_utils.training.run_checkpoint import RunCheckpoint

BATCH_SIZE = 32


@dataclass(frozen=True)
class Plan:
    """What all ranks of a run are told.

    photos: address of the sketches. checkpoint: to resume from, and to write. truth: what is wrong. memory_limit: of a
    rank's process, in bytes; None for no limit. start: where to copy the checkpoint of step `RESUMED_AT`, in the clean
    run, which begins without one. mended: pieces that the attendee wrote, by name.
    """

    photos: str
    checkpoint: str
    truth: Diagnosis = Diagnosis()
    memory_limit: int | None = None
    start: str | None = None
    mended: dict[str, Piece] = field(default_factory=dict)


class SmallModel(nn.Module):
    """A model of (n, 3, 32, 32) images -> (n, 12) logits, which keeps what it normalises images with."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.full((3, 1, 1), 0.5))  # all ranks get rank 0's after each epoch
        layers: list[nn.Module] = []
        for n_in, n_out in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(4, n_out), nn.ReLU(), nn.MaxPool2d(2)]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(64, len(HELD_OUT))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(4 * (images - self.mean)))


# What each piece stands for, besides "send", which stands for COMPRESSIONS[None].
ORIGINALS: dict[str, tuple[Any, str]] = {
    "resume": (RunCheckpoint, "resume"),
    "batches": (TrainBatches, "_batches"),
    "read": (photos, "read_files"),
    "forward": (SmallModel, "forward"),
    "keep": (RunCheckpoint, "keep"),
}


def train_sketches(plan: Plan) -> dict:
    """Train on this rank, with the fault of the plan, and return what `train` returns."""
    torch.manual_seed(0)  # the weights are then the same on all ranks
    pieces = Pieces(world()[0], plan.truth, plan.memory_limit, step=0 if plan.start else RESUMED_AT)
    for name, function in plan.mended.items():
        setattr(pieces, name, function)

    def measured(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> dict:
        moments = [state["momentum_buffer"] for state in optimizer.state.values()]
        if plan.start and pieces.rank == 0 and pieces.step == RESUMED_AT + 1:  # the next checkpoint is written later
            copy(plan.checkpoint, plan.start)
        return {
            "gradient": pieces.gradient,
            "weights": fingerprint(model.parameters()),
            "momentum": get_total_norm(moments).item(),
            "pixels": fingerprint([images]),
            "memory_mb": psutil.Process().memory_info().rss / 2**20,
            "torch_threads": torch.get_num_threads(),
        }

    call_through(pieces)
    return train.train(
        SmallModel(),
        ImageFolder(plan.photos, to_tensor),
        checkpoint=plan.checkpoint,
        checkpoint_every=SAVED_EVERY,
        num_workers=1,
        after_step=measured,
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        lr=0.02,
    )


def call_through(pieces: Pieces) -> None:
    """Have this process's training call `pieces`, on the CPU. All runs do, so that their stacks are alike."""

    def through(name: str, original: Piece) -> Piece:
        def call(*args: Any) -> Any:
            if name in ("forward", "read"):  # a step's first, in a rank and in its DataLoader's child
                pieces.count_step()
            return getattr(pieces, name)(original, *args)

        return call

    def measured_send(group: Any, bucket: Any) -> Any:
        pieces.gradient = bucket.buffer().norm().item()  # one bucket holds all gradients
        return plain_send(group, bucket)

    for name, (owner, attribute) in ORIGINALS.items():
        setattr(owner, attribute, through(name, getattr(owner, attribute)))
    plain_send = COMPRESSIONS[None]
    COMPRESSIONS[None] = through("send", measured_send)
    torch.cuda.is_available = lambda: False
    multiprocessing.set_start_method("fork", force=True)  # a DataLoader's child has the pieces, too


def copy(source: str, target: str) -> None:
    """Copy a file to another address in the same storage."""
    fs, path = open_address(source)
    fs.copy(path, open_address(target)[1])


def fingerprint(tensors: Any) -> str:
    """Return eight hex digits that differ if any bit of any tensor does, but for one in 4 billion."""
    sum_so_far = 0
    for tensor in tensors:
        sum_so_far = zlib.crc32(tensor.detach().contiguous().numpy(), sum_so_far)
    return f"{sum_so_far:08x}"
