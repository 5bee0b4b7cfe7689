"""The reference training loop: one process or many ranks, interrupted or not, take the same steps."""

import math
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from workshop_utils.inference import PRECISIONS, precision_of
from workshop_utils.models import checkpoint_exists, load_checkpoint, save_checkpoint
from workshop_utils.results import log_metrics

LR_BATCH = 32  # images a step that `lr` is meant for
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
COMPRESSIONS = {
    None: default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


def train(model, train_set, val_set=None, *, epochs=1, batch_size=32, accumulate=1, lr=0.01, warmup_steps=0,
          freeze_epochs=0, freeze_batchnorm=True, precision="fp32", compression=None, augment=False, num_workers=0,
          seed=0, checkpoint=None, checkpoint_every=50, storage_options=None, about=None):  # fmt: skip
    """Train `model` in place with SGD; return a dict of numbers. On every rank alike, or in one process alone.

    model: a ResNet, the same on all ranks; it ends in eval mode. train_set, val_set: of (image (3, h, w), label).
    batch_size: images per optimiser step, over all ranks; each forward takes batch_size / (world size * accumulate).
    lr: for 32 images a step; see `learning_rate`.
    freeze_epochs: so many first epochs train the head `fc` alone. freeze_batchnorm: keep BatchNorm's running
    statistics and normalise with them; where False, each rank normalises with its own part of the batch, and several
    ranks no longer equal one process.
    precision: "fp32", "bf16" or "auto" (bf16 where the machine computes in it); the weights stay float32.
    compression: None, "fp16" or "bf16", in which gradients travel. augment: mirror half of the images.
    checkpoint: a path or address that all ranks read and rank 0 writes: every `checkpoint_every` steps and after each
    epoch. Where it exists, training goes on from it, with any world size. It holds what `load_resnet` needs once
    `about` names it: {"arch": "resnet18", "num_classes": 12, "categories": […]}. storage_options: for its address.

    Returns steps; resumed_at, the steps that were already done; images_per_s, over all ranks, without evaluation;
    train_loss of this rank's last batch; with a val_set also accuracy and loss on it.
    Logs per step: step (from 1), epoch (from 0), loss, lr, images (of this rank), and the seconds load_s (waiting for
    the DataLoader), comm_s (gradients on the way while nothing is left to compute), compute_s (all else). Rank 0 logs
    step, epoch, val_accuracy, val_loss after each epoch.
    Raises ValueError for settings that cannot be, and for a checkpoint of another run.
    """
    rank, world_size = _world()
    settings = {
        "epochs": epochs, "batch_size": batch_size, "accumulate": accumulate, "lr": lr, "warmup_steps": warmup_steps,
        "freeze_epochs": freeze_epochs, "freeze_batchnorm": freeze_batchnorm, "precision": precision,
        "compression": compression, "augment": augment, "seed": seed, "n_images": len(train_set),
        "n_weights": sum(weight.numel() for weight in model.parameters()),
    }  # fmt: skip
    _check(settings, world_size, model)
    loop = _Loop(model, train_set, num_workers, **settings)
    step, numbers = _resume(checkpoint, storage_options, settings, loop) if checkpoint else (0, {})
    _check_agreement(step, settings)
    resumed_at, seconds, loss = step, 0.0, math.nan

    def save(numbers):
        if checkpoint and rank == 0:
            state = {"state_dict": model.state_dict(), "optimizer": loop.optimizer.state_dict()}
            training = {"settings": settings, "step": step, "numbers": numbers}
            save_checkpoint(checkpoint, storage_options, **(about or {}), **state, training=training)

    for epoch in range(step // loop.steps_per_epoch, epochs):
        for row in loop.steps(epoch, step):
            step += 1
            seconds += row["load_s"] + row["compute_s"] + row["comm_s"]
            loss = row["loss"]
            log_metrics(step=step, epoch=epoch, **row)
            if step % checkpoint_every == 0 and step % loop.steps_per_epoch:
                save({})
        numbers = {"steps": step, "images_per_s": (step - resumed_at) * batch_size / seconds, "train_loss": loss}
        if val_set is not None:
            scores = evaluate(model, val_set, precision=precision, num_workers=num_workers)
            numbers |= {"accuracy": scores["accuracy"], "loss": scores["loss"]}
            if rank == 0:
                log_metrics(step=step, epoch=epoch, val_accuracy=scores["accuracy"], val_loss=scores["loss"])
        save(numbers)  # after the evaluation, so that what is finished has its numbers
    model.eval()
    for _, weight in loop.trained:
        weight.requires_grad_(True)
    return {**numbers, "resumed_at": resumed_at}


@torch.no_grad()
def evaluate(model, dataset, *, batch_size=64, precision="fp32", num_workers=0):
    """Return accuracy, mean cross-entropy loss and n_images, over each image of `dataset` once, the same on all ranks.

    batch_size: images per forward on one rank. The model is left in the modes (train, eval) it was in.
    Raises ValueError for a dataset without images.
    """
    if not len(dataset):
        raise ValueError("The dataset for evaluation has 0 images: give it some, or leave val_set out.")
    rank, world_size = _world()
    device = _device()
    modes = [(module, module.training) for module in model.modules()]
    model.to(device, memory_format=torch.channels_last).eval()
    part = Subset(dataset, range(rank, len(dataset), world_size))  # not DistributedSampler, which counts some twice
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # correct, loss, images
    for images, labels in DataLoader(part, batch_size, num_workers=num_workers):
        images, labels = _to(device, images, labels)
        with _autocast(device, precision):
            logits = model(images).float()  # (images, n_classes)
        correct, loss = (logits.argmax(1) == labels).sum(), cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([correct, loss, torch.tensor(len(images), device=device)]).double()
    if world_size > 1:
        dist.all_reduce(sums)
    for module, training in modes:
        module.training = training
    correct, loss, n_images = sums.tolist()
    return {"accuracy": correct / n_images, "loss": loss / n_images, "n_images": int(n_images)}


def learning_rate(step, n_steps, *, lr, batch_size, warmup_steps=0):
    """Return the learning rate of a step (from 0): linear scaling and warm-up (arXiv:1706.02677), then a cosine to 0.

    >>> [learning_rate(step, 6, lr=0.1, batch_size=64, warmup_steps=2) for step in range(6)]
    [0.1, 0.2, 0.2, 0.170..., 0.1, 0.029...]
    """
    peak = lr * batch_size / LR_BATCH
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * (1 + math.cos(math.pi * (step - warmup_steps) / (n_steps - warmup_steps))) / 2


class _Loop:
    # The model, its optimiser, and what one step needs; all that is random follows from (seed, step), nothing from
    # what came before, so that a resumed run draws what the undisturbed one drew.

    def __init__(self, model, train_set, num_workers, **settings):
        self.model, self.train_set, self.num_workers = model, train_set, num_workers
        self.given = SimpleNamespace(**settings)
        self.trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self.rank, self.world_size = _world()
        self.device = _device()
        model.to(self.device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        self.per_rank = self.given.batch_size // self.world_size
        # The sampler gives a rank n // w images, so (n // w) // (b / w) batches: n // b, whatever the world size w.
        self.steps_per_epoch = self.given.n_images // self.given.batch_size
        self.launched = None  # when the last gradients were sent

    def steps(self, epoch, first):
        """Yield the numbers of each optimiser step of `epoch`, from the run's step `first` (counted from 0) on."""
        parallel = self._parallel(epoch)
        batches = iter(self._loader(epoch, first))
        for step in range(first, (epoch + 1) * self.steps_per_epoch):
            torch.manual_seed(_mixed(self.given.seed, step, self.rank))  # for what a dataset or a layer draws
            start = time.perf_counter()
            images, labels = next(batches)  # (batch_size / world_size, 3, h, w), (batch_size / world_size,)
            load_s = time.perf_counter() - start
            rate = learning_rate(step, self.given.epochs * self.steps_per_epoch, lr=self.given.lr,
                                 batch_size=self.given.batch_size, warmup_steps=self.given.warmup_steps)  # fmt: skip
            numbers = self._step(parallel, self._augmented(images, step), labels, rate)
            yield {**numbers, "lr": rate, "images": len(images), "load_s": load_s}
        if self.world_size > 1 and not self.given.freeze_batchnorm:
            for buffer in self.model.buffers():  # each rank's last batch left its own statistics
                dist.broadcast(buffer, 0)

    def _parallel(self, epoch):
        self.model.train()
        for name, weight in self.trained:
            weight.requires_grad_(epoch >= self.given.freeze_epochs or name.startswith("fc."))
        for module in self.model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and self.given.freeze_batchnorm:
                module.eval()
        if self.world_size == 1:
            return self.model
        # Made anew each epoch, because it looks only once at which weights are trained.
        parallel = DistributedDataParallel(self.model)
        parallel.broadcast_buffers = not self.given.freeze_batchnorm  # as an argument it warns, from torch 2.15 on
        parallel.register_comm_hook(None, self._timed(COMPRESSIONS[self.given.compression]))
        return parallel

    def _timed(self, hook):
        def timed_hook(state, bucket):
            if bucket.is_last():
                self.launched = _now(self.device)
            return hook(state, bucket)

        return timed_hook

    def _loader(self, epoch, first):
        sampler = DistributedSampler(self.train_set, self.world_size, self.rank, seed=self.given.seed, drop_last=True)
        sampler.set_epoch(epoch)
        done = (first - epoch * self.steps_per_epoch) * self.per_rank  # images, which are not read again
        return DataLoader(
            self.train_set,
            self.per_rank,
            sampler=list(sampler)[done:],
            drop_last=True,
            num_workers=self.num_workers,
            generator=torch.Generator().manual_seed(_mixed(self.given.seed, first, self.rank)),  # seeds its workers
            pin_memory=self.device.type == "cuda",
        )

    def _augmented(self, images, step):
        if not self.given.augment:
            return images
        generator = torch.Generator().manual_seed(_mixed(self.given.seed, step))
        mirrored = torch.rand(self.given.batch_size, generator=generator) < 0.5  # for all ranks, each takes its part
        mirrored = mirrored[self.rank :: self.world_size][: len(images)]
        return torch.where(mirrored[:, None, None, None], images.flip(3), images)

    def _step(self, parallel, images, labels, rate):
        start = self.launched = _now(self.device)
        images, labels = _to(self.device, images, labels)
        size = self.per_rank // self.given.accumulate  # images a forward
        parts = list(zip(images.split(size), labels.split(size), strict=True))
        loss = torch.zeros((), device=self.device)
        for position, (part, part_labels) in enumerate(parts, start=1):
            silent = position < len(parts) and self.world_size > 1  # gradients add up here until the last part
            with parallel.no_sync() if silent else nullcontext():
                with _autocast(self.device, self.given.precision):
                    logits = parallel(part).float()  # (images a forward, n_classes)
                part_loss = cross_entropy(logits, part_labels, reduction="sum") / len(images)
                part_loss.backward()
            loss += part_loss.detach()
        arrived = _now(self.device)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        total_s = _seconds(start, _now(self.device))
        comm_s = _seconds(self.launched, arrived) if self.world_size > 1 else 0.0
        return {"loss": loss.item(), "compute_s": total_s - comm_s, "comm_s": comm_s}


def _world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a rank sees its own GPU first


def _to(device, images, labels):
    images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
    return images, labels.to(device, non_blocking=True)


def _autocast(device, precision):
    return torch.autocast(device.type, torch.bfloat16, enabled=precision_of(precision) == "bf16")


def _mixed(*numbers):
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])  # torch's generator takes 32 bits of a seed


def _now(device):
    """Return the present as `_seconds` compares it: on a GPU, the moment at which it has done what it was given."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start, end):
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000  # ms to s


def _check(settings, world_size, model):
    given = SimpleNamespace(**settings)
    if given.precision not in PRECISIONS:
        raise ValueError(f"precision is {given.precision!r}: write one of {', '.join(PRECISIONS)}.")
    if given.compression not in COMPRESSIONS:
        raise ValueError(f"compression is {given.compression!r}: write one of {', '.join(map(repr, COMPRESSIONS))}.")
    for name in ("epochs", "batch_size", "accumulate"):
        if not isinstance(settings[name], int) or settings[name] < 1:
            raise ValueError(f"{name} is {settings[name]!r}: give a whole number of at least 1.")
    parts = world_size * given.accumulate
    if given.batch_size % parts:
        nearest = max(1, round(given.batch_size / parts)) * parts
        raise ValueError(f"batch_size {given.batch_size} cannot be shared by {world_size} ranks with accumulate="
                         f"{given.accumulate}: give a multiple of {parts}, such as {nearest}.")  # fmt: skip
    if given.n_images < given.batch_size:
        raise ValueError(f"The training set has {given.n_images} images, fewer than one batch of {given.batch_size}: "
                         f"give batch_size at most {given.n_images}, or more images.")  # fmt: skip
    if given.freeze_epochs and not hasattr(model, "fc"):
        raise ValueError(f"freeze_epochs is {given.freeze_epochs}, but {type(model).__name__} has no head named fc.")


def _resume(checkpoint, storage_options, settings, loop):
    if not checkpoint_exists(checkpoint, storage_options):
        return 0, {}
    saved = load_checkpoint(checkpoint, storage_options)
    cure = "Delete that file, or choose another checkpoint."
    if "training" not in saved:
        raise ValueError(f"{str(checkpoint)!r} was not written by train, so there is nothing to go on from. {cure}")
    before = saved["training"]["settings"]
    others = [f"{name} {before.get(name)!r}, not {value!r}" for name, value in settings.items()
              if before.get(name) != value]  # fmt: skip
    if others:
        raise ValueError(f"{str(checkpoint)!r} is of a run with {'; '.join(others)}. {cure}")
    loop.model.load_state_dict(saved["state_dict"])
    loop.optimizer.load_state_dict(saved["optimizer"])
    return saved["training"]["step"], saved["training"]["numbers"]


def _check_agreement(step, settings):
    rank, world_size = _world()
    if world_size > 1:
        theirs = [None] * world_size
        dist.all_gather_object(theirs, {"checkpoint at step": step, **settings})
        for name, value in theirs[rank].items():
            if any(other[name] != value for other in theirs):
                raise ValueError(f"The ranks differ in {name}: {[other[name] for other in theirs]}. Give all the same "
                                 "settings and images, and a checkpoint that all can read, such as s3://…")  # fmt: skip
