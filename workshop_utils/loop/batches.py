"""The images that each rank takes at each step.

What is drawn follows from the seed and the step, and from nothing that came before, so a resumed run draws the same.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, get_worker_info

from daskrun.by_value import by_value
from workshop_utils.loop.chance import derived_seed, seed_all
from workshop_utils.loop.ranks import own_device, world
from workshop_utils.loop.settings import whole

WHOLE_BATCHES = "Let it return another image for one that it cannot read, or leave bad images out beforehand."


class TrainBatches:
    """This rank's share of the training images, step by step."""

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, num_workers: int) -> None:
        """batch_size: images per step, over all ranks. num_workers: children that read them."""
        self.batch_size, self.seed = batch_size, seed
        self._images = _Seeded(dataset, range(len(dataset)))  # type: ignore[arg-type]
        # Each rank has n // w images, and so (n // w) // (b / w) batches: n // b, whatever the world size w.
        self.per_epoch = len(self._images) // batch_size
        self._order: list[list[int]] = []  # what the loader reads in this epoch
        self._loader = batch_loader(self._images, self._order, num_workers)

    def of_epoch(self, epoch: int, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """Yield (images, labels, seconds waited) for each step of `epoch`, beginning with the run's step `step`.

        images: (batch_size / world size, 3, h, w). labels: (batch_size / world size,).
        Raises ValueError where the dataset leaves images out, RuntimeError where a child dies.
        """
        rank, world_size = world()
        self._order[:] = self._batches(epoch, step, rank, world_size)
        batches = iter(self._loader)  # starts the children in the first epoch
        start = time.perf_counter()
        with naming_dead_children(self._loader):
            for images, labels in batches:
                load_s = time.perf_counter() - start
                seed_all(derived_seed(self.seed, "layers", step, rank))
                yield images, labels, load_s
                step, start = step + 1, time.perf_counter()

    def _batches(self, epoch, first, rank, world_size):
        """Return [seed, *indices] for each step of `epoch` from the run's step `first` on."""
        seed = derived_seed(self.seed, "order", epoch)
        # set_epoch would add the epoch to the seed: the second epoch of seed 0 would be the first of seed 1.
        sampler: DistributedSampler = DistributedSampler(self._images, world_size, rank, seed=seed, drop_last=True)
        per_rank, indices = self.batch_size // world_size, list(sampler)
        begin = epoch * self.per_epoch  # the first step of the epoch
        return [
            [derived_seed(self.seed, "dataset", step, rank), *indices[(step - begin) * per_rank :][:per_rank]]
            for step in range(first, begin + self.per_epoch)
        ]


def batch_loader(dataset: Dataset, batches: list[list[int]], num_workers: int) -> DataLoader:
    """Return a DataLoader of `batches`, lists of indices that may change between epochs; its children live on."""
    on_gpu, how = own_device().type == "cuda", dict[str, Any]()
    if whole("num_workers", num_workers, 0):
        how = {"persistent_workers": True, "worker_init_fn": partial(heed_parent_alone, os.getpid())}
    if num_workers and on_gpu:  # a fork would copy the locks of threads and the state of CUDA
        how["multiprocessing_context"] = context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["workshop_utils.photos"])
        _start_fork_server()
    return _Loader(dataset, batch_sampler=batches, num_workers=num_workers, pin_memory=on_gpu, **how)


@contextmanager
def naming_dead_children(loader: DataLoader) -> Iterator[None]:
    """Raise RuntimeError in the block where a child of `loader` died while it sent a batch, as for any other death."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        if not loader.num_workers or str(error).startswith("Caught "):  # the dataset raised it
            raise
        raise RuntimeError(f"DataLoader worker exited unexpectedly, while it sent a batch ({error!r}).") from error


def evaluation_batches(dataset: Dataset, batch_size: int, num_workers: int, seed: int | None = None) -> DataLoader:
    """Return this rank's part of `dataset`, so that each image is on one rank; raise ValueError without images.

    seed: of what the dataset draws, each time the same; None to leave that to chance.
    """
    n_images = len(dataset)  # type: ignore[arg-type]
    if not n_images:
        raise ValueError("The dataset for evaluation has 0 images: give it some, or leave val_set out.")
    rank, world_size = world()
    part = range(rank, n_images, world_size)  # DistributedSampler would count some images twice
    batches = [
        [None if seed is None else derived_seed(seed, "evaluation", part[start]), *part[start : start + batch_size]]
        for start in range(0, len(part), batch_size)
    ]
    # To start a child takes 1.5 s of a core, which a rank without images need not spend.
    return batch_loader(_Seeded(dataset, range(n_images)), batches, num_workers if batches else 0)


def _start_fork_server() -> None:
    """Start the server that forks DataLoader's children, deaf to SIGTERM: without it, they would end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the server inherits this
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def heed_parent_alone(parent: int, _: int = 0) -> None:
    """Let SIGTERM end this process, a child of a DataLoader, only if `parent` sent it: the process that trains.

    Slurm signals all processes of a job. Without its images the parent could not finish the step and save it (seen in
    8 of 8 runs). A child that ignored the signal could not be ended, and its parent would wait for it for ever.
    Where the parent died, this process ends, too: a child of a fork server would not notice.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS, where there is no Slurm
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        told = None
        while psutil.pid_exists(parent) and not (told and told.si_pid == parent):
            told = signal.sigtimedwait({signal.SIGTERM}, 5)
        os._exit(0)

    threading.Thread(target=wait, name="heed-parent-alone", daemon=True).start()


class _Loader(DataLoader):
    """Starts its children with SIGTERM blocked, which is then blocked in all of their threads.

    Native threads, such as those of quantized operations, begin in a forked child before its worker_init_fn.
    """

    def __iter__(self):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Seeded(Subset):
    """Takes batches [seed, *indices]: what the dataset draws at random, also in a child, follows from the seed.

    seed: None to seed nothing. The dataset's class, its samples' and its errors' may be from a notebook's cell.
    """

    def __getitems__(self, batch):
        seed, *indices = batch
        if seed is not None:
            seed_all(seed)
        try:
            images = super().__getitems__(indices)
        except StopIteration as error:  # a DataLoader would take it for the end of the epoch
            raise ValueError(f"The dataset raised {error!r} for the images {indices}. {WHOLE_BATCHES}") from error
        except Exception as error:
            if not get_worker_info() or _can_be_sent(type(error)):
                raise
            raise RuntimeError(repr(error)) from error
        if len(images) != len(indices):  # ranks with other numbers of images would part, or wait for each other
            raise ValueError(f"The dataset gave {len(images)} images instead of {len(indices)}. {WHOLE_BATCHES}")
        # A named tuple would arrive as its class, which the parent may not be able to import.
        return [tuple(image) if isinstance(image, tuple) else image for image in images]

    def __reduce__(self):
        return _seeded, (by_value((self.dataset, self.indices)),)


def _seeded(pickled):
    return _Seeded(*pickle.loads(pickled))


def _can_be_sent(error_type):
    """Return whether a child can send an error: one whose class it cannot name would leave its parent waiting."""
    try:
        return pickle.loads(pickle.dumps(error_type)) is error_type
    except Exception:  # pickle raises errors of many types
        return False
