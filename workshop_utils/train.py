"""The reference training loop: one process or many ranks, interrupted or not, take the same steps."""

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.models import ResNet

from daskrun import assert_equal_on_all_ranks, log_metrics
from workshop_utils.checkpoint import RunCheckpoint
from workshop_utils.loop.batches import TrainBatches, evaluation_batches, naming_dead_children
from workshop_utils.loop.chance import callers_chance_kept
from workshop_utils.loop.preemption import sigterm_noticed
from workshop_utils.loop.ranks import check_all_alike, own_device, world
from workshop_utils.loop.settings import COMPRESSIONS, Settings, check_run, whole
from workshop_utils.photos import HELD_OUT, DataSource, ImageFolder, train_val_split
from workshop_utils.precision import ieee_float32, precision_of
from workshop_utils.weights import IMAGENET_WEIGHTS, load_resnet, with_new_head

LR_BATCH = 32  # images a step that `lr` is meant for
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
BATCHNORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def prepare(source: DataSource, *, pretrained: bool = True, image_size: int = 96) -> tuple[ResNet, Subset, Subset]:
    """Return (model, train_set, val_set) of the workshop's training problem: tell the twelve held-out breeds apart.

    source: from `find_data`, the same on all ranks. pretrained: if False, all weights are drawn anew, not only the
    head's. image_size: pixels a side; images are (3, image_size, image_size). val_set has a quarter of each breed's.
    Afterwards torch draws in this process what follows from a seed of 0.
    """
    torch.manual_seed(0)  # the weights that are drawn are then the same on all ranks
    model = load_resnet(source.weights)[0]
    if not pretrained:
        model.apply(lambda layer: layer.reset_parameters() if hasattr(layer, "reset_parameters") else None)
    with_new_head(model, len(HELD_OUT))
    # A checkpoint of the model says these to `load_resnet`.
    model.about |= {"size": image_size, "categories": [breed.name.replace("_", " ") for breed in HELD_OUT]}
    transform = IMAGENET_WEIGHTS.transforms(resize_size=image_size, crop_size=image_size)
    dataset = ImageFolder(source.url, transform, storage_options=source.storage_options, breeds=HELD_OUT)
    return model, *train_val_split(dataset, 0.25, seed=0)


@ieee_float32()
@callers_chance_kept()
def train(
    model: torch.nn.Module,
    train_set: Dataset,
    val_set: Dataset | None = None,
    *,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 50,
    check_every: int = 0,
    num_workers: int = 0,
    after_step: Callable[[torch.nn.Module, torch.optim.Optimizer, torch.Tensor], dict] | None = None,
    **settings: Any,
) -> dict:
    """Train `model` in place with SGD and return a dict of numbers; call it on every rank alike, or in one process.

    model: a ResNet, perhaps from torch.compile, the same on all ranks; it ends in eval mode. train_set, val_set: of
    (image (3, h, w), label).
    checkpoint: a path or address that all ranks read and rank 0 writes: every `checkpoint_every` steps and after each
    epoch. If it exists, training resumes from it, with any world size: on CPUs to the bit as if it had never stopped
    with one or two ranks; gloo adds up more ranks in another order, so these agree to rounding (6e-8). `load_resnet`
    loads the file, if it loaded the model.
    check_every: steps after which the ranks compare their weights, bit by bit; 0 for never.
    num_workers: children that read images for training, and as many for validation. The dataset's class may be from a
    notebook's cell.
    after_step: called with (model, optimizer, images of this rank) after each step; the dict that it returns is logged
    with the step's numbers.
    settings: the fields of `Settings`, such as epochs=3, lr=0.03. Float32 keeps all its digits, also on a GPU. What the
    caller draws at random, before or after, neither changes the run nor is changed by it.

    Returns steps; resumed_at, the steps that were done before; images_per_s, over all ranks, without evaluation;
    train_loss of this rank's last batch; with a val_set also accuracy and loss on it.
    Logs for each step: step (from 1), epoch (from 0), loss, lr, images (of this rank), and the seconds load_s (waiting
    for the DataLoader), comm_s (gradients still travel when nothing is left to compute), compute_s (all else). Rank 0
    logs step, epoch, val_accuracy, val_loss after each epoch.
    Raises ValueError for settings that cannot be and for a checkpoint of another run (other images are noticed if their
    number differs), FloatingPointError if the loss becomes infinite or NaN, AssertionError where check_every finds
    weights that differ, WeightsError for a damaged checkpoint. With a checkpoint, raises Preempted on all ranks once
    any of them got SIGTERM: after the step in which it came, or the evaluation, if the step ends an epoch. That is
    saved.
    """
    run, every = Settings(**settings), whole("checkpoint_every", checkpoint_every, 1)
    sizes = check_run(run, model, train_set, val_set, check_every)
    batches = TrainBatches(train_set, run.batch_size, run.seed, num_workers)
    val_loader = evaluation_batches(val_set, 64, num_workers, run.seed) if val_set is not None else None
    # torch.compile puts _orig_mod. before the weights' names.
    plain = getattr(model, "_orig_mod", model).to(own_device()).to(memory_format=torch.channels_last)
    optimizer, trained = _sgd(plain, run.body_lr)
    n_steps = run.epochs * batches.per_epoch

    with sigterm_noticed(saves=checkpoint is not None) as received:
        saved = RunCheckpoint(checkpoint, every, asdict(run) | sizes, plain, optimizer, received)
        step, numbers = saved.resume()
        resumed_at, seconds = step, 0.0
        for epoch in range(step // batches.per_epoch, run.epochs):
            _set_modes(model, trained, epoch < run.freeze_epochs, run.freeze_batchnorm)
            parallel, sent = _in_parallel(model, run)
            for images, labels, load_s in batches.of_epoch(epoch, step):
                rate = learning_rate(step, n_steps, run.lr, run.batch_size, run.warmup_steps)
                step += 1
                row = _take_step(parallel, optimizer, rate, images, labels, run, sent)
                more = after_step(plain, optimizer, images) if after_step else {}
                log_metrics(step=step, epoch=epoch, **row, **more, lr=rate, images=len(images), load_s=load_s)
                _check_step(model, row["loss"], step, run, check_every)
                seconds += load_s + row["compute_s"] + row["comm_s"]
                if step % batches.per_epoch:
                    saved.keep(step)
            numbers = {"steps": step, "images_per_s": (step - resumed_at) * run.batch_size / seconds}
            numbers |= {"train_loss": row["loss"], **_end_epoch(model, val_loader, run.precision, step, epoch)}
            saved.keep(step, numbers)

    _set_modes(model, trained, head_alone=False, freeze_batchnorm=False)
    model.eval()
    return {**numbers, "resumed_at": resumed_at}


@ieee_float32()
@callers_chance_kept()
def evaluate(
    model: torch.nn.Module, dataset: Dataset, *, batch_size: int = 64, precision: str = "fp32", num_workers: int = 0
) -> dict[str, float]:
    """Return accuracy, mean cross-entropy loss and n_images, over each image of `dataset` once, the same on all ranks.

    batch_size: images per forward pass on one rank. The model is left in the modes (train, eval) it was in, and what
    the caller draws at random stays the same.
    Raises ValueError for a dataset without images, and on all ranks if these have different numbers of images.
    """
    check_all_alike({"n_images": len(dataset)})  # type: ignore[arg-type]
    return _evaluate(model, evaluation_batches(dataset, batch_size, num_workers), precision)


def learning_rate(step: int, n_steps: int, lr: float, batch_size: int, warmup_steps: int = 0) -> float:
    """Return the learning rate of a step (from 0): linear scaling and warm-up (arXiv:1706.02677), then a cosine to 0.

    >>> [learning_rate(step, n_steps=6, lr=0.1, batch_size=64, warmup_steps=2) for step in range(6)]
    [0.1, 0.2, 0.2, 0.170..., 0.1, 0.029...]
    """
    peak = lr * batch_size / LR_BATCH
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * (1 + math.cos(math.pi * (step - warmup_steps) / (n_steps - warmup_steps))) / 2


def _check_step(model, loss, step, run, check_every):
    if not math.isfinite(loss):
        cure = f"lower lr, {run.lr}, or raise warmup_steps, {run.warmup_steps}"
        raise FloatingPointError(f"The loss of step {step} is {loss}: {cure}.")
    if check_every and step % check_every == 0:
        assert_equal_on_all_ranks(model, buffers=run.freeze_batchnorm)


def _sgd(model, body_lr):
    """Return (optimizer, the weights that it trains, by name)."""
    head = [weight for name, weight in model.named_parameters() if name.startswith("fc.")]
    body = [weight for name, weight in model.named_parameters() if not name.startswith("fc.")]
    groups = [{"params": head, "share": 1.0}, {"params": body, "share": body_lr}]
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    return torch.optim.SGD(groups, lr=0.0, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY), trained


def _set_modes(model, trained, head_alone, freeze_batchnorm):
    for name, weight in trained:
        weight.requires_grad_(not head_alone or name.startswith("fc."))
    for module in model.modules():
        module.training = not (freeze_batchnorm and isinstance(module, BATCHNORMS))


def _in_parallel(model, run):
    """Return (model that averages gradients over all ranks, dict with the moment "at" which it sent the last ones)."""
    sent: dict = {}

    def send(group, bucket):
        if bucket.is_last():
            sent["at"] = _moment()
        return COMPRESSIONS[run.compression](group, bucket)

    if world()[1] > 1:
        model = DistributedDataParallel(model)  # anew each epoch: it asks only now which weights are trained
        model.broadcast_buffers = not run.freeze_batchnorm  # torch 2.15 warns if this is given as an argument
        model.register_comm_hook(None, send)
    return model, sent


def _take_step(parallel, optimizer, rate, images, labels, run, sent):
    """Return the loss of this rank's images (batch_size / world size, 3, h, w), and the seconds it took."""
    start, loss = _moment(), torch.zeros((), device=own_device())
    labels = labels.to(own_device(), non_blocking=True)
    parts = zip(images.chunk(run.accumulate), labels.chunk(run.accumulate), strict=True)
    for position, (part, part_labels) in enumerate(parts, start=1):
        # Gradients add up on this rank, and travel with the last part.
        silent = position < run.accumulate and isinstance(parallel, DistributedDataParallel)
        with parallel.no_sync() if silent else nullcontext():
            logits = _logits(parallel, part, run.precision)  # (images of a part, n_classes)
            part_loss = cross_entropy(logits, part_labels, reduction="sum") / len(images)
            part_loss.backward()
        loss += part_loss.detach()
    arrived = _moment()
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]
    optimizer.step()
    optimizer.zero_grad()
    end, loss_value = _moment(), loss.item()  # waits for the GPU
    comm_s = _seconds(sent["at"], arrived) if sent else 0.0
    return {"loss": loss_value, "compute_s": _seconds(start, end) - comm_s, "comm_s": comm_s}


def _end_epoch(model, val_loader, precision, step, epoch):
    """Return accuracy and loss on the validation set, if there is one."""
    for buffer in model.buffers() if world()[1] > 1 else ():  # each rank's last batch left statistics of its own
        dist.broadcast(buffer, 0)
    if val_loader is None:  # a loader without batches is false, too: this rank may have no image
        return {}
    scores = _evaluate(model, val_loader, precision)
    if world()[0] == 0:
        log_metrics(step=step, epoch=epoch, val_accuracy=scores["accuracy"], val_loss=scores["loss"])
    return {"accuracy": scores["accuracy"], "loss": scores["loss"]}


@torch.no_grad()
def _evaluate(model: torch.nn.Module, loader: DataLoader, precision: str) -> dict[str, float]:
    device, modes = own_device(), [(module, module.training) for module in model.modules()]
    model.to(device).to(memory_format=torch.channels_last).eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # correct, loss, images
    with naming_dead_children(loader):
        for images, labels in loader:
            labels, logits = labels.to(device, non_blocking=True), _logits(model, images, precision)
            correct, loss = (logits.argmax(1) == labels).sum(), cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack([correct, loss, torch.tensor(len(images), device=device)]).double()
    if dist.is_initialized():
        dist.all_reduce(sums)
    for module, training in modes:
        module.training = training
    correct_sum, loss_sum, n_images = sums.tolist()
    return {"accuracy": correct_sum / n_images, "loss": loss_sum / n_images, "n_images": int(n_images)}


def _logits(model, images, precision):
    images = images.to(own_device(), memory_format=torch.channels_last, non_blocking=True)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision_of(precision) == "bf16"):
        return model(images).float()


def _moment():
    """Return this moment: of the clock, or of a GPU, which works behind the clock."""
    if own_device().type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start, end):
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
