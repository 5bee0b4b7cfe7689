"""The reference training loop: one process or many ranks, interrupted or not, take the same steps."""

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.models import ResNet

from daskrun import assert_equal_on_all_ranks, log_metrics
from workshop_utils.arguments import check_names, whole_number
from workshop_utils.labels import Names, check_agree, n_outputs, names_of
from workshop_utils.photos import HELD_OUT, DataSource, ImageFolder, train_val_split
from workshop_utils.precision import ieee_float32, precision_of
from workshop_utils.training.batches import (
    TrainBatches,
    check_all_alike,
    check_all_there,
    evaluation_batches,
    started,
    world,
)
from workshop_utils.training.preemption import Preempted as Preempted
from workshop_utils.training.preemption import sigterm_noticed
from workshop_utils.training.run_checkpoint import RunCheckpoint
from workshop_utils.weights import IMAGENET_WEIGHTS, load_resnet, with_new_head

LR_BATCH = 32  # images a step that `lr` is meant for
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
COMPRESSIONS = {None: hooks.allreduce_hook, "fp16": hooks.fp16_compress_hook, "bf16": hooks.bf16_compress_hook}


@dataclass
class Settings:
    """What a training run does; a checkpoint holds it, and a run with other settings does not resume from it.

    Raises ValueError for values that cannot be.
    """

    epochs: int = 1  #: passes over the training set
    batch_size: int = 32  #: images per optimizer step, over all ranks
    lr: float = 0.01  #: learning rate for 32 images a step; see `learning_rate`
    freeze_epochs: int = 0  #: the first epochs, so many, train the head `fc` alone
    warmup_steps: int = 0  #: steps in which the learning rate rises to its peak
    #: True keeps BatchNorm's running statistics and normalises with them. With False each rank normalises with its own
    #: part of the batch, and several ranks no longer equal one process.
    freeze_batchnorm: bool = True
    precision: str = "fp32"  #: "fp32", "bf16" or "auto", the faster one here; the weights stay float32
    compression: str | None = None  #: "fp16" or "bf16": the type in which gradients travel
    seed: int = 0  #: of the order of images, and of what datasets and layers draw from PyTorch

    def __post_init__(self) -> None:
        # NumPy's numbers become Python's, as torch.load reads no others.
        lowest = {"epochs": 1, "batch_size": 1, "freeze_epochs": 0, "warmup_steps": 0, "seed": 0}
        for name, least in lowest.items():
            setattr(self, name, whole_number(name, getattr(self, name), least))
        if not isinstance(self.lr, Real) or isinstance(self.lr, bool) or not 0 <= self.lr < math.inf:
            raise ValueError(f"lr is {self.lr!r}: give a finite number of at least 0.")
        if self.freeze_batchnorm not in (True, False):
            raise ValueError(f"freeze_batchnorm is {self.freeze_batchnorm!r}: write True or False.")
        if self.compression not in list(COMPRESSIONS):
            raise ValueError(f"compression is {self.compression!r}: write one of {list(COMPRESSIONS)}.")
        precision_of(self.precision)
        self.lr, self.freeze_batchnorm = float(self.lr), bool(self.freeze_batchnorm)
        self.precision, self.compression = str(self.precision), self.compression and str(self.compression)


def prepare(source: DataSource, *, pretrained: bool = True, image_size: int = 96) -> tuple[ResNet, Subset, Subset]:
    """Return (model, train_set, val_set) of the workshop's training problem: tell the twelve held-out breeds apart.

    source: from `find_data`, the same on all ranks. pretrained: if False, all weights are drawn at random, not only the
    head's. image_size: pixels a side; images are (3, image_size, image_size). val_set has a quarter of each breed's.
    Afterwards torch draws in this process what follows from a seed of 0.
    """
    torch.manual_seed(0)  # the weights that are drawn are then the same on all ranks
    model = load_resnet(source.weights)[0]
    if not pretrained:
        model.apply(lambda layer: layer.reset_parameters() if hasattr(layer, "reset_parameters") else None)
    with_new_head(model, len(HELD_OUT))
    # A checkpoint of the model says these to `load_resnet`.
    model.about["size"] = image_size
    model.fc.categories = [breed.name.replace("_", " ") for breed in HELD_OUT]
    transform = IMAGENET_WEIGHTS.transforms(resize_size=image_size, crop_size=image_size)
    dataset = ImageFolder(source.url, transform, storage_options=source.storage_options, breeds=HELD_OUT)
    return model, *train_val_split(dataset, 0.25, seed=0)


@ieee_float32()
def train(
    model: nn.Module,
    train_set: Dataset,
    val_set: Dataset | None = None,
    *,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 50,
    check_every: int = 0,
    num_workers: int = 0,
    after_step: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], dict] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train `model` in place with SGD, in one process or alike on every rank, and return a dict of numbers.

    With any number of ranks a step takes the same images, and float32 keeps all its digits, also on a GPU. If
    `checkpoint` exists, training resumes from it, with any number of ranks. With the same number, one or two ranks on
    CPUs end bit for bit where an undisturbed run ends; gloo adds up more ranks in another order, so these agree to
    rounding (6e-8), as does a run that resumes with another number.

    model: a ResNet, the same on all ranks; it ends in eval mode.
    train_set, val_set: datasets of (image (3, h, w), label, a whole number); on Dask workers, of classes that a
    notebook's cell may define. If they name their labels, as `ImageFolder` does, the names have to agree with each
    other, with those of the checkpoint and with `model.fc.categories`, which gets them where it has none.
    checkpoint: a path or address that rank 0 reads and writes, while no other run does. `load_resnet` loads the file,
    if it loaded the model, and its `fc` is one Linear.
    checkpoint_every: steps between two checkpoints; there is one after each epoch, too.
    check_every: steps after which the ranks compare their weights, bit by bit; 0 for never.
    num_workers: children that read images for training, and as many for validation.
    after_step: called with (model, optimizer, images of this rank) after each step; the dict that it returns is logged
    with the step's numbers.
    settings: the fields of `Settings`, such as epochs=3, lr=0.03.

    Returns these numbers:

    - `steps`, and `resumed_at`, the steps that were done before;
    - `images_per_s`, over all ranks, without evaluation;
    - `train_loss` of this rank's last batch;
    - with a val_set, `accuracy` and `loss` on it.

    Logs for each step:

    - `step` (from 1), `epoch` (from 0), `loss`, `lr`, and `images` (of this rank);
    - `load_s`, seconds of waiting for the DataLoader; `comm_s`, seconds in which gradients still travel when nothing
      is left to compute; `compute_s`, all other seconds.

    Rank 0 logs `step`, `epoch`, `val_accuracy` and `val_loss` after each epoch.

    Raises:

    - TypeError for a setting that there is not;
    - ValueError for settings that cannot be, on all ranks if these differ; for labels that mean several things, or are
      no class of the model; and for a checkpoint of another run (other images are noticed if their number differs);
    - FloatingPointError if the loss becomes infinite or NaN;
    - AssertionError if `check_every` finds weights that differ;
    - WeightsError for a damaged checkpoint;
    - CheckpointInUse for a checkpoint that another run is writing;
    - Preempted on all ranks, if there is a checkpoint and a rank got SIGTERM. That step is finished and saved, and so
      is the evaluation, if it ends an epoch.
    """
    run, sizes, classes = _check_run(settings, model, train_set, val_set, check_every)
    batches = TrainBatches(train_set, run.batch_size, run.seed, num_workers, n_outputs(model))
    val_loader = None if val_set is None else evaluation_batches(val_set, 64, num_workers, n_outputs(model), run.seed)
    n_steps = run.epochs * batches.per_epoch
    model.to(_own_device()).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer.zero_grad()  # of gradients that an interrupted run may have left

    with (
        ExitStack() as afterwards,
        torch.random.fork_rng(range(torch.cuda.device_count())),  # afterwards the caller draws as if nothing had been
        sigterm_noticed(saves=checkpoint is not None) as signals,
    ):
        # A run that is interrupted while the head trains alone must not leave the other layers frozen.
        afterwards.callback(_set_modes, model, trained, head_alone=False, freeze_batchnorm=False)
        saved = RunCheckpoint(checkpoint, checkpoint_every, asdict(run) | sizes, classes, model, optimizer, signals)
        check_all_alike({"has a checkpoint": checkpoint is not None})
        afterwards.enter_context(saved.locked())
        step, numbers = saved.resume()
        resumed_at, seconds = step, 0.0
        for epoch in range(step // batches.per_epoch, run.epochs):
            _set_modes(model, trained, epoch < run.freeze_epochs, run.freeze_batchnorm)
            parallel, sent = _in_parallel(model, run)
            for images, labels, load_s in batches.of_epoch(epoch, step):
                rate = learning_rate(step, n_steps, run.lr, run.batch_size, run.warmup_steps)
                optimizer.param_groups[0]["lr"] = rate
                done = _take_step(parallel, optimizer, images, labels, run, sent)
                step += 1
                more = after_step(model, optimizer, images) if after_step else {}
                log_metrics(
                    step=step, epoch=epoch, **done._asdict(), **more, lr=rate, images=len(images), load_s=load_s
                )
                if not math.isfinite(done.loss):
                    raise FloatingPointError(f"The loss of step {step} is {done.loss}: lower lr, {run.lr}, or warm up.")
                if check_every and step % check_every == 0:
                    assert_equal_on_all_ranks(model, buffers=run.freeze_batchnorm)
                seconds += load_s + done.compute_s + done.comm_s
                if step % batches.per_epoch:
                    saved.keep(step)
            numbers = {"steps": step, "images_per_s": (step - resumed_at) * run.batch_size / seconds}
            numbers |= {"train_loss": done.loss, **_end_epoch(model, val_loader, run, step, epoch)}
            saved.keep(step, numbers)

    model.eval()
    return {**numbers, "resumed_at": resumed_at}


@ieee_float32()
def evaluate(
    model: nn.Module, dataset: Dataset, *, batch_size: int = 64, precision: str = "fp32", num_workers: int = 0
) -> dict[str, float]:
    """Return accuracy, mean cross-entropy loss and n_images, over each image of `dataset` once, the same on all ranks.

    batch_size: images per forward pass on one rank. The model is left in the modes (train, eval) it was in, and what
    the caller draws from PyTorch stays the same. What the dataset draws is the same each time.
    Raises ValueError for a dataset without images, and on all ranks if these have different numbers of images; for a
    label that is no class of the model, or has another name in `model.fc.categories`. Raises FloatingPointError if the
    loss is infinite or NaN.
    """
    check_all_alike({"n_images": len(dataset)})  # type: ignore[arg-type]
    check_agree(names_of(model, dataset=dataset), check_all_alike)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        return _evaluate(model, evaluation_batches(dataset, batch_size, num_workers, n_outputs(model)), precision)


def learning_rate(step: int, n_steps: int, lr: float, batch_size: int, warmup_steps: int = 0) -> float:
    """Return the learning rate of a step (from 0): linear scaling and warm-up (arXiv:1706.02677), then a cosine to 0.

    >>> [learning_rate(step, n_steps=6, lr=0.1, batch_size=64, warmup_steps=2) for step in range(6)]
    [0.1, 0.2, 0.2, 0.170..., 0.1, 0.029...]
    """
    peak = lr * batch_size / LR_BATCH
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * (1 + math.cos(math.pi * (step - warmup_steps) / (n_steps - warmup_steps))) / 2


def _own_device() -> torch.device:
    """Return the device that this rank computes on: its own GPU, the current one of its process, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _Step(NamedTuple):
    """What a step gave: the loss of this rank's images, and the seconds it took."""

    loss: float
    compute_s: float
    comm_s: float


@dataclass
class _Sent:
    """When this rank had computed, and so sent, the last gradients of a step; None without other ranks."""

    at: Any = None


def _take_step(
    parallel: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,  # (batch_size / world size, 3, h, w)
    labels: torch.Tensor,  # (batch_size / world size,)
    run: Settings,
    sent: _Sent,
) -> _Step:
    start = _moment()
    labels = labels.to(_own_device(), non_blocking=True)
    loss = cross_entropy(_logits(parallel, images, run.precision), labels)
    loss.backward()
    arrived = _moment()
    optimizer.step()
    optimizer.zero_grad()
    end, loss_value = _moment(), loss.item()  # waits for the GPU
    comm_s = _seconds(sent.at, arrived) if sent.at is not None else 0.0
    return _Step(loss_value, _seconds(start, end) - comm_s, comm_s)


def _in_parallel(model: nn.Module, run: Settings) -> tuple[nn.Module, _Sent]:
    """Return the model as it averages gradients over all ranks, and where it notes when it sent the last ones."""
    sent = _Sent()
    if world()[1] == 1:
        return model, sent

    def send(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            sent.at = _moment()
        return COMPRESSIONS[run.compression](group, bucket)

    parallel = DistributedDataParallel(model)  # again each epoch: DDP looks only now which weights are trained
    parallel.broadcast_buffers = not run.freeze_batchnorm  # torch 2.15 warns if this is given as an argument
    parallel.register_comm_hook(None, send)
    return parallel, sent


def _set_modes(model: nn.Module, trained: list[nn.Parameter], head_alone: bool, freeze_batchnorm: bool) -> None:
    head = set(model.get_submodule("fc").parameters()) if head_alone else set()
    for weight in trained:
        weight.requires_grad_(not head_alone or weight in head)
    for module in model.modules():
        module.training = not (freeze_batchnorm and isinstance(module, BATCHNORMS))


def _end_epoch(model: nn.Module, loader: DataLoader | None, run: Settings, step: int, epoch: int) -> dict[str, float]:
    """Return accuracy and loss on the validation set, if there is one."""
    for buffer in model.buffers() if world()[1] > 1 else ():  # each rank's last batch left statistics of its own
        dist.broadcast(buffer, 0)
    if loader is None:  # a loader without batches is false, too: this rank may have no image
        return {}
    scores = _evaluate(model, loader, run.precision)
    if world()[0] == 0:
        log_metrics(step=step, epoch=epoch, val_accuracy=scores["accuracy"], val_loss=scores["loss"])
    return {"accuracy": scores["accuracy"], "loss": scores["loss"]}


@torch.no_grad()
def _evaluate(model: nn.Module, loader: DataLoader, precision: str) -> dict[str, float]:
    device, modes = _own_device(), [(module, module.training) for module in model.modules()]
    model.to(device).to(memory_format=torch.channels_last).eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # correct, loss, images
    for images, labels in started(loader):
        labels, logits = labels.to(device, non_blocking=True), _logits(model, images, precision)
        correct, loss = (logits.argmax(1) == labels).sum(), cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([correct, loss, torch.tensor(len(images), device=device)]).double()
    if dist.is_initialized():
        dist.all_reduce(sums)
    for module, training in modes:
        module.training = training
    correct_sum, loss_sum, n_images = sums.tolist()
    check_all_there(int(n_images), len(loader.dataset))  # type: ignore[arg-type]
    if not math.isfinite(loss_sum):
        raise FloatingPointError(f"The loss is {loss_sum}: the model's outputs for some of the images are not finite.")
    return {"accuracy": correct_sum / n_images, "loss": loss_sum / n_images, "n_images": int(n_images)}


def _logits(model: nn.Module, images: torch.Tensor, precision: str) -> torch.Tensor:
    images = images.to(_own_device(), memory_format=torch.channels_last, non_blocking=True)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision_of(precision) == "bf16"):
        return model(images).float()


def _moment() -> Any:
    """Return this moment: of the clock, or of a GPU, which works behind the clock."""
    if _own_device().type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


def _check_run(
    given: dict[str, Any],
    model: nn.Module,
    train_set: Dataset,
    val_set: Dataset | None,
    check_every: int,
) -> tuple[Settings, dict[str, int], dict[str, Names | None]]:
    """Return the settings, the sizes of the datasets and the names of their labels.

    Raises TypeError for an unknown setting, ValueError if the run does not fit the datasets, the model or the ranks.
    All ranks have to call this together. They raise alike, so that none waits for one that raised.
    """
    check_names(given, Settings, train)
    run, names = Settings(**given), names_of(model, train_set=train_set, val_set=val_set)
    whole_number("check_every", check_every, 0)
    sizes = {"n_images": len(train_set), "n_val_images": 0 if val_set is None else len(val_set)}  # type: ignore[arg-type]
    has = {"has a val_set": val_set is not None, "check_every": check_every}
    check_all_alike({**sizes, **has, **asdict(run)})
    check_agree(names, check_all_alike)
    n_ranks = world()[1]
    if run.batch_size % n_ranks:
        raise ValueError(
            f"batch_size {run.batch_size} cannot be shared by {n_ranks} ranks: give a multiple of {n_ranks}."
        )
    if sizes["n_images"] < run.batch_size:
        raise ValueError(
            f"The training set has {sizes['n_images']} images, fewer than one batch of {run.batch_size}: lower "
            "batch_size, or bring more images."
        )
    if run.freeze_epochs and not hasattr(model, "fc"):
        raise ValueError(f"freeze_epochs is {run.freeze_epochs}, but {type(model).__name__} has no head named fc.")
    return run, sizes, names
