"""Run a PyTorch function on Dask workers as the ranks of one job."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from distributed import Client

from daskrun.call import check_call
from daskrun.group import BACKENDS, in_process_group
from daskrun.horovod import check_built, in_horovod
from daskrun.job import Job
from daskrun.limits import limits

T = TypeVar("T")


def launch(
    client: Client,
    fn: Callable[..., T],
    /,
    *args: Any,
    backend: str | None = "auto",
    n_workers: int | tuple[int, int] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
    wait_for_workers: float = 0,
    wait_for_successors: float = 30,
    stall_after: float | None = None,
    **kwargs: Any,
) -> Job[T]:
    """Start `fn(*args, **kwargs)` as one rank per worker process, and return the `Job` at once.

    The function finds torchrun's environment variables, and a process group in `torch.distributed`, made before it runs
    and destroyed after it; Accelerate, Lightning and the Trainer of transformers use that group. Each worker process
    counts as a node of its own, whose own GPU, if it has one, is cuda:0.

    n_workers: the world size; a pair (fewest, most) for as many as are idle, such as (2, 4); None for all workers.
    Where only some workers have a GPU, those are taken if they are enough, else the others; a warning says which.
    backend: "nccl", "gloo", or "auto" for NCCL where every rank has a GPU of its own (tensors on the CPU then still go
    through gloo), else gloo. None makes no group, for a function that calls `init_process_group` itself, as a script
    for torchrun does. "horovod" makes none either: `hvd.init()` has been called before the function runs, and
    `hvd.shutdown()` is after it.
    timeout: seconds that the whole job may take; None for no limit.
    max_restarts: how often the function is started again, on all ranks, after the death of a worker; it should then
    continue from its checkpoint. Whoever waits for the job is warned of each death at once. An exception is never
    retried.
    wait_for_workers: seconds to wait until so many workers (the most of a pair) are there and idle. For those that are
    being replaced after another job, it waits up to 30 s in any case. All have to be idle at the same moment: a stream
    of short tasks may keep them from that, so submit it afterwards. An adaptive cluster starts workers for tasks, not
    for ranks, so give it a minimum: cluster.adapt(minimum=n_workers, maximum=…).
    wait_for_successors: seconds to wait after a death until as many workers as before are there, which takes minutes
    where Slurm or Kubernetes has to start them. After that, a pair goes on with those that remain. A pair takes
    more than before, if they are there.
    stall_after: seconds without a row of metrics after which whoever waits for the job is warned, with the text of
    `Job.explain()`; the job goes on. None for no warning.

    A rank that raises ends the job with that rank's exception. Whatever ends it, the workers are free for the next.
    After a failure, each process in which a rank began is replaced, and with it what Dask kept there: it computes that
    again, but what was scattered there is lost.

    Raises at once

    - ValueError for a setting that cannot be;
    - TypeError where the function cannot be called so, would take a misspelt setting by `**kwargs`, or cannot be
      pickled with its arguments;
    - JobError where the cluster has too few workers, or several in one process, or Horovod is not built;
    - WorkersBusy, a JobError, where they are at work, for this client or another, or paused;
    - SchedulerLost, a JobError, and TimeoutError.

    `Job.result()` raises

    - what a rank raised;
    - WorkerDied, a JobError, which says how the process of a rank ended;
    - JobError for a backend that does not suit the ranks' GPUs, or for GPUs on some of the ranks;
    - TypeError for a result that cannot be pickled;
    - TimeoutError, which says who waited for whom;
    - SchedulerLost, a JobError, and CancelledError.

    >>> from distributed import LocalCluster
    >>> with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
    ...     launch(cluster.get_client(), pow, 2, 5).result()
    [32, 32]
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: write one of {', '.join(map(str, BACKENDS))}.")
    if backend == "horovod":
        check_built()
    settings: dict[str, Any] = {
        "n_workers": n_workers,
        "timeout": timeout,
        "max_restarts": max_restarts,
        "wait_for_workers": wait_for_workers,
        "wait_for_successors": wait_for_successors,
        "stall_after": stall_after,
    }
    check_call(launch, settings | {"backend": backend}, fn, args, kwargs)
    bootstrap = in_horovod if backend == "horovod" else partial(in_process_group, backend=backend)
    return Job(client, bootstrap, fn, args, kwargs, limits(**settings))


def run(client: Client, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
    """Return `launch(...).result()`, with the settings of `launch`: what each rank returned, in rank order."""
    __tracebackhide__ = True  # IPython and pytest show the caller, and what the rank did
    return launch(client, fn, *args, **kwargs).result()


# A tooltip shows the settings.
run.__signature__ = inspect.signature(launch).replace(return_annotation=list)  # type: ignore[attr-defined]
