"""The reference training loop: one process or many ranks, interrupted or not, take the same steps."""

import math
import multiprocessing
import os
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision.models import ResNet

from workshop_utils import models
from workshop_utils.data import HELD_OUT, DataSource, ImageFolder, train_val_split
from workshop_utils.inference import ieee_float32, precision_of
from workshop_utils.preemption import ending_if_told, heed_parent_alone, heeds_sigterm
from workshop_utils.results import log_metrics

LR_BATCH = 32  # images a step that `lr` is meant for
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
COMPRESSIONS = {None: hooks.allreduce_hook, "fp16": hooks.fp16_compress_hook, "bf16": hooks.bf16_compress_hook}


def prepare(source: DataSource, *, pretrained: bool = True, image_size: int = 96) -> tuple[ResNet, Subset, Subset]:
    """Return (model, train_set, val_set) of the workshop's training problem: to tell the twelve held-out breeds apart.

    source: of `find_data`, the same on all ranks. pretrained: False draws all weights anew, not the head alone.
    image_size: pixels a side, (3, image_size, image_size). Of each breed, a quarter of the images is for validation.
    """
    torch.manual_seed(0)  # for the weights that are drawn
    model = models.load_resnet(source.weights)[0]
    if not pretrained:
        model.apply(lambda layer: layer.reset_parameters() if hasattr(layer, "reset_parameters") else None)
    model.about["size"] = image_size  # of which a checkpoint tells `load_resnet`
    transform = models.IMAGENET_WEIGHTS.transforms(resize_size=image_size, crop_size=image_size)
    dataset = ImageFolder(source.url, transform, storage_options=source.storage_options, breeds=HELD_OUT)
    return models.with_new_head(model, len(HELD_OUT)), *train_val_split(dataset, 0.25, seed=0)


@ieee_float32()
@heeds_sigterm
def train(model: torch.nn.Module, train_set: Dataset, val_set: Dataset | None = None, *, epochs: int = 1,
          batch_size: int = 32, accumulate: int = 1, lr: float = 0.01, body_lr: float = 1.0, freeze_epochs: int = 0,
          warmup_steps: int = 0, freeze_batchnorm: bool = True, precision: str = "fp32", compression: str | None = None,
          augment: bool = False, num_workers: int = 0, seed: int = 0, checkpoint: str | os.PathLike | None = None,
          checkpoint_every: int = 50, storage_options: dict | None = None, about: dict | None = None) -> dict:
    """Train `model` in place with SGD; return a dict of numbers. On every rank alike, or in one process alone.

    model: a ResNet, the same on all ranks; it ends in eval mode. train_set, val_set: of (image (3, h, w), label).
    batch_size: images per optimiser step, over all ranks; each forward takes batch_size / (world size * accumulate).
    lr: for 32 images a step; see `learning_rate`. body_lr: share of it for all layers below the head `fc`, such as 0.1
    where these know much already.
    freeze_epochs: so many first epochs train the head `fc` alone. freeze_batchnorm: keep BatchNorm's running
    statistics and normalise with them; where False, each rank normalises with its own part of the batch, and several
    ranks no longer equal one process.
    precision: "fp32", "bf16" or "auto" (bf16 where the machine computes in it); the weights stay float32. What is
    computed in float32 is so also on a GPU, not in TF32.
    compression: None, "fp16" or "bf16", in which gradients travel. augment: mirror half of the images.
    num_workers: children that read images, for training and as many for validation. On a GPU they come from a fork
    server: a dataset's class then has to be in a module that they can import, not in a notebook's cell.
    checkpoint: a path or address that all ranks read and rank 0 writes: every `checkpoint_every` steps and after each
    epoch. Where it exists, training goes on from it, with any world size: on CPUs to the bit as if it had never stopped
    with one or two ranks; with more, whose sums gloo then takes in another order, to rounding (6e-8). For a
    model of `load_resnet`'s, it is a file that `load_resnet` loads. about: more to write into it, or what another model
    lacks, such as {"arch": "resnet18", "categories": […]}. storage_options: what fsspec needs to read and write it.

    Returns steps; resumed_at, the steps that were already done; images_per_s, over all ranks, without evaluation;
    train_loss of this rank's last batch; with a val_set also accuracy and loss on it.
    Logs per step: step (from 1), epoch (from 0), loss, lr, images (of this rank), and the seconds load_s (waiting for
    the DataLoader), comm_s (gradients on the way while nothing is left to compute), compute_s (all else). Rank 0 logs
    step, epoch, val_accuracy, val_loss after each epoch.
    Raises ValueError for settings that cannot be and for a checkpoint of another run, FloatingPointError where the
    loss becomes infinite or NaN. With a checkpoint, Preempted on all ranks once any of them got SIGTERM: after the step
    in which it came, which is saved; at the end of an epoch, after the next epoch's first.
    """
    settings = _settings(**locals())
    # A rank is given n // w images, hence (n // w) // (b / w) batches: that is n // b for any world size w.
    steps_per_epoch = settings["n_images"] // batch_size
    model.to(_device()).to(memory_format=torch.channels_last)
    optimizer = _sgd(model, body_lr)
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    loader = _loader(_Seeded(train_set, range(settings["n_images"])), [], num_workers)
    val_loader = _val_loader(val_set, 64, num_workers) if val_set is not None else None
    step, numbers = _resume(checkpoint, storage_options, settings, model, optimizer)
    resumed_at, seconds = step, 0.0

    for epoch in range(step // steps_per_epoch, epochs):
        _set_modes(model, trained, epoch < freeze_epochs, freeze_batchnorm)
        parallel, sent = _in_parallel(model, compression, freeze_batchnorm)
        for images, labels, load_s in _batches(loader, epoch, step, batch_size, seed, augment):
            rate = learning_rate(step, epochs * steps_per_epoch, lr, batch_size, warmup_steps)
            row = _take_step(parallel, optimizer, rate, images, labels, accumulate, precision, sent)
            step += 1
            if not math.isfinite(row["loss"]):
                raise FloatingPointError(f"The loss of step {step} is {row['loss']}: lower lr, {lr}, or raise "
                                         f"warmup_steps, {warmup_steps}.")
            log_metrics(step=step, epoch=epoch, **row, lr=rate, images=len(images), load_s=load_s)
            seconds += load_s + row["compute_s"] + row["comm_s"]
            if checkpoint and step % steps_per_epoch:  # an epoch's last step is saved with its evaluation's numbers
                _save_on_the_way(checkpoint, checkpoint_every, step, storage_options, settings, about, model, optimizer)
        numbers = {"steps": step, "images_per_s": (step - resumed_at) * batch_size / seconds, "train_loss": row["loss"]}
        for buffer in model.buffers() if _world()[1] > 1 else ():  # each rank's last batch left statistics of its own
            dist.broadcast(buffer, 0)
        if val_loader:
            scores = _evaluate(model, val_loader, precision)
            numbers |= {"accuracy": scores["accuracy"], "loss": scores["loss"]}
            if _world()[0] == 0:
                log_metrics(step=step, epoch=epoch, val_accuracy=scores["accuracy"], val_loss=scores["loss"])
        # After the evaluation, so that a finished run's checkpoint has its numbers.
        _save(checkpoint, storage_options, settings, about, model, optimizer, step, numbers)

    _set_modes(model, trained, head_alone=False, freeze_batchnorm=False)
    model.eval()
    return {**numbers, "resumed_at": resumed_at}


@ieee_float32()
def evaluate(model: torch.nn.Module, dataset: Dataset, *, batch_size: int = 64, precision: str = "fp32",
             num_workers: int = 0) -> dict[str, float]:
    """Return accuracy, mean cross-entropy loss and n_images, over each image of `dataset` once, the same on all ranks.

    batch_size: images per forward on one rank. The model is left in the modes (train, eval) it was in.
    Raises ValueError for a dataset without images.
    """
    return _evaluate(model, _val_loader(dataset, batch_size, num_workers), precision)


@torch.no_grad()
def _evaluate(model, loader, precision):
    device, modes = _device(), [(module, module.training) for module in model.modules()]
    model.to(device).to(memory_format=torch.channels_last).eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # correct, loss, images
    for images, labels in loader:
        labels, logits = labels.to(device, non_blocking=True), _logits(model, images, precision)
        correct, loss = (logits.argmax(1) == labels).sum(), cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([correct, loss, torch.tensor(len(images), device=device)]).double()
    if dist.is_initialized():
        dist.all_reduce(sums)
    for module, training in modes:
        module.training = training
    correct, loss, n_images = sums.tolist()
    return {"accuracy": correct / n_images, "loss": loss / n_images, "n_images": int(n_images)}


def learning_rate(step: int, n_steps: int, lr: float, batch_size: int, warmup_steps: int = 0) -> float:
    """Return the learning rate of a step (from 0): linear scaling and warm-up (arXiv:1706.02677), then a cosine to 0.

    >>> [learning_rate(step, n_steps=6, lr=0.1, batch_size=64, warmup_steps=2) for step in range(6)]
    [0.1, 0.2, 0.2, 0.170..., 0.1, 0.029...]
    """
    peak = lr * batch_size / LR_BATCH
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * (1 + math.cos(math.pi * (step - warmup_steps) / (n_steps - warmup_steps))) / 2


# --- data: all chance follows from (seed, step) and nothing from what came before, so a resumed run draws the same


class _Seeded(Subset):
    """Takes batches as lists (seed, *indices): what it draws at random, also in a child, follows from that."""

    def __getitems__(self, batch):
        seed, *indices = batch
        torch.manual_seed(seed)
        return super().__getitems__(indices)


def _loader(dataset, batches, num_workers):
    """Return a DataLoader of lists of indices, which may change between two epochs; its children live as long as it."""
    on_gpu, how = _device().type == "cuda", {}
    if num_workers:
        how["persistent_workers"], how["worker_init_fn"] = True, heed_parent_alone
        if on_gpu:  # a fork would copy the threads' locks and CUDA's state
            how["multiprocessing_context"] = context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["workshop_utils.data"])
    return DataLoader(dataset, batch_sampler=batches, num_workers=num_workers, pin_memory=on_gpu, **how)


def _val_loader(dataset, batch_size, num_workers):
    if not (n_images := len(dataset)):
        raise ValueError("The dataset for evaluation has 0 images: give it some, or leave val_set out.")
    rank, world_size = _world()
    part = range(rank, n_images, world_size)  # not DistributedSampler, which counts some twice
    return _loader(dataset, [list(part[i : i + batch_size]) for i in range(0, len(part), batch_size)], num_workers)


def _order(dataset, epoch, first, batch_size, seed):
    """Return this rank's batches for the steps of `epoch` from the run's step `first` on: (seed, *indices) each."""
    rank, world_size = _world()
    sampler = DistributedSampler(dataset, world_size, rank, seed=seed, drop_last=True)
    sampler.set_epoch(epoch)
    per_rank, steps_per_epoch = batch_size // world_size, len(dataset) // batch_size
    indices = list(sampler)[first % steps_per_epoch * per_rank :]
    steps = range(first, (epoch + 1) * steps_per_epoch)
    return [[_mixed(seed, step, rank), *indices[i * per_rank :][:per_rank]] for i, step in enumerate(steps)]


def _batches(loader, epoch, step, batch_size, seed, augment):
    """Yield this rank's (images, labels, seconds waited) for each step of `epoch` from the run's step `step` on."""
    rank, world_size = _world()
    loader.batch_sampler[:] = _order(loader.dataset, epoch, step, batch_size, seed)
    batches = iter(loader)  # starts children, if it has none yet
    start = time.perf_counter()
    for images, labels in batches:  # (batch_size / world_size, 3, h, w), (batch_size / world_size,)
        load_s = time.perf_counter() - start
        torch.manual_seed(_mixed(seed, step, rank, 1))  # for what a layer draws
        if augment:  # mirrors half of all ranks' images, the same as one process
            draws = torch.rand(batch_size, generator=torch.Generator().manual_seed(_mixed(seed, step)))
            images = torch.where(draws[rank::world_size, None, None, None] < 0.5, images.flip(3), images)
        yield images, labels, load_s
        step, start = step + 1, time.perf_counter()


def _mixed(*numbers):
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])  # torch's generator takes 32 bits of a seed


# --- model


def _sgd(model, body_lr):
    head = [weight for name, weight in model.named_parameters() if name.startswith("fc.")]
    body = [weight for name, weight in model.named_parameters() if not name.startswith("fc.")]
    groups = [{"params": head, "share": 1.0}, {"params": body, "share": body_lr}]
    return torch.optim.SGD(groups, lr=0.0, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def _set_modes(model, trained, head_alone, freeze_batchnorm):
    for name, weight in trained:
        weight.requires_grad_(not head_alone or name.startswith("fc."))
    for module in model.modules():
        module.training = not (freeze_batchnorm and isinstance(module, torch.nn.modules.batchnorm._BatchNorm))


def _in_parallel(model, compression, freeze_batchnorm):
    """Return (model that averages gradients over all ranks, dict with the moment "at" which it sent the last ones)."""
    sent = {}

    def send(group, bucket):
        if bucket.is_last():
            sent["at"] = _moment()
        return COMPRESSIONS[compression](group, bucket)

    if _world()[1] > 1:
        model = DistributedDataParallel(model)  # anew each epoch: it looks only now at what is trained
        model.broadcast_buffers = not freeze_batchnorm  # as an argument it warns, from torch 2.15 on
        model.register_comm_hook(None, send)
    return model, sent


# --- step


def _take_step(parallel, optimizer, rate, images, labels, accumulate, precision, sent):
    start, loss, labels = _moment(), 0.0, labels.to(_device(), non_blocking=True)
    parts = zip(images.chunk(accumulate), labels.chunk(accumulate), strict=True)
    for position, (part, part_labels) in enumerate(parts, start=1):
        # Gradients add up here, and travel with the last.
        silent = position < accumulate and isinstance(parallel, DistributedDataParallel)
        with parallel.no_sync() if silent else nullcontext():
            logits = _logits(parallel, part, precision)  # (images a forward, n_classes)
            part_loss = cross_entropy(logits, part_labels, reduction="sum") / len(images)
            part_loss.backward()
        loss += part_loss.detach()
    arrived = _moment()
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]
    optimizer.step()
    optimizer.zero_grad()
    end, loss = _moment(), loss.item()  # which waits for the GPU
    comm_s = _seconds(sent["at"], arrived) if sent else 0.0
    return {"loss": loss, "compute_s": _seconds(start, end) - comm_s, "comm_s": comm_s}


def _logits(model, images, precision):
    images = images.to(_device(), memory_format=torch.channels_last, non_blocking=True)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision_of(precision) == "bf16"):
        return model(images).float()


def _world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a rank sees its own GPU first


def _moment():
    """Return this moment: of the clock, or of a GPU, which works behind the clock."""
    if _device().type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start, end):
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


# --- save


def _save_on_the_way(checkpoint, checkpoint_every, step, *state):
    with ending_if_told(step, checkpoint, _device()) as told:
        if told or step % checkpoint_every == 0:
            _save(checkpoint, *state, step, {})


def _save(checkpoint, storage_options, settings, about, model, optimizer, step, numbers):
    if not checkpoint or _world()[0] != 0:
        return
    if not all(weight.isfinite().all() for weight in model.parameters()):  # another rank's loss, or this step
        raise FloatingPointError(f"After step {step}, some weights are infinite or NaN, so {str(checkpoint)!r} is left "
                                 f"as it was: lower lr, {settings['lr']}.")
    n_classes = {"num_classes": model.fc.out_features} if hasattr(model, "fc") else {}
    about = {**getattr(model, "about", {}), **n_classes, **(about or {}), "optimizer": optimizer.state_dict()}
    training = {"settings": settings, "step": step, "numbers": numbers}
    models.save_checkpoint(checkpoint, storage_options, **about, state_dict=model.state_dict(), training=training)


def _resume(checkpoint, storage_options, settings, model, optimizer):
    """Return (steps done, numbers so far), once all ranks agree on them; load the states of the checkpoint, if any."""
    step, numbers = 0, {}
    if checkpoint and models.checkpoint_exists(checkpoint, storage_options):
        saved, cure = models.load_checkpoint(checkpoint, storage_options), "Delete it, or choose another checkpoint."
        if "training" not in saved:
            raise ValueError(f"{str(checkpoint)!r} was not written by train, so there is nothing to go on from. {cure}")
        old, step, numbers = (saved["training"][name] for name in ("settings", "step", "numbers"))
        others = [f"{name} {old.get(name)!r}, now {now!r}" for name, now in settings.items() if old.get(name) != now]
        if others:
            raise ValueError(f"{str(checkpoint)!r} is of a run with other settings: {', '.join(others)}. {cure}")
        model.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
    ranks = [{"checkpoint's step": step, **settings}] * _world()[1]
    if len(ranks) > 1:
        dist.all_gather_object(ranks, ranks[0])
    for name, mine in ranks[0].items():
        values = [theirs[name] for theirs in ranks]
        if any(value != mine for value in values):
            raise ValueError(f"The ranks differ in {name}: {values}. Give all the same settings and images, and a "
                             "checkpoint that all can read, such as s3://…")
    return step, numbers


def _settings(model, train_set, val_set, num_workers, checkpoint, checkpoint_every, storage_options, about, **settings):
    """Refuse what cannot be; return of `train`'s arguments, and of their sizes, what a run keeps when it goes on."""
    precision_of(settings["precision"])
    if (compression := settings["compression"]) not in COMPRESSIONS:
        raise ValueError(f"compression is {compression!r}: write one of {', '.join(map(repr, COMPRESSIONS))}.")
    counts = {name: settings[name] for name in ("epochs", "batch_size", "accumulate")}
    for name, count in (counts | {"checkpoint_every": checkpoint_every}).items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}: give a whole number of at least 1.")
    _, batch_size, accumulate = counts.values()
    n_images, parts = len(train_set), _world()[1] * accumulate
    if batch_size % parts:
        raise ValueError(f"batch_size {batch_size} cannot be shared by {_world()[1]} ranks with {accumulate=}: "
                         f"give a multiple of {parts}, such as {max(1, round(batch_size / parts)) * parts}.")
    if n_images < batch_size:
        raise ValueError(f"The training set has {n_images} images, fewer than one batch of {batch_size}: lower "
                         f"batch_size to at most {n_images}, or bring more images.")
    if (frozen := settings["freeze_epochs"]) and not hasattr(model, "fc"):
        raise ValueError(f"freeze_epochs is {frozen}, but {type(model).__name__} has no head named fc.")
    return {**settings, "n_images": n_images, "n_val_images": len(val_set or ())}
