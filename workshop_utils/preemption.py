"""Leave training in order where a rank's process is told to end: by SIGTERM, as Slurm, Kubernetes and others do."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from distributed import get_worker

ANSWER_S = 10  # for the event loop of a worker that may be ending
F = TypeVar("F", bound=Callable)
_received: list[int] = []  # the process's, as its signal handlers are


class Preempted(RuntimeError):
    """Training ended early and in order, as the process of a rank was told to end."""

    def __init__(self, step: int, ranks: list[int], checkpoint: str | os.PathLike) -> None:
        """step: the last one, which the checkpoint holds. ranks: whose processes got SIGTERM."""
        super().__init__(step, ranks, str(checkpoint))  # all of it, or it could not be unpickled

    def __str__(self) -> str:
        step, ranks, checkpoint = self.args
        return (f"Rank {', '.join(map(str, ranks))} got SIGTERM, so training ended after step {step}, which is saved: "
                f"to go on from there, start it again with checkpoint={checkpoint!r}.")  # fmt: skip


@contextmanager
def sigterm_noticed() -> Iterator[None]:
    """Take note of SIGTERM in the block, where the process would end; afterwards its handler is as it was before.

    Python runs handlers in the main thread alone. A function on a Dask worker is in another one, but the worker's event
    loop is there. Where neither is in the main thread, SIGTERM ends the process as it did before.
    """
    _received.clear()
    before = _handle(lambda *_: _received.append(1))
    try:
        yield
    finally:
        if before is not None:
            _handle(before)


def heeds_sigterm(train: F) -> F:
    """Decorate a function with the keyword `checkpoint`: given one, it runs in `sigterm_noticed`, else as before."""

    @wraps(train)
    def heeding(*args: Any, checkpoint: Any = None, **settings: Any) -> Any:
        with sigterm_noticed() if checkpoint else nullcontext():
            return train(*args, checkpoint=checkpoint, **settings)

    return cast(F, heeding)


@contextmanager
def ending_if_told(step: int, checkpoint: str | os.PathLike, device: torch.device) -> Iterator[list[int]]:
    """Yield the ranks that have got SIGTERM, the same on all: a collective of one number a rank, to call after a step.

    Where there are any, all ranks wait for the slowest to leave the block, which may save, and raise Preempted.
    device: on which the ranks' backend takes a tensor.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    told = torch.zeros(world_size)
    told[rank] = bool(_received)
    told = told.to(device)
    if world_size > 1:
        dist.all_reduce(told)
    ranks = told.nonzero().flatten().tolist()
    yield ranks
    if ranks:
        if world_size > 1:
            dist.barrier()  # the first rank to fail ends the job, also one that still saves
        raise Preempted(step, ranks, checkpoint)


def heed_parent_alone(_: int = 0) -> None:
    """Let SIGTERM end this process, a DataLoader's child, where its parent sends it, and nobody else's.

    Slurm signals all processes: the step could not be finished without its images.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS, which has no Slurm either
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait, name="heed-parent-alone", daemon=True).start()


def _handle(handler: Any) -> Any:
    """Make this the handler of SIGTERM; return the one before, None where that cannot be."""

    async def in_the_loop() -> Any:
        return signal.signal(signal.SIGTERM, handler)

    with suppress(ValueError, RuntimeError, TimeoutError):  # no main thread here, no worker, or its loop has ended
        if threading.current_thread() is threading.main_thread():
            return signal.signal(signal.SIGTERM, handler)
        loop = get_worker().loop.asyncio_loop  # type: ignore[attr-defined]
        return asyncio.run_coroutine_threadsafe(in_the_loop(), loop).result(ANSWER_S)
    return None
