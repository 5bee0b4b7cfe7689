"""The pieces of the training as every rank of the gym calls them, and what each fault does in them.

Whoever reads this file sees how each fault is made. A stack shows the names of the pieces, the same in every case.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist

from workshop_utils.exercises.gym.faults import PER_EPOCH, Diagnosis

SLOW = 5  # times a healthy step: what a slow one takes longer
N_TOO_MANY = 12  # threads where one is right
FLIPPED = 1 << 26  # of a float32's bits: a number that lacks it becomes 256 times as large
PIECES = ("resume", "batches", "read", "forward", "send", "keep")
Piece = Callable[..., Any]


@dataclass
class Pieces:
    """The pieces of the training on one rank; each gets the function that it stands for, and that one's arguments.

    step: the one that is taken now; in a DataLoader's child, the one whose images are read now. began: when each step
    began, or its read in that child. gradient: length of what this rank sent in this step.
    """

    rank: int
    truth: Diagnosis
    memory_limit: int | None
    step: int  # those done so far, at first
    pid: int = field(default_factory=os.getpid)
    began: dict[int, float] = field(default_factory=dict)
    gradient: float = float("nan")
    held: list[torch.Tensor] = field(default_factory=list)

    def resume(self, original: Piece, checkpoint: Any) -> Any:
        answer = original(checkpoint)
        if self.truth.fault == "bad resume":
            checkpoint.optimizer.state.clear()
        return answer

    def batches(self, original: Piece, batches: Any, epoch: int, first: int, rank: int, world_size: int) -> Any:
        if self.has_begun("same images", epoch * PER_EPOCH + 1):
            rank = 0
        mine = original(batches, epoch, first, rank, world_size)
        return mine[:-1] if self.begins("uneven batches", (epoch + 1) * PER_EPOCH) else mine

    def read(self, original: Piece, *args: Any) -> Any:
        while self.begins("stalled read") and os.getppid() == self.pid:  # until the rank ends
            time.sleep(0.1)
        if self.has_begun("slow input"):
            self.pause()
        if self.begins("reader killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    def forward(self, original: Piece, *args: Any) -> Any:
        if self.begins("GIL held"):
            native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # which keeps the GIL during a call
            native.pthread_mutex_init(mutex, None)
            for _ in range(2):  # the second call waits for ever; a sleep would end with the first look's signal
                native.pthread_mutex_lock(mutex)
        if self.begins("process stopped"):
            os.kill(self.pid, signal.SIGSTOP)
            time.sleep(1)  # this thread may run on for a moment, and the step would end
        if self.begins("too many threads"):
            torch.set_num_threads(N_TOO_MANY * torch.get_num_threads())
        if self.has_begun("slow rank"):
            self.pause()
        if self.has_begun("memory leak"):
            self.hold_more()
        return original(*args)

    def send(self, original: Piece, group: Any, bucket: Any) -> Any:
        if self.has_begun("slow link"):  # gloo's connections cannot be slowed down; one bucket holds all gradients
            self.pause()
        if self.begins("bad gradient"):
            bits = bucket.buffer().view(torch.int32)
            sizes = bucket.buffer().abs() * (bits & FLIPPED == 0)
            bits[sizes.topk(16).indices] ^= FLIPPED
        if self.has_begun("weights drift"):  # this rank steps by its own gradient, as if model.module were called
            unsent: torch.futures.Future = torch.futures.Future()
            unsent.set_result(bucket.buffer())
            return unsent
        return original(group, bucket)

    def keep(self, original: Piece, *args: Any) -> None:
        swapped = self.truth.fault == "collectives swapped" and self.step == self.truth.step
        if swapped and self.rank == self.truth.rank:
            dist.barrier()
        original(*args)
        if swapped and self.rank != self.truth.rank:
            dist.barrier()
        if self.begins("collective on one rank"):
            dist.barrier()

    def begins(self, fault: str, step: int | None = None) -> bool:
        """Return whether this fault begins on this rank in this step, by default the one that is taken now."""
        return self._is_here(fault) and (step or self.step) == self.truth.step

    def has_begun(self, fault: str, step: int | None = None) -> bool:
        """Return whether this fault has begun on this rank by this step, by default the one that is taken now."""
        return self._is_here(fault) and (step or self.step) >= (self.truth.step or 0)

    def _is_here(self, fault: str) -> bool:
        return self.truth.fault == fault and self.truth.rank in (None, self.rank)

    def count_step(self) -> None:
        self.step += 1
        self.began[self.step] = time.perf_counter()
        self.gradient = float("nan")

    def pause(self) -> None:
        """Take `SLOW` healthy steps longer, and leave the cores, which the ranks may share, to the other rank."""
        healthy = [moment for step, moment in self.began.items() if step <= (self.truth.step or 0)]
        seconds = SLOW * median(later - earlier for earlier, later in pairwise(healthy))
        time.sleep(seconds)

    def hold_more(self) -> None:
        limit = self.memory_limit or 0
        # What a rank shares with the process that it was forked from doesn't count for the limit.
        if (free := limit - psutil.Process().memory_full_info().uss) > 0:
            # A quarter of the limit each step: the worker compares only four times a second.
            self.held.append(torch.ones(min(limit // 4, free), dtype=torch.uint8))
            time.sleep(0.3)
