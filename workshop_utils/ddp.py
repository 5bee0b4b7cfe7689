"""Run a PyTorch function on Dask workers as the ranks of one `torch.distributed` process group."""

import os
import socket
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from distributed import Client

from workshop_utils.job import Job, JobError
from workshop_utils.job.rank import Place, network_interface

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BACKENDS = ("auto", "gloo", "nccl", "cpu:gloo,cuda:nccl")


def launch(client: Client, fn: Callable, /, *args: Any, backend: str = "auto",
           n_workers: int | tuple[int, int] | None = None, timeout: float | None = None, max_restarts: int = 0,
           wait_for_workers: float = 0, wait_for_successors: float = 30, **kwargs: Any) -> Job:  # fmt: skip
    """Start `fn(*args, **kwargs)` as one rank per worker process, and return the `Job` at once.

    The function finds what torchrun would give it: a process group in `torch.distributed`, made before it runs and
    destroyed after it, and torchrun's environment variables. Code written for torchrun, Accelerate or Lightning runs as
    it is. Each worker process counts as a node of its own, whose own GPU, where it has one, is cuda:0.

    n_workers: the world size; a pair (fewest, most) for as many as are idle, such as (2, 4); None for all workers.
    Where only some workers have a GPU, those are taken if they are enough, else the others; a warning says which.
    backend: "nccl", "gloo", or "auto" for NCCL where every rank has a GPU of its own (tensors on the CPU then still go
    through gloo), else gloo.
    timeout: seconds that the whole job may take; None for no limit.
    max_restarts: how often the function is started anew, on all ranks, after the death of a worker; it should then
    continue from its checkpoint. An exception is never retried.
    wait_for_workers: seconds to wait until so many workers (the most of a pair) are there and idle. An adaptive cluster
    starts workers for tasks, not for ranks, so give it a minimum: cluster.adapt(minimum=n_workers, maximum=…).
    wait_for_successors: seconds to wait after a death until as many workers as before are there, which takes minutes
    where Slurm or Kubernetes has to start them. After that, a pair goes on with those that remain.

    A rank that raises ends the job with that rank's exception. Whatever ends it, the workers are free for the next.

    Raises at once: ValueError for a setting that cannot be; TypeError where the function or an argument cannot be
    pickled; JobError where the cluster has too few workers, or several in one process; WorkersBusy, a JobError, where
    they are at work, for this client or another; SchedulerLost, a JobError.
    `Job.result()` raises: what a rank raised; TypeError for a result that cannot be pickled; WorkerDied, SchedulerLost
    (JobErrors); JobError for a backend that does not suit the ranks' GPUs, or for GPUs on some of the ranks;
    TimeoutError, which says where each rank stood; CancelledError.

    >>> from distributed import LocalCluster
    >>> with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
    ...     launch(cluster.get_client(), pow, 2, 5).result()
    [32, 32]
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: write one of {', '.join(BACKENDS)}.")
    return Job(client, partial(_in_process_group, backend=backend), fn, args, kwargs, n_workers=n_workers,
               timeout=timeout, max_restarts=max_restarts, wait_for_workers=wait_for_workers,
               wait_for_successors=wait_for_successors)  # fmt: skip


def run(client: Client, fn: Callable, /, *args: Any, **kwargs: Any) -> list[Any]:
    """Return `launch(...).result()`: what each rank returned, in rank order."""
    return launch(client, fn, *args, **kwargs).result()


def _in_process_group(run: Callable[[], bytes], store: "TCPStore", place: Place, *, backend: str) -> bytes:
    import torch.distributed as dist
    from dask_pytorch_ddp.dispatch import dispatch_with_ddp

    outcome: list[bytes | BaseException] = []
    make, remade = dist.init_process_group, count(1)

    def init_process_group(backend: str | None = None, init_method: str | None = None, **kwargs: Any) -> None:
        if not dist.is_initialized():  # a script for torchrun makes the group itself, and may destroy and make it again
            fresh = dist.PrefixStore(f"remade-{next(remade)}", store)  # the last one's addresses are in the store, too
            make(backend, **kwargs | {"store": fresh, "rank": place.rank, "world_size": place.world_size})

    def body() -> None:
        # One that leaves while another still connects would break that one's gloo for its process's life.
        store.set(f"joined-{place.rank}", "")
        store.wait([f"joined-{other}" for other in range(place.world_size)])
        try:
            name, home = "init_process_group", dist.distributed_c10d
            with patch.object(dist, name, init_process_group), patch.object(home, name, init_process_group):
                outcome.append(run())
        except BaseException as error:
            outcome.append(error)
            if dist.is_initialized() and "nccl" in dist.get_backend():
                dist.group.WORLD.abort()  # type: ignore[union-attr]  # or its end would wait for the other ranks

    backend = _backend(backend, store, place)
    with patch.dict(os.environ, _settings(place)):  # and no variable stays that is set within
        try:
            dispatch_with_ddp(body, store.host, store.port, place.rank, place.world_size, backend=backend)
        except Exception as error:  # of its `finally`, if the group could not be made, or the function destroyed it
            if not outcome:
                raise error.__context__ or error from None
        finally:  # a group that could not be made has been counted: the next one's name would differ from its peers'
            dist.distributed_c10d._world.group_count = 0
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _backend(backend: str, store: "TCPStore", place: Place) -> str:
    """Return the backend for all ranks, once each has told the others which GPU it has."""
    store.set(f"gpu-{place.rank}", _gpu())
    gpus = [store.get(f"gpu-{other}").decode() for other in range(place.world_size)]
    own = all(gpus) and len(set(gpus)) == place.world_size
    if "nccl" in backend and not own:
        raise JobError(f"backend={backend!r} needs a GPU of its own for each rank, but the ranks have {gpus}: "
                       "write backend='auto' or 'gloo'.")  # fmt: skip
    if backend == "auto" and any(gpus) and not all(gpus):
        without = [rank for rank, gpu in enumerate(gpus) if not gpu]
        raise JobError(f"Rank {', '.join(map(str, without))} of {place.world_size} has no GPU, and the others have: "
                       "take workers of one kind, or write backend='gloo'.")  # fmt: skip
    if backend == "auto":
        return "cpu:gloo,cuda:nccl" if own else "gloo"
    return backend


def _gpu() -> str:
    import torch

    # Not the UUID: slices of one GPU (MIG) may share it or not, and NCCL refuses two ranks by the place on the bus.
    about = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    bus = [getattr(about, f"pci_{part}_id", about.uuid) for part in ("domain", "bus", "device")] if about else None
    return f"{socket.gethostname()} {bus}" if bus else ""


def _settings(place: Place) -> dict[str, str]:
    """Return torchrun's environment, but for what `dispatch_with_ddp` sets, and the network interface to use."""
    rank, world_size = str(place.rank), str(place.world_size)
    settings = {
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank, "GROUP_WORLD_SIZE": world_size,
        "ROLE_NAME": "default", "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RUN_ID": place.job, "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        # The store at MASTER_ADDR is served already, as torchrun's agent serves its own: no port is guessed.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    if interface := network_interface():
        exactly = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # NCCL takes a prefix
        settings |= {name: value for name, value in exactly.items() if name not in os.environ}
    return settings
