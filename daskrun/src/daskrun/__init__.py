"""torchrun's contract on the workers of any Dask cluster: a function on several workers, as the ranks of one job.

`launch` starts a `Job`. Every rank is a process of its own, a child of its worker, so nothing of one job reaches the
next. `client` runs in the caller's process: read `client.control` first, which is a job's life. `scheduler` runs in the
scheduler's, and `claims` says there who owns which worker. `worker` runs on a worker, and `child` in a rank's process.
`why` explains hangs and deaths.

The invariant: a worker belongs to a job from the moment it is chosen until its rank is over and it is idle again, and
it changes hands only in one step of the scheduler's event loop, which nothing interrupts.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "daskrun needs Linux or macOS, as it works with signals and forks: on Windows, install it in WSL."
    )

if TYPE_CHECKING:
    from daskrun.check_scheduler import reach
    from daskrun.client.interactive import Ranks, interactive
    from daskrun.client.job import Job
    from daskrun.client.launch import launch, run
    from daskrun.client.map_batches import map_batches, parquet_batches
    from daskrun.equal import assert_equal_on_all_ranks
    from daskrun.errors import (
        CellFailed,
        ClusterError,
        JobError,
        NoDebugger,
        SchedulerLost,
        ScriptFailed,
        WorkerDied,
        WorkersBusy,
    )
    from daskrun.local import start_local
    from daskrun.metrics import log_metrics
    from daskrun.settings import worker_environment, worker_settings

__version__ = "0.1.0"

__all__ = [
    "CellFailed",
    "ClusterError",
    "Job",
    "JobError",
    "NoDebugger",
    "Ranks",
    "SchedulerLost",
    "ScriptFailed",
    "WorkerDied",
    "WorkersBusy",
    "assert_equal_on_all_ranks",
    "interactive",
    "launch",
    "log_metrics",
    "map_batches",
    "parquet_batches",
    "reach",
    "run",
    "start_local",
    "worker_environment",
    "worker_settings",
]

# Each is imported when it's first asked for: a rank that logs a metric imports nothing of Dask.
_HOMES = {
    name: module
    for module, names in {
        "check_scheduler": "reach",
        "client.interactive": "Ranks interactive load_ipython_extension",
        "client.job": "Job",
        "client.launch": "launch run",
        "client.map_batches": "map_batches parquet_batches",
        "equal": "assert_equal_on_all_ranks",
        "errors": "CellFailed ClusterError JobError NoDebugger SchedulerLost ScriptFailed WorkerDied WorkersBusy",
        "local": "start_local",
        "metrics": "log_metrics",
        "settings": "worker_environment worker_settings",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'daskrun' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"daskrun.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
