"""Run a PyTorch function on Dask workers as the ranks of one job."""

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from dask.base import is_dask_collection
from distributed import Client, Future

from daskrun.child.process_group import BACKENDS
from daskrun.client.job import Job
from daskrun.client.limits import Limits
from daskrun.errors import check_client
from daskrun.pickling import pickled
from daskrun.protocol import Function

T = TypeVar("T")


def launch(
    client: Client,
    fn: Callable[..., T] = None,  # type: ignore[assignment]  # so that we can say what's missing
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    backend: str | None = "auto",
    n_workers: int | tuple[int, int] | None = None,
    workers: str | Sequence[str | int] | None = None,
    time_limit: float | str | None = None,
    max_restarts: int = 0,
    retry: type[BaseException] | Sequence[type[BaseException]] = (),
    wait_for_workers: float | str = 0,
    wait_for_successors: float | str = 30,
    stall_after: float | str | None = 300,
    shutdown_timeout: float | str = 30,
    start_method: str | None = None,
    virtual_local_rank: bool = False,
    debug: str | None = None,
    debug_timeout: float | str = 600,
) -> Job[T]:
    """Start a function as one rank per worker, each in a process of its own, and return the `Job` at once.

    The function finds what torchrun gives a script: the environment variables, a process group in
    ``torch.distributed``, which is made before it runs and destroyed after it, and a process that nothing ran in
    before. Accelerate, Lightning and the Trainer of transformers use that group. Its GPU, if it has one, is
    ``cuda:LOCAL_RANK``, and the current device. What it prints is printed here, with its rank, as soon as something
    waits for the job.

    On Linux, ranks are forked from a process that has imported PyTorch, which takes a fraction of a second. The
    function and its arguments are pickled; modules are imported by the rank, as they are then.

    Durations are seconds, or texts such as "10 min".

    Args:
        client: A connected ``distributed.Client``.
        fn: The function. It runs in the main thread.
        *args: Its arguments.
        kwargs: Its keyword arguments.
        backend: "nccl", "gloo", or "auto" for NCCL if every rank has a GPU of its own (tensors on the CPU then still go
            through gloo), else gloo. None makes no group, for a function that calls ``init_process_group`` itself.
        n_workers: The world size; a pair (fewest, most) for as many as are idle, such as (2, 4); None for all workers.
        workers: Addresses, names or hosts of those that it may run on, as for ``client.submit``, or a text with commas
            between them; by default any. Where only some have a GPU, name those that have, or those that haven't.
        time_limit: How long the whole job may take; None for no limit.
        max_restarts: How often the function is started again, on all ranks, after the death of a rank; it should then
            continue from its checkpoint. The caller is warned of each death at once.
        retry: Types of exceptions after which it's started again, too.
        wait_for_workers: How long to wait until so many workers (the most of a pair) are there and idle, all at the
            same moment. An adaptive cluster starts workers for tasks, not for ranks, so give it a minimum:
            ``cluster.adapt(minimum=n_workers, maximum=…)``.
        wait_for_successors: How long to wait after a worker's death until as many workers as before are there, which
            takes minutes if Slurm or Kubernetes has to start them. After that, a pair goes on with those that remain. A
            pair takes more than before, if they're there.
        stall_after: How long no rank may log or print anything until the caller is warned, with the text of
            ``Job.explain()``; the job goes on. None or 0 for no warning.
        shutdown_timeout: How long ranks have to end after SIGTERM, which they get when another one has failed.
        start_method: "spawn" starts a new interpreter for each rank, in seconds; "fork", the default on Linux, forks.
        virtual_local_rank: Whether each rank counts as a host of its own: LOCAL_RANK is 0, and its GPU is cuda:0.
        debug: "error" opens pdb where a rank raises an error; ``breakpoint()`` does so anyway. The prompt is in the
            notebook or terminal that waits for the job; see also `Job.debug`.
        debug_timeout: How long a rank's debugger waits for an answer; then the rank goes on with a `NoDebugger` error.

    Raises:
        ValueError: For an invalid option.
        TypeError: If the function can't be pickled with its arguments.
        JobError: If the cluster has too few workers.
        WorkersBusy: If they're busy, for this client or another, or paused.

    What the ranks raise comes from ``Job.result``.

    >>> from distributed import LocalCluster
    >>> with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
    ...     launch(cluster.get_client(), pow, 2, 5).result()
    [32, 32]
    """
    if callable(client):
        raise TypeError("The client is missing: launch(client, function, …), with a client such as start_local()'s.")
    check_client(client)
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: write one of {', '.join(map(str, BACKENDS))}.")
    options = Limits(
        n_workers,
        workers,
        time_limit,
        max_restarts,
        retry,
        wait_for_workers,
        wait_for_successors,
        stall_after,
        shutdown_timeout,
        start_method,
        virtual_local_rank,
        debug,
        debug_timeout,
    )
    kwargs = dict(kwargs or {})
    _check_call(fn, args, kwargs)
    call = pickled(fn, args, kwargs)
    function = fn.func if isinstance(fn, partial) else fn
    program = Function(call, backend, _cells())
    return Job(client, program, getattr(function, "__name__", type(function).__name__), options)


def _cells() -> dict[str, str]:
    """Return the sources of this notebook's cells, so that ranks can show their lines."""
    return {name: "".join(linecache.getlines(name)) for name in list(linecache.cache) if "ipykernel_" in name}


def run(client: Client, fn: Callable[..., T], /, *args: Any, **options: Any) -> list[T]:
    """Return ``launch(...).result()``, with the options of `launch`: what each rank returned, in rank order."""
    __tracebackhide__ = True  # IPython and pytest show the caller, and what the rank did
    return launch(client, fn, *args, **options).result()


# A tooltip shows the options.
run.__signature__ = inspect.signature(launch).replace(return_annotation=list)  # type: ignore[attr-defined]


def _check_call(fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError where this can't be called, before any rank starts."""
    if not callable(fn):
        raise TypeError(f"{fn!r} cannot be called: give launch a function, and then the function's arguments.")
    for value in (*args, *kwargs.values()):
        if isinstance(value, Future) or is_dask_collection(value):
            raise TypeError(
                f"An argument is Dask's {type(value).__name__}, and the ranks need its value: give future.result() or "
                "collection.compute(), or let the function load it."
            )
