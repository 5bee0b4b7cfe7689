"""Run a PyTorch function on Dask workers as the ranks of one `torch.distributed` process group."""

import hashlib
import inspect
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from itertools import count
from typing import TYPE_CHECKING, Any

from distributed import Client

from daskrun import Job, JobError, check_call, limits
from daskrun.errors import ranks_do, ranks_named
from daskrun.private import RECORDER, forget_collectives, name_groups_from_zero
from daskrun.rank import Assignment, environment, network_interface

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import TCPStore
    from torch.nn import Module

CANNOT = "cannot be compared"  # stands for the shape of a tensor that has no hash
ONLY_BUFFERS = (
    "Only buffers differ, such as BatchNorm's statistics, which each rank collects from its own images. DDP copies "
    "rank 0's before the next forward pass: give buffers=False to compare weights alone."
)
SAME_MODEL = "Build the same model on all ranks."
SAME_UPDATES = "Call the DDP model itself, not its .module; end no_sync; change weights on all ranks alike."
BACKENDS = ("auto", "gloo", "nccl", "cpu:gloo,cuda:nccl")


def launch(
    client: Client,
    fn: Callable,
    /,
    *args: Any,
    backend: str = "auto",
    n_workers: int | tuple[int, int] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
    wait_for_workers: float = 0,
    wait_for_successors: float = 30,
    stall_after: float | None = None,
    **kwargs: Any,
) -> Job:
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
    stall_after: seconds without a row of metrics after which whoever waits for the job is warned, with the text of
    `Job.explain()`; the job goes on. None for no warning.

    A rank that raises ends the job with that rank's exception. Whatever ends it, the workers are free for the next.
    After a failure, each process in which a rank began is replaced, and with it what Dask kept there: it computes that
    again, but what was scattered there is lost.

    Raises at once: ValueError for a setting that cannot be; TypeError where the function cannot be called so, would
    take a misspelt setting by `**kwargs`, or cannot be pickled with its arguments; JobError where the cluster has too
    few workers, or several in one process; WorkersBusy, a JobError, where they are at work, for this client or another,
    or paused; SchedulerLost, a JobError; TimeoutError.
    `Job.result()` raises: what a rank raised; TypeError for a result that cannot be pickled; WorkerDied, SchedulerLost
    (JobErrors), the first with how the process ended; JobError for a backend that does not suit the ranks' GPUs, or for
    GPUs on some of the ranks; TimeoutError, which says who waited for whom; CancelledError.

    >>> from distributed import LocalCluster
    >>> with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
    ...     launch(cluster.get_client(), pow, 2, 5).result()
    [32, 32]
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: write one of {', '.join(BACKENDS)}.")
    settings: dict[str, Any] = {
        "n_workers": n_workers,
        "timeout": timeout,
        "max_restarts": max_restarts,
        "wait_for_workers": wait_for_workers,
        "wait_for_successors": wait_for_successors,
        "stall_after": stall_after,
    }
    check_call(launch, settings | {"backend": backend}, fn, args, kwargs)
    return Job(client, partial(_in_process_group, backend=backend), fn, args, kwargs, limits(**settings))


def run(client: Client, fn: Callable, /, *args: Any, **kwargs: Any) -> list[Any]:
    """Return `launch(...).result()`: what each rank returned, in rank order."""
    return launch(client, fn, *args, **kwargs).result()


def assert_equal_on_all_ranks(model: "Module", *, buffers: bool = False) -> None:
    """Raise AssertionError on all ranks, with the first tensor that differs and on which, unless the models are equal.

    Equal is to the bit, so -0.0 differs from 0.0. All ranks of a process group call it together; without a group, as
    under Horovod, nothing is compared. buffers: True also compares buffers. Those of BatchNorm are statistics of each
    rank's own images, which DDP makes equal only when the next forward pass begins.
    Raises TypeError on all ranks for a model whose numbers cannot be compared, such as one in shards.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    tensors = dict(model.named_parameters()) | (dict(model.named_buffers()) if buffers else {})
    ranks: list[dict[str, tuple[str, str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: _digest(tensor) for name, tensor in tensors.items()})
    differing = {}
    names = list(dict.fromkeys(name for rank in ranks for name in rank))  # a rank may lack some
    for name in names:
        found = [rank.get(name) for rank in ranks]
        if wrong := [one[1] for one in found if one and one[0] == CANNOT]:
            of = ranks_named([rank for rank, one in enumerate(found) if one and one[0] == CANNOT])
            raise TypeError(f"{name} of {of} cannot be compared, as it {wrong[0]}.")
        if len(set(found)) > 1:
            differing[name] = found
    if differing:
        name, found = next(iter(differing.items()))
        how, cure = _difference(found)
        if cure == SAME_UPDATES and not differing.keys() & dict(model.named_parameters()).keys():
            cure = ONLY_BUFFERS
        raise AssertionError(
            f"The ranks' models differ, first in {name}: {how}. {len(differing)} of {len(names)} tensors differ. {cure}"
        )


def _digest(tensor: "Tensor") -> tuple[str, str]:
    """Return (a tensor's type and shape, a hash of its bits); CANNOT and why, where there is none."""
    import torch

    if hasattr(tensor, "to_local"):
        return CANNOT, "is in shards, of which each rank holds its own part"
    if torch.nn.parameter.is_lazy(tensor):
        return CANNOT, "has no values yet: call the model once, on all ranks"
    if tensor.device.type == "meta":
        return CANNOT, "is on the meta device, without values"
    if tensor.is_nested:
        return CANNOT, "is nested: compare what its unbind() returns"
    if tensor.is_quantized:
        return CANNOT, "is quantized: compare what its dequantize() returns"
    if tensor.layout is not torch.strided:
        return CANNOT, f"has the layout {tensor.layout}: compare what its to_dense() returns"
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    digest = hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)}", digest


def _difference(found: list[tuple[str, str] | None]) -> tuple[str, str]:
    """Return (how a tensor differs, what to do). found: what `_digest` returned on each rank, None where it is not."""
    there = [one for one in found if one]
    if len(there) < len(found):
        without = [rank for rank, one in enumerate(found) if one is None]
        return f"{ranks_do(without, 'has', 'have')} no such tensor", SAME_MODEL
    shapes = [shape for shape, _ in there]
    alike = len(set(shapes)) == 1
    seen: list = there if alike else shapes
    usual = Counter(seen).most_common(1)[0][0]  # rank 0's where none has a majority
    odd = ranks_do([rank for rank, one in enumerate(seen) if one != usual], "has", "have")
    if alike:
        return f"{odd} other values than rank {seen.index(usual)}", SAME_UPDATES
    return f"{odd} another shape or type than rank {seen.index(usual)}", SAME_MODEL


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


def _in_process_group(run: Callable[[], bytes], store: "TCPStore", mine: Assignment, *, backend: str) -> bytes:
    """Return what `run` returns, which finds a process group and torchrun's environment."""
    from dask_pytorch_ddp.dispatch import dispatch_with_ddp

    outcome: list[bytes | BaseException] = []

    def body() -> None:
        # Wait for all ranks: a rank that leaves early breaks gloo for good in ranks that are still connecting.
        store.set(f"joined-{mine.rank}", "")
        store.wait([f"joined-{other}" for other in range(mine.world_size)])
        try:
            with _groups_made_by_scripts(store, mine):
                outcome.append(run())
        except BaseException as error:
            outcome.append(error)
            _abort_nccl()

    gpu = _gpu()
    store.set(f"gpu-{mine.rank}", gpu)
    gpus = [store.get(f"gpu-{other}").decode() for other in range(mine.world_size)]
    suited = backend_for(backend, gpus)
    with environment(_settings(mine, bool(gpu))):
        try:
            dispatch_with_ddp(body, store.host, store.port, mine.rank, mine.world_size, backend=suited)
        except Exception as error:
            # dispatch_with_ddp ends by destroying the group. That fails if the function has destroyed it, which is no
            # error, and if it could not be made, which hides the reason.
            if not outcome:
                raise error.__context__ or error from None
        finally:
            name_groups_from_zero()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


# (store, assignment, how often the group was made again) while a job's function runs in this process, else None
_of_job: "tuple[TCPStore, Assignment, Iterator[int]] | None" = None


@contextmanager
def _groups_made_by_scripts(store: "TCPStore", mine: Assignment) -> Iterator[None]:
    """Let `init_process_group` do nothing while there is a group, and else make one of the job's ranks.

    A script for torchrun makes the group itself, and may destroy it and make it again.
    """
    global _of_job
    _replace_init_process_group()
    _of_job = store, mine, count(1)
    try:
        yield
    finally:
        _of_job = None


@cache
def _replace_init_process_group() -> None:
    """Replace PyTorch's function for good, in all modules: one that has imported it by name outlives a job."""
    import torch.distributed as dist

    make = dist.init_process_group
    takes = inspect.signature(make)

    @wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not _of_job:
            return make(*args, **kwargs)
        if dist.is_initialized():
            return None
        store, mine, remade = _of_job
        given = takes.bind(*args, **kwargs).arguments
        given.pop("init_method", None)
        # The last group's addresses are in the store, too.
        given |= {"store": dist.PrefixStore(f"remade-{next(remade)}", store)}
        forget_collectives()  # the new group counts from 1, too
        return make(**given | {"rank": mine.rank, "world_size": mine.world_size})

    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is make:
                setattr(module, name, init_process_group)


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


def _settings(mine: Assignment, has_gpu: bool) -> dict[str, str]:
    """Return torchrun's environment, but for what `dispatch_with_ddp` sets, and what frameworks ask for."""
    rank, world_size = str(mine.rank), str(mine.world_size)
    settings: dict[str, Any] = {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RUN_ID": mine.job,
        "TORCHELASTIC_RESTART_COUNT": str(mine.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(mine.max_restarts),
        # The store at MASTER_ADDR is served already, as torchrun's agent serves its own: no port is guessed.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    defaults = dict(RECORDER)
    if not has_gpu:
        defaults["ACCELERATE_USE_CPU"] = "true"  # or a plain Accelerator() would train alone on each rank
    if interface := network_interface():
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # NCCL takes a prefix
    return settings | {name: value for name, value in defaults.items() if name not in os.environ}
