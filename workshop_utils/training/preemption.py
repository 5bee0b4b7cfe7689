"""End training in order when SIGTERM comes, as Slurm, Kubernetes and others send it before they take a machine away."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch
import torch.distributed as dist
from distributed import get_worker

ANSWER_S = 10  # time limit for the event loop of a worker, which may be ending


class Preempted(RuntimeError):
    """Training ended early and in order, because at least one rank's process got SIGTERM."""

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
    """Yield a list that grows with each SIGTERM in the block, where the signal does not end this process.

    saves: if False, the block has nowhere to save to, the list stays empty, and SIGTERM ends the process as ever.

    After the block the handler is as before. If the block ends without an exception, a signal that came is sent again,
    so none is lost.
    Python runs handlers in the main thread. On a Dask worker, functions run in other threads, but the main one runs the
    worker's event loop, which sets the handler. In any other thread the list stays empty, and SIGTERM ends the process.
    """
    signals: list[int] = []
    before = _set_handler(lambda number, frame: signals.append(number)) if saves else None
    try:
        yield signals
    finally:
        if before is not None:
            _set_handler(before)
    if signals:  # not after an exception, which the signal would hide
        os.kill(os.getpid(), signal.SIGTERM)


def ranks_with_sigterm(signals: list[int]) -> list[int]:
    """Return the ranks whose list of `sigterm_noticed` is not empty.

    All ranks have to call this together; all get the same answer.
    """
    if not dist.is_initialized():
        return [0] if signals else []
    got_it = torch.zeros(dist.get_world_size(), device="cuda" if torch.cuda.is_available() else "cpu")
    got_it[dist.get_rank()] = bool(signals)
    dist.all_reduce(got_it)
    return got_it.nonzero().flatten().tolist()


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread, and so in all threads of the children that it starts in the block.

    Native threads, such as those of quantized operations, begin in a forked child before its worker_init_fn.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def heed_sigterm_only_from(parent: int) -> None:
    """In a child that reads images: end on SIGTERM if the process `parent` sent it, and ignore it otherwise.

    Slurm signals all processes of a job. Without its images the parent could not finish the step and save it (seen in
    8 of 8 runs). A child that ignored every SIGTERM could not be ended, and its parent would wait for it for ever.
    The child also ends after its parent has died, which a child of a fork server would not notice.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS, where there is no Slurm
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        sender = None
        while psutil.pid_exists(parent) and sender != parent:
            got = signal.sigtimedwait({signal.SIGTERM}, 5)
            sender = got.si_pid if got else None
        os._exit(0)

    threading.Thread(target=wait, name="heed-sigterm", daemon=True).start()


def _set_handler(handler: Callable | int) -> Any:
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
