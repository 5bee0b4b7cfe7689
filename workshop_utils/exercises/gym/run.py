"""What a rank of the gym runs: the reference training on small sketches, with instruments, and with a fault or none."""

import ast
import gc
import inspect
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import psutil
import torch
from torch import nn
from torchvision.transforms.functional import pil_to_tensor

from workshop_utils import data, training
from workshop_utils.checkpoint import RunCheckpoint, load_checkpoint, save_checkpoint
from workshop_utils.data import ImageFolder
from workshop_utils.exercises.gym.drawn import EPOCHS, RESUMED_AT, SAVED_EVERY, Drawn
from workshop_utils.exercises.gym.faults import FOUND
from workshop_utils.loop.batches import TrainBatches
from workshop_utils.loop.ranks import world
from workshop_utils.loop.settings import COMPRESSIONS

BATCH_SIZE, N_BREEDS = 32, 12
# The pieces of the training that can be replaced.
PIECES: dict[str, tuple[Any, str | None]] = {
    "keep": (RunCheckpoint, "keep"),
    "resume": (RunCheckpoint, "resume"),
    "batches": (TrainBatches, "_batches"),
    "step": (training, "_take_step"),
    "logits": (training, "_logits"),
    "read": (data, "read_files"),
    "send": (COMPRESSIONS, None),
}
Replace = Callable[[Any, Any], Any]  # (here, original) -> replacement of a piece


@dataclass(frozen=True)
class Plan:
    """What all ranks of a run are told.

    photos: address of the sketches. checkpoint: to resume from, and to write. memory_limit: of a rank's process, in
    bytes; None for no limit. start: where to copy the checkpoint after step `RESUMED_AT`, if it is wanted. mended:
    replacements of pieces that the attendee wrote.
    """

    photos: str
    checkpoint: str
    drawn: Drawn
    memory_limit: int | None = None
    start: str | None = None
    mended: dict[str, Replace] = field(default_factory=dict)


@dataclass
class Here:
    """What a fault knows on a rank.

    step: the one that is taken now, from 1. reading: the one whose images are read now, in the DataLoader's child.
    began: when each step began or, in that child, each read.
    """

    plan: Plan
    rank: int
    threads: int
    memory_limit: int
    n_weights: int
    pid: int = field(default_factory=os.getpid)
    step: int = 0
    reading: int = 0
    began: list[float] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    sent_norm: float = float("nan")

    @property
    def drawn(self) -> Drawn:
        return self.plan.drawn

    @property
    def pace(self) -> float:
        """Seconds that a step of this run took before the fault began."""
        assert self.drawn.step
        before = self.began[: self.drawn.step - RESUMED_AT]
        return median(later - earlier for earlier, later in pairwise(before))

    def strikes(self, step: int | None = None) -> bool:
        """Return whether the fault begins on this rank in this step, by default the one that is taken now."""
        return self._is_mine() and self.drawn.step == (self.step if step is None else step)

    def has_struck(self, step: int | None = None) -> bool:
        """Return whether the fault has begun on this rank by this step, by default the one that is taken now."""
        return self._is_mine() and self.drawn.step <= (self.step if step is None else step)  # type: ignore[operator]

    def _is_mine(self) -> bool:
        return bool(self.drawn.number) and self.drawn.rank in (None, self.rank)


def train_sketches(plan: Plan) -> dict:
    """Train on this rank, with the fault of the plan, and return what `training.train` returns."""
    gc.collect()  # else a child would collect the DataLoader of a run that failed before, and hang (seen)
    threads = torch.get_num_threads()
    torch.manual_seed(0)  # the weights are then the same on all ranks
    model = SmallModel()
    n_weights = sum(weight.numel() for weight in model.parameters())
    here = Here(plan, world()[0], threads, plan.memory_limit or 0, n_weights)
    photos = ImageFolder(plan.photos, as_tensor)
    try:
        with _forked_readers_on_the_cpu(), replaced(here):
            return training.train(
                model,
                photos,
                checkpoint=plan.checkpoint,
                checkpoint_every=SAVED_EVERY,
                num_workers=1,
                epochs=EPOCHS,
                batch_size=BATCH_SIZE,
                lr=0.02,
            )
    finally:
        torch.set_num_threads(threads)
        here.kept.clear()
        multiprocessing.active_children()  # a reader that was killed stays a zombie until this


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
        self.fc = nn.Linear(64, N_BREEDS)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(4 * (images - self.mean)))


def as_tensor(image: Any) -> torch.Tensor:
    """Return a sketch of 32 x 32 pixels as (3, 32, 32) float32 in [0, 1]."""
    return pil_to_tensor(image).float() / 255


@contextmanager
def replaced(here: Here) -> Iterator[None]:
    """Have all pieces of the training replaced in the block, most by what does the same."""
    with ExitStack() as stack:
        for piece, (owner, name) in PIECES.items():
            new = _replacement(here, piece, original_of(piece))
            stack.enter_context(patch.object(owner, name, new) if name else patch.dict(COMPRESSIONS, {None: new}))
        yield


def original_of(piece: str) -> Any:
    """Return the function that a piece is now."""
    owner, name = PIECES[piece]
    return getattr(owner, name) if name else COMPRESSIONS[None]


def _replacement(here, piece, original):
    """Return what stands for a piece. Each run has as many layers, so that a stack tells nothing by its height."""
    drawn = FOUND.get(here.drawn.number)
    if piece in here.plan.mended:
        make = here.plan.mended[piece]
    elif drawn and drawn.piece == piece:
        make = disguised(drawn.make, original, drawn.at)
    else:
        make = disguised(_as_ever, original)
    before, after = (disguised(table.get(piece, _as_ever), original) for table in (BEFORE, AFTER))
    return after(here, make(here, before(here, original)))


def disguised(make: Replace, original: Any, at: str = "") -> Replace:
    """Return `make`, compiled anew so that a stack shows what it returns as `original`, in a line of that.

    make: a function of a module, which defines one function and returns it. at: text of the line; empty for the first.
    The call of `original` itself is shown in the first line.
    """
    lines, start = inspect.getsourcelines(original)
    first = start + next(n for n, text in enumerate(lines) if "def " in text)
    stands = start + next(n for n, text in enumerate(lines) if at in text) if at else first
    tree: Any = ast.parse(inspect.getsource(make))
    outer = tree.body[0]
    outer.decorator_list, inner = [], outer.body[0].name
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            line = first if "original(" in ast.unparse(node) else stands
            vars(node).update(lineno=line, end_lineno=line, col_offset=0, end_col_offset=0)
        for field_with_a_name in ("name", "id"):
            if getattr(node, field_with_a_name, None) == inner:
                setattr(node, field_with_a_name, original.__name__)
    names = dict(make.__globals__)
    exec(compile(tree, original.__code__.co_filename, "exec"), names)
    return names[make.__name__]


@contextmanager
def _forked_readers_on_the_cpu() -> Iterator[None]:
    """Let DataLoaders fork their children, which then see what was replaced; no GPU is used.

    From Python 3.14 on, they come from a fork server by default.
    """
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        with patch.object(torch.cuda, "is_available", lambda: False):
            yield
    finally:
        multiprocessing.set_start_method(before, force=True)


# --- instruments, in every run


def _as_ever(here, original):
    def same(*args, **kwargs):
        return original(*args, **kwargs)

    return same


def _count_from_here(here, original):
    def resume(self):
        step, numbers = original(self)
        here.step = here.reading = step
        return step, numbers

    return resume


def _count_reads(here, original):
    def read(*args):
        here.reading += 1
        here.began.append(time.perf_counter())
        return original(*args)

    return read


def _measure_gradient(here, original):
    def send(group, bucket):
        here.sent_norm = bucket.buffer().norm().item()
        return original(group, bucket)

    return send


def _measure_step(here, original):
    def step(parallel, optimizer, rate, images, labels, run, sent):
        here.step, here.sent_norm = here.step + 1, float("nan")
        here.began.append(time.perf_counter())
        row = original(parallel, optimizer, rate, images, labels, run, sent)
        return row | {
            "gradient": here.sent_norm,
            "weights": fingerprint(parallel.parameters()),
            "momentum": momentum_norm(optimizer),
            "pixels": fingerprint([images]),
            "memory_mb": psutil.Process().memory_info().rss / 2**20,
            "torch_threads": torch.get_num_threads(),
        }

    return step


def _copy_the_start(here, original):
    def keep(self, step, numbers=None):
        original(self, step, numbers)
        if here.plan.start and step == RESUMED_AT and here.rank == 0:
            save_checkpoint(here.plan.start, **load_checkpoint(self.path))

    return keep


def fingerprint(tensors: Any) -> str:
    """Return eight hex digits that differ if any bit of any tensor does, but for one in 4 billion."""
    sum_so_far = 0
    for tensor in tensors:
        sum_so_far = zlib.crc32(tensor.detach().contiguous().numpy(), sum_so_far)
    return f"{sum_so_far:08x}"


def momentum_norm(optimizer: torch.optim.Optimizer) -> float:
    """Return the length of all moments of SGD, taken as one vector."""
    moments = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    return torch.stack([moment.norm() for moment in moments]).norm().item() if moments else 0.0


BEFORE = {"send": _measure_gradient}  # sees what the fault made of it
AFTER = {"step": _measure_step, "read": _count_reads, "resume": _count_from_here, "keep": _copy_the_start}
