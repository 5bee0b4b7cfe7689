"""Run a job's function under the contract of torchrun: its environment, and a process group of `torch.distributed`."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from daskrun.errors import JobError, ranks_named
from daskrun.private import RECORDER, name_groups_from_zero
from daskrun.rank import Assignment, network_interface
from daskrun.restore import environment

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BACKENDS = ("auto", "gloo", "nccl", "cpu:gloo,cuda:nccl", "horovod", None)


def in_process_group(run: Callable[[], bytes], store: "TCPStore", mine: Assignment, *, backend: str | None) -> bytes:
    """Return what `run` returns, which finds torchrun's environment and, but for backend=None, a process group."""
    gpu = _gpu()
    with environment(torchruns_environment(store, mine, bool(gpu))):
        try:
            if backend is None:
                return run()
            store.set(f"gpu-{mine.rank}", gpu)
            gpus = [store.get(f"gpu-{other}").decode() for other in range(mine.world_size)]
            return _with_group(run, store, mine, backend_for(backend, gpus))
        finally:
            _leave_group()


def _with_group(run: Callable[[], bytes], store: "TCPStore", mine: Assignment, backend: str) -> bytes:
    from dask_pytorch_ddp.dispatch import dispatch_with_ddp

    outcome: list[bytes | BaseException] = []

    def body() -> None:
        # Wait for all ranks: a rank that leaves early breaks gloo for good in ranks that are still connecting.
        store.set(f"joined-{mine.rank}", "")
        store.wait([f"joined-{other}" for other in range(mine.world_size)])
        try:
            outcome.append(run())
        except BaseException as error:
            outcome.append(error)
            _abort_nccl()

    try:
        dispatch_with_ddp(body, store.host, store.port, mine.rank, mine.world_size, backend=backend)
    except Exception as error:
        # dispatch_with_ddp ends by destroying the group. That fails if the function has destroyed it, which is no
        # error, and if it could not be made, which hides the reason.
        if not outcome:
            raise error.__context__ or error from None
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


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
            "the others have: take workers of one kind, or write backend='gloo'."
        )
    return "cpu:gloo,cuda:nccl" if each_its_own else "gloo"


def torchruns_environment(store: "TCPStore", mine: Assignment, has_gpu: bool) -> dict[str, str]:
    """Return the variables that torchrun sets, and what frameworks ask for."""
    rank, world_size = str(mine.rank), str(mine.world_size)
    variables: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RUN_ID": mine.attempt.job,
        "TORCHELASTIC_RESTART_COUNT": str(mine.attempt.number),
        "TORCHELASTIC_MAX_RESTARTS": str(mine.max_restarts),
        # The store at MASTER_ADDR is served already, as torchrun's agent serves its own: no port is guessed.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    defaults = dict(RECORDER)
    if not has_gpu:
        defaults["ACCELERATE_USE_CPU"] = "true"  # or a plain Accelerator() would train alone on each rank
    if interface := network_interface():
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # NCCL takes a prefix
    return variables | {name: value for name, value in defaults.items() if name not in os.environ}


def _leave_group() -> None:
    """Destroy the group that a function has made and left, or could not make, so that the next job can make its own."""
    import torch.distributed as dist

    if dist.is_initialized():
        _abort_nccl()
        with suppress(Exception):  # ranks that have ended do not answer
            dist.destroy_process_group()
    name_groups_from_zero()


def _abort_nccl() -> None:
    """Abort a group of NCCL's after a failure: its regular end would wait for the other ranks."""
    import torch.distributed as dist

    if dist.is_initialized() and "nccl" in dist.get_backend():
        dist.group.WORLD.abort()  # type: ignore[union-attr]


def _gpu() -> str:
    """Return which GPU this process has, the same text for two that share one; empty for none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    about = torch.cuda.get_device_properties(0)
    # Not the UUID: slices of one GPU (MIG) may share it or not, and NCCL refuses two ranks by the place on the bus.
    bus = [getattr(about, f"pci_{part}_id", about.uuid) for part in ("domain", "bus", "device")]
    return f"{socket.gethostname()} {bus}"
