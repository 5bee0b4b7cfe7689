"""Sixteen faults of training on several ranks; each changes one piece of the reference training on a worker.

A fault is a function (here, original) -> replacement of the piece. `here` is what a rank knows of itself and of the
fault that was drawn: see `gym.run.Here`.
"""

import ctypes
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from workshop_utils.exercises.gym.drawn import ANY_STEP, FOUND, PER_EPOCH, RESUMED_AT, SAVED_EVERY, Drawn, Piece, fault

Here = Any  # a rank of a run: see `run.Here`, which imports this module

MOST_LEAKED = 4 * 2**30  # bytes
SLOW = 5  # what is slow takes so many times as long as a healthy step of the same run did
N_TOO_MANY = 12  # threads where one is right
HELD_S = 1800  # nobody waits longer for a process that does not answer
SOON = range(14, 18)  # there are enough steps before and after to compare their times


def draw(seed: int, possible: Sequence[int]) -> Drawn:
    """Return what is wrong in the case of this seed: nothing in one of six, else one of the `possible` faults.

    A fault that is not possible does not change what other seeds draw.
    """
    chance = random.Random(seed)
    if chance.random() < 1 / 6:
        return Drawn(0)
    number = chance.choice(list(FOUND))
    while number not in possible:
        number = chance.choice(list(FOUND))
    return Drawn(number, chance.choice(FOUND[number].ranks), chance.choice(FOUND[number].steps))


def possible_with(memory_limit: int | None) -> list[int]:
    """Return the numbers of the faults that can be on workers with this memory limit in bytes, None for no limit."""
    leaks = memory_limit is not None and memory_limit <= MOST_LEAKED
    return [number for number, one in FOUND.items() if leaks or one.kind != "memory leak"]


# --- it hangs


@fault(
    "collective on one rank",
    "hangs",
    piece="keep",
    at="self._save(step",
    look="explain",
    cure="same collectives on all ranks",
    ranks=(0,),
    steps=ANY_STEP[::SAVED_EVERY],
)
def one_rank_alone(here: "Here", original: Piece) -> Piece:
    def keep(self, step, numbers=None):
        original(self, step, numbers)
        if here.strikes(step):
            dist.barrier()  # in the branch that only rank 0 takes

    return keep


@fault(
    "collectives swapped",
    "hangs",
    piece="keep",
    at="told = ranks_told",
    look="explain",
    cure="same collectives on all ranks",
    alike="collective on one rank",
)
def swapped(here: "Here", original: Piece) -> Piece:
    def keep(self, step, numbers=None):
        if here.strikes(step):
            dist.barrier()
        original(self, step, numbers)
        if step == here.drawn.step and not here.strikes(step):
            dist.barrier()

    return keep


@fault(
    "uneven batches",
    "hangs",
    piece="batches",
    look="explain",
    cure="as many batches on all ranks",
    steps=(PER_EPOCH, 2 * PER_EPOCH),
    tolerance=0,
)
def one_batch_fewer(here: "Here", original: Piece) -> Piece:
    def batches(self, epoch, first, rank, world_size):
        mine = original(self, epoch, first, rank, world_size)
        return mine[:-1] if here.strikes((epoch + 1) * self.per_epoch) else mine

    return batches


@fault("stalled read", "hangs", piece="read", look="stacks", cure="time limit for reads")
def a_read_stalls(here: "Here", original: Piece) -> Piece:
    def read(paths, storage_options=None):
        while here.strikes(here.reading) and os.getppid() == here.pid:  # no orphan waits on
            time.sleep(0.1)
        return original(paths, storage_options)

    return read


@fault("GIL held", "hangs", piece="step", at="optimizer.step()", look="explain", cure="release the GIL")
def the_gil_is_held(here: "Here", original: Piece) -> Piece:
    def step(*args):
        if here.strikes():
            ctypes.PyDLL(None).sleep(HELD_S)  # PyDLL keeps the GIL during the call
        return original(*args)

    return step


@fault("process stopped", "hangs", piece="step", at="part_loss.backward()", look="explain", cure="continue the process")
def the_process_is_stopped(here: "Here", original: Piece) -> Piece:
    def step(*args):
        if here.strikes():
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # this thread may run on for a moment, and the step would end
        return original(*args)

    return step


# --- it is slow


@fault(
    "slow rank", "slow", piece="logits", at="return model(images)", look="metrics", cure="another machine", steps=SOON
)
def a_slow_machine(here: "Here", original: Piece) -> Piece:
    def logits(*args):
        if here.has_struck():  # on two cores that are shared, a busy process would slow down both ranks
            time.sleep(SLOW * here.pace)
        return original(*args)

    return logits


@fault(
    "slow input",
    "slow",
    piece="read",
    look="metrics",
    cure="more readers",
    steps=SOON,
    tolerance=3,  # two batches are read ahead
)
def slow_input(here: "Here", original: Piece) -> Piece:
    def read(paths, storage_options=None):
        if here.has_struck(here.reading):
            time.sleep(SLOW * here.pace)
        return original(paths, storage_options)

    return read


@fault(
    "too many threads",
    "slow",
    piece="step",
    at="part_loss.backward()",
    look="metrics",
    cure="one thread a core",
    ranks=(None,),
    steps=SOON,
)
def too_many_threads(here: "Here", original: Piece) -> Piece:
    def step(*args):
        if here.has_struck():
            torch.set_num_threads(N_TOO_MANY * here.threads)
        return original(*args)

    return step


@fault("slow link", "slow", piece="send", look="metrics", cure="faster network", ranks=(None,), steps=SOON)
def a_slow_link(here: "Here", original: Piece) -> Piece:
    def send(group, bucket):
        if here.has_struck():  # gloo's connections cannot be slowed down: this waits as long as such a link would take
            share = bucket.buffer().numel() / here.n_weights
            time.sleep(SLOW * here.pace * share)
        return original(group, bucket)

    return send


# --- it dies


@fault("memory leak", "dead", piece="step", at="loss += part_loss.detach()", look="result", cure="keep no tensors")
def a_leak(here: "Here", original: Piece) -> Piece:
    def step(*args):
        free = here.memory_limit - psutil.Process().memory_info().rss if here.has_struck() else 0
        if free > 0:  # a quarter of the limit each step: Dask looks only ten times a second
            here.kept.append(torch.ones(min(here.memory_limit // 4, free), dtype=torch.uint8))
            time.sleep(0.2)
        return original(*args)

    return step


@fault(
    "reader killed",
    "dead",
    piece="read",
    look="result",
    cure="more memory for readers",
    tolerance=3,  # two batches are read ahead
)
def the_reader_is_killed(here: "Here", original: Piece) -> Piece:
    def read(paths, storage_options=None):
        if here.strikes(here.reading) and get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        return original(paths, storage_options)

    return read


# --- it is wrong


@fault(
    "weights drift",
    "wrong",
    piece="step",
    at="optimizer.step()",
    look="metrics",
    cure="call the wrapped model",
    ranks=(None,),
)
def the_module_is_called(here: "Here", original: Piece) -> Piece:
    def step(parallel, optimizer, rate, images, labels, run, sent):
        if here.has_struck():
            parallel, sent = parallel.module, {}  # its gradients stay on this rank
        return original(parallel, optimizer, rate, images, labels, run, sent)

    return step


@fault(
    "same images",
    "wrong",
    piece="batches",
    look="metrics",
    cure="shard by rank",
    ranks=(None,),
    steps=(PER_EPOCH + 1, 2 * PER_EPOCH + 1),
)
def the_same_images(here: "Here", original: Piece) -> Piece:
    def batches(self, epoch, first, rank, world_size):
        struck = here.has_struck(epoch * self.per_epoch + 1)
        return original(self, epoch, first, 0 if struck else rank, world_size)

    return batches


@fault(
    "bad resume",
    "wrong",
    piece="resume",
    at="self.optimizer.load_state_dict",
    look="metrics",
    cure="load all of the checkpoint",
    ranks=(None,),
    steps=(RESUMED_AT + 1,),
)
def without_moments(here: "Here", original: Piece) -> Piece:
    def resume(self):
        answer = original(self)
        self.optimizer.state.clear()
        return answer

    return resume


@fault("bad gradient", "wrong", piece="send", look="metrics", cure="another machine")
def flipped_bits(here: "Here", original: Piece) -> Piece:
    def send(group, bucket):
        if here.strikes():
            bits = bucket.buffer().view(torch.int32)
            sizes = bucket.buffer().abs() * (bits & 1 << 26 == 0)  # there, the bit makes a number 256 times as large
            bits[sizes.topk(16).indices] ^= 1 << 26
        return original(group, bucket)

    return send
