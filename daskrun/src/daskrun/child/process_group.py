"""Make a process group for a function, as a script for torchrun makes its own."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from daskrun.child.context import Context
from daskrun.errors import JobError, ranks_named

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BACKENDS = ("auto", "gloo", "nccl", "cpu:gloo,cuda:nccl", None)
REACH_S = 20  # time limit for connecting to the store, which serves already; PyTorch may take twice as long
JOIN_S = 300  # time limit for all ranks to arrive: each imports and unpickles at its own speed


def in_process_group(call: Callable[[Any], None], here: Context, backend: str | None) -> None:
    """Run `call`, which gets the ranks' store, inside a process group; with backend=None, without either."""
    import torch
    import torch.distributed as dist

    mine = here.mine
    if torch.cuda.is_available() and mine.place.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(mine.place.local_rank)
    if backend is None:
        call(None)
        return
    store = connect(here)
    store.set(f"gpu-{mine.rank}", _gpu())
    gpus = [store.get(f"gpu-{other}").decode() for other in range(mine.world_size)]
    backend = backend_for(backend, gpus)
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=mine.rank, world_size=mine.world_size)
    # Wait for all ranks: a rank that leaves early breaks gloo for good in ranks that are still connecting.
    store.set(f"joined-{mine.rank}", "")
    store.wait([f"joined-{other}" for other in range(mine.world_size)])
    try:
        call(store)
    except BaseException:
        if dist.is_initialized() and "nccl" in dist.get_backend():
            dist.group.WORLD.abort()  # type: ignore[union-attr]  # its regular end would wait for the other ranks
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def connect(here: Context) -> "TCPStore":
    """Return a client of the store that all ranks of this attempt share. Raises JobError."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        soon = timedelta(seconds=REACH_S)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=soon)
    except Exception as error:
        why = [*str(error).splitlines(), type(error).__name__][0]
        raise JobError(
            f"Rank {here.mine.rank}, on {here.host}, could not connect to rank 0 at {host}:{port} ({why}): let the "
            "workers' hosts reach each other on all TCP ports, as PyTorch chooses any (a firewall, or the rules of a "
            "network), or start the workers with a --host that the others reach."
        ) from None
    store.set_timeout(timedelta(seconds=JOIN_S))
    return store


def backend_for(backend: str, gpus: list[str]) -> str:
    """Return the backend for ranks that ask for `backend`. gpus: which GPU each rank has, empty for none.

    Raises JobError where it does not suit them.

    >>> backend_for("auto", ["host 1", "host 2"]), backend_for("auto", ["host 1", "host 1"]), backend_for("auto", [""])
    ('cpu:gloo,cuda:nccl', 'gloo', 'gloo')
    """
    each_its_own = all(gpus) and len(set(gpus)) == len(gpus)
    if "nccl" in backend and not each_its_own:
        raise JobError(
            f"backend={backend!r} needs a GPU of its own for each rank, but the ranks have {gpus}: write "
            "backend='auto' or 'gloo'."
        )
    if backend != "auto":
        return backend
    if any(gpus) and not all(gpus):
        without = [rank for rank, gpu in enumerate(gpus) if not gpu]
        raise JobError(
            f"{ranks_named(without).capitalize()} of {len(gpus)} {'has' if len(without) == 1 else 'have'} no GPU, and "
            "the others have: name workers of one kind, as in workers=['gpu-0', 'gpu-1'], or write backend='gloo'."
        )
    return "cpu:gloo,cuda:nccl" if each_its_own else "gloo"


def _gpu() -> str:
    """Return which GPU this process has, the same text for two that share one; empty for none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    # Not the UUID: slices of one GPU (MIG) may share it or not, and NCCL refuses two ranks by the place on the bus.
    bus = [getattr(about, f"pci_{part}_id", about.uuid) for part in ("domain", "bus", "device")]
    return f"{socket.gethostname()} {bus}"
