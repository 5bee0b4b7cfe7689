"""Leave training in order when a rank's process is told to end: by SIGTERM, as Slurm, Kubernetes and others do."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from distributed import get_worker

from workshop_utils.loop.ranks import own_device, world

ANSWER_S = 10  # time limit for the event loop of a worker, which may be ending


class Preempted(RuntimeError):
    """Training ended early and in order, because the process of a rank was told to end."""

    def __init__(self, step: int, ranks: list[int], checkpoint: str | os.PathLike) -> None:
        """step: the last one, which the checkpoint holds. ranks: those whose processes got SIGTERM."""
        super().__init__(step, ranks, str(checkpoint))  # pickle needs all three

    def __str__(self) -> str:
        step, ranks, checkpoint = self.args
        return (
            f"Rank {', '.join(map(str, ranks))} got SIGTERM, so training ended after step {step}, which is saved: "
            f"to go on from there, start it again with checkpoint={checkpoint!r}."
        )


@contextmanager
def sigterm_noticed(saves: bool = True) -> Iterator[list[int]]:
    """Yield a list that grows with each SIGTERM in the block, instead of the end of the process.

    saves: if False, the block has nowhere to save to, and SIGTERM ends the process as ever.

    After the block the handler is as before. A signal that no exception has answered is sent again, so none is lost.
    Python runs handlers in the main thread alone. A function on a Dask worker runs in another thread, but the worker's
    event loop is in the main one. Where neither is there, SIGTERM ends the process as before.
    """
    received: list[int] = []
    before = _handle(lambda number, frame: received.append(number)) if saves else None
    try:
        yield received
    finally:
        if before is not None:
            _handle(before)
    if received:  # not after an exception, which the signal would hide
        os.kill(os.getpid(), signal.SIGTERM)


def ranks_told(received: list[int]) -> list[int]:
    """Return the ranks whose `received` is not empty. All ranks have to call this together; all get the same answer."""
    rank, world_size = world()
    told = torch.zeros(world_size)
    told[rank] = bool(received)
    told = told.to(own_device())
    if world_size > 1:
        dist.all_reduce(told)
    return told.nonzero().flatten().tolist()


def _handle(handler: Any) -> Any:
    """Make this the handler of SIGTERM; return the one before, or None where no handler can be set."""

    async def in_the_loop() -> Any:
        return signal.signal(signal.SIGTERM, handler)

    # Not the main thread and no worker, or a worker whose loop has ended.
    with suppress(ValueError, RuntimeError, TimeoutError):
        if threading.current_thread() is threading.main_thread():
            return signal.signal(signal.SIGTERM, handler)
        loop = get_worker().loop.asyncio_loop  # type: ignore[attr-defined]
        return asyncio.run_coroutine_threadsafe(in_the_loop(), loop).result(ANSWER_S)
    return None
