"""End training in order when SIGTERM comes, as Slurm, Kubernetes and others send it before they take a machine away."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
import torch.distributed as dist


class Preempted(RuntimeError):
    """Training ended early and in order, because at least one rank's process got SIGTERM."""

    def __init__(self, step: int, ranks: list[int], checkpoint: str | os.PathLike) -> None:
        """Keep what happened.

        Args:
            step: The last one, which the checkpoint holds.
            ranks: Those whose processes got SIGTERM.
            checkpoint: Its path or address.
        """
        super().__init__(step, ranks, str(checkpoint))  # pickle needs all three
        self.step, self.ranks, self.checkpoint = step, ranks, str(checkpoint)

    def __str__(self) -> str:
        return (
            f"Rank {', '.join(map(str, self.ranks))} got SIGTERM, so training ended after step {self.step}, which is "
            f"saved: to go on from there, start it again with checkpoint={self.checkpoint!r}."
        )


@contextmanager
def sigterm_noticed(saves: bool = True) -> Iterator[list[int]]:
    """Yield a list that grows with each SIGTERM in the block, where the signal does not end this process.

    After the block the handler is as before. If the block ends without an exception, a signal that came is sent again,
    so none is lost.

    Args:
        saves: If False, the block has nowhere to save to: the list stays empty, and SIGTERM ends the process as ever.
            So it does outside of the main thread, in which Python runs handlers.
    """
    signals: list[int] = []
    if not saves or threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, before)
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
