"""The reference training loop: one process or many ranks, interrupted or not, take the same steps."""

import math
import time
from contextlib import nullcontext
from functools import partial
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


def train(model, train_set, val_set=None, *, epochs=1, batch_size=32, accumulate=1, lr=0.01, body_lr=1.0,
          warmup_steps=0, freeze_epochs=0, freeze_batchnorm=True, precision="fp32", compression=None, augment=False,
          num_workers=0, seed=0, checkpoint=None, checkpoint_every=50, storage_options=None, about=None):  # fmt: skip
    """Train `model` in place with SGD; return a dict of numbers. On every rank alike, or in one process alone.

    model: a ResNet, the same on all ranks; it ends in eval mode. train_set, val_set: of (image (3, h, w), label).
    batch_size: images per optimiser step, over all ranks; each forward takes batch_size / (world size * accumulate).
    lr: for 32 images a step; see `learning_rate`. body_lr: share of it for all layers below the head `fc`, such as 0.1
    where these know much already.
    freeze_epochs: so many first epochs train the head `fc` alone. freeze_batchnorm: keep BatchNorm's running
    statistics and normalise with them; where False, each rank normalises with its own part of the batch, and several
    ranks no longer equal one process.
    precision: "fp32", "bf16" or "auto" (bf16 where the machine computes in it); the weights stay float32.
    compression: None, "fp16" or "bf16", in which gradients travel. augment: mirror half of the images.
    checkpoint: a path or address that all ranks read and rank 0 writes: every `checkpoint_every` steps and after each
    epoch. Where it exists, training goes on from it, with any world size: to the bit as if it had never stopped with
    one or two ranks; with more, whose sums gloo then takes in another order, to rounding (6e-8). For a
    model of `load_resnet`'s, it is a file that `load_resnet` loads. about: more to write into it, or what another model
    lacks, such as {"arch": "resnet18", "categories": […]}. storage_options: what fsspec needs to read and write it.

    Returns steps; resumed_at, the steps that were already done; images_per_s, over all ranks, without evaluation;
    train_loss of this rank's last batch; with a val_set also accuracy and loss on it.
    Logs per step: step (from 1), epoch (from 0), loss, lr, images (of this rank), and the seconds load_s (waiting for
    the DataLoader), comm_s (gradients on the way while nothing is left to compute), compute_s (all else). Rank 0 logs
    step, epoch, val_accuracy, val_loss after each epoch.
    Raises ValueError for settings that cannot be and for a checkpoint of another run, FloatingPointError where the
    loss becomes infinite or NaN.
    """
    settings = {
        "epochs": epochs, "batch_size": batch_size, "accumulate": accumulate, "lr": lr, "body_lr": body_lr,
        "warmup_steps": warmup_steps, "freeze_epochs": freeze_epochs, "freeze_batchnorm": freeze_batchnorm,
        "precision": precision, "compression": compression, "augment": augment, "seed": seed,
        "n_images": len(train_set),
        "n_val_images": 0 if val_set is None else len(val_set),
        "n_weights": sum(weight.numel() for weight in model.parameters()),
    }  # fmt: skip
    _check(settings, checkpoint_every, model)
    run = _Run(model, train_set, num_workers, settings)
    step, numbers = _resume(run, checkpoint, storage_options)
    _check_agreement(step, settings)
    resumed_at, seconds = step, 0.0
    save = partial(_save, run, checkpoint, storage_options, about)
    for epoch in range(step // run.steps_per_epoch, epochs):
        for row in run.steps(epoch, step):
            step += 1
            seconds += row["load_s"] + row["compute_s"] + row["comm_s"]
            log_metrics(step=step, epoch=epoch, **row)
            if step % checkpoint_every == 0 and step % run.steps_per_epoch:
                save(step, {})
        images_per_s = (step - resumed_at) * batch_size / seconds
        numbers = {"steps": step, "images_per_s": images_per_s, "train_loss": row["loss"]}
        numbers |= run.scores(val_set, step, epoch)
        save(step, numbers)  # after the evaluation, so that a finished run's checkpoint has its numbers
    run.train_all_weights()
    model.eval()
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


def learning_rate(step, n_steps, lr, batch_size, warmup_steps=0):
    """Return the learning rate of a step (from 0): linear scaling and warm-up (arXiv:1706.02677), then a cosine to 0.

    >>> [learning_rate(step, n_steps=6, lr=0.1, batch_size=64, warmup_steps=2) for step in range(6)]
    [0.1, 0.2, 0.2, 0.170..., 0.1, 0.029...]
    """
    peak = lr * batch_size / LR_BATCH
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * (1 + math.cos(math.pi * (step - warmup_steps) / (n_steps - warmup_steps))) / 2


class _Run:
    # The model, its optimiser, and what one step needs. All chance follows from (seed, step) and nothing from what
    # came before, so a resumed run draws what the undisturbed one drew.

    def __init__(self, model, train_set, num_workers, settings):
        self.model, self.train_set, self.num_workers, self.settings = model, train_set, num_workers, settings
        self.given = SimpleNamespace(**settings)
        self.rank, self.world_size = _world()
        self.device = _device()
        self.weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        model.to(self.device, memory_format=torch.channels_last)
        head = [weight for name, weight in model.named_parameters() if name.startswith("fc.")]
        body = [weight for name, weight in model.named_parameters() if not name.startswith("fc.")]
        groups = [{"params": weights, "share": share} for weights, share in ((head, 1.0), (body, self.given.body_lr))]
        self.optimizer = torch.optim.SGD(groups, lr=0.0, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        self.per_rank = self.given.batch_size // self.world_size
        # A rank is given n // w images, hence (n // w) // (b / w) batches: that is n // b for any world size w.
        self.steps_per_epoch = self.given.n_images // self.given.batch_size

    def steps(self, epoch, first):
        """Yield the numbers of each optimiser step of `epoch`, from the run's step `first` (counted from 0) on."""
        given, n_steps = self.given, self.given.epochs * self.steps_per_epoch
        parallel = self._parallel(epoch)
        batches = iter(self._loader(epoch, first))
        for step in range(first, (epoch + 1) * self.steps_per_epoch):
            torch.manual_seed(_mixed(given.seed, step, self.rank))  # for what the dataset or a layer draws
            start = time.perf_counter()
            images, labels = next(batches)  # (batch_size / world_size, 3, h, w), (batch_size / world_size,)
            load_s = time.perf_counter() - start
            rate = learning_rate(step, n_steps, given.lr, given.batch_size, given.warmup_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["share"]
            if given.augment:
                images = self._mirrored(images, step)
            numbers = self._step(parallel, images, labels)
            if not math.isfinite(numbers["loss"]):
                raise FloatingPointError(f"The loss of step {step + 1} is {numbers['loss']}: lower lr, {given.lr}, or "
                                         f"raise warmup_steps, {given.warmup_steps}.")  # fmt: skip
            yield {**numbers, "lr": rate, "images": len(images), "load_s": load_s}
        if self.world_size > 1 and not given.freeze_batchnorm:
            for buffer in self.model.buffers():  # each rank's last batch left statistics of its own
                dist.broadcast(buffer, 0)

    def scores(self, val_set, step, epoch):
        if val_set is None:
            return {}
        scores = evaluate(self.model, val_set, precision=self.given.precision, num_workers=self.num_workers)
        if self.rank == 0:
            log_metrics(step=step, epoch=epoch, val_accuracy=scores["accuracy"], val_loss=scores["loss"])
        return {"accuracy": scores["accuracy"], "loss": scores["loss"]}

    def train_all_weights(self, yes=True):
        """Train again what was trained before this run; else, of that, the head alone."""
        for name, weight in self.weights:
            weight.requires_grad_(yes or name.startswith("fc."))

    def _parallel(self, epoch):
        self.train_all_weights(epoch >= self.given.freeze_epochs)
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and self.given.freeze_batchnorm:
                module.eval()
        if self.world_size == 1:
            return self.model
        parallel = DistributedDataParallel(self.model)  # anew each epoch: it looks only now at what is trained
        parallel.broadcast_buffers = not self.given.freeze_batchnorm  # as an argument it warns, from torch 2.15 on
        parallel.register_comm_hook(None, self._send)
        return parallel

    def _send(self, group, bucket):
        if bucket.is_last():
            self.last_sent = _now(self.device)
        return COMPRESSIONS[self.given.compression](group, bucket)

    def _loader(self, epoch, first):
        sampler = DistributedSampler(self.train_set, self.world_size, self.rank, seed=self.given.seed, drop_last=True)
        sampler.set_epoch(epoch)
        done = (first - epoch * self.steps_per_epoch) * self.per_rank  # images, which are not read again
        generator = torch.Generator().manual_seed(_mixed(self.given.seed, first, self.rank))  # seeds its workers
        return DataLoader(self.train_set, self.per_rank, sampler=list(sampler)[done:], drop_last=True,
                          num_workers=self.num_workers, generator=generator,
                          pin_memory=self.device.type == "cuda")  # fmt: skip

    def _mirrored(self, images, step):
        generator = torch.Generator().manual_seed(_mixed(self.given.seed, step))
        chosen = torch.rand(self.given.batch_size, generator=generator) < 0.5  # of all ranks' images, as one process
        chosen = chosen[self.rank :: self.world_size][: len(images)]
        return torch.where(chosen[:, None, None, None], images.flip(3), images)

    def _step(self, parallel, images, labels):
        start = _now(self.device)
        images, labels = _to(self.device, images, labels)
        size = self.per_rank // self.given.accumulate  # images a forward
        parts = list(zip(images.split(size), labels.split(size), strict=True))
        loss = torch.zeros((), device=self.device)
        for position, (part, part_labels) in enumerate(parts, start=1):
            silent = position < len(parts) and self.world_size > 1  # gradients add up here, and travel with the last
            with parallel.no_sync() if silent else nullcontext():
                with _autocast(self.device, self.given.precision):
                    logits = parallel(part).float()  # (images a forward, n_classes)
                part_loss = cross_entropy(logits, part_labels, reduction="sum") / len(images)
                part_loss.backward()
            loss += part_loss.detach()
        arrived = _now(self.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total_s = _seconds(start, _now(self.device))
        comm_s = _seconds(self.last_sent, arrived) if self.world_size > 1 else 0.0
        return {"loss": loss.item(), "compute_s": total_s - comm_s, "comm_s": comm_s}


def _world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


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


def _check(settings, checkpoint_every, model):
    given, (_, world_size) = SimpleNamespace(**settings), _world()
    if given.precision not in PRECISIONS:
        raise ValueError(f"precision is {given.precision!r}: write one of {', '.join(PRECISIONS)}.")
    if given.compression not in COMPRESSIONS:
        raise ValueError(f"compression is {given.compression!r}: write one of {', '.join(map(repr, COMPRESSIONS))}.")
    counts = {name: settings[name] for name in ("epochs", "batch_size", "accumulate")}
    for name, count in {**counts, "checkpoint_every": checkpoint_every}.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}: give a whole number of at least 1.")
    parts = world_size * given.accumulate
    if given.batch_size % parts:
        raise ValueError(f"batch_size {given.batch_size} cannot be shared by {world_size} ranks with accumulate="
                         f"{given.accumulate}: give a multiple of {parts}, such as "
                         f"{max(1, round(given.batch_size / parts)) * parts}.")  # fmt: skip
    if given.n_images < given.batch_size:
        raise ValueError(f"The training set has {given.n_images} images, fewer than one batch of {given.batch_size}: "
                         f"lower batch_size to at most {given.n_images}, or bring more images.")  # fmt: skip
    if given.freeze_epochs and not hasattr(model, "fc"):
        raise ValueError(f"freeze_epochs is {given.freeze_epochs}, but {type(model).__name__} has no head named fc.")


def _check_agreement(step, settings):
    rank, world_size = _world()
    if world_size > 1:
        theirs = [None] * world_size
        dist.all_gather_object(theirs, {"checkpoint's step": step, **settings})
        for name, value in theirs[rank].items():
            if any(other[name] != value for other in theirs):
                raise ValueError(f"The ranks differ in {name}: {[other[name] for other in theirs]}. Give all the same "
                                 "settings and images, and a checkpoint that all can read, such as s3://…")  # fmt: skip


def _save(run, checkpoint, storage_options, about, step, numbers):
    if checkpoint and run.rank == 0:
        if not all(weight.isfinite().all() for weight in run.model.parameters()):  # another rank's loss, or this step
            raise FloatingPointError(f"After step {step}, some weights are infinite or NaN, so {str(checkpoint)!r} is "
                                     f"left as it was: lower lr, {run.given.lr}.")  # fmt: skip
        states = {"state_dict": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        training = {"settings": run.settings, "step": step, "numbers": numbers}
        n_classes = {"num_classes": run.model.fc.out_features} if hasattr(run.model, "fc") else {}
        about = {**getattr(run.model, "about", {}), **n_classes, **(about or {})}
        save_checkpoint(checkpoint, storage_options, **about, **states, training=training)


def _resume(run, checkpoint, storage_options):
    if not (checkpoint and checkpoint_exists(checkpoint, storage_options)):
        return 0, {}
    saved = load_checkpoint(checkpoint, storage_options)
    cure = "Delete that file, or choose another checkpoint."
    if "training" not in saved:
        raise ValueError(f"{str(checkpoint)!r} was not written by train, so there is nothing to go on from. {cure}")
    before = saved["training"]["settings"]
    others = [f"{name} {before.get(name)!r}, now {now!r}" for name, now in run.settings.items()
              if before.get(name) != now]  # fmt: skip
    if others:
        raise ValueError(f"{str(checkpoint)!r} is of a run with other settings: {', '.join(others)}. {cure}")
    run.model.load_state_dict(saved["state_dict"])
    run.optimizer.load_state_dict(saved["optimizer"])
    return saved["training"]["step"], saved["training"]["numbers"]
