"""torchrun's contract on the workers of any Dask cluster: a function on several workers, as the ranks of one job.

`launch` starts a `Job`. Read `control` first: it is a job's life, and `watch` is what happens beside it. `cluster` is
all that a job asks of Dask, `claims` says who owns which worker, `scheduler` runs in the scheduler's process, `rank` on
a worker; `why` explains hangs and deaths.

The invariant: a worker belongs to a job from the moment it is chosen until its rank is over and it is idle again or
replaced, and it changes hands only in one step of the scheduler's event loop, which nothing interrupts. One exception:
a worker without a nanny cannot be replaced, so a job that ends early gives it up while it works.
"""

# ruff: noqa: E402
import sys

if sys.platform == "win32":
    raise ImportError(
        "daskrun needs Linux or macOS, as it works with signals and forks: on Windows, install it in WSL."
    )

from daskrun.equal import assert_equal_on_all_ranks
from daskrun.errors import ClusterError, JobError, SchedulerLost, Stopped, WorkerDied, WorkersBusy
from daskrun.job import Job
from daskrun.launch import launch, run
from daskrun.local import start_local
from daskrun.metrics import log_metrics
from daskrun.reach import reach
from daskrun.settings import worker_environment, worker_settings

__version__ = "0.1.0"

__all__ = [
    "ClusterError",
    "Job",
    "JobError",
    "SchedulerLost",
    "Stopped",
    "WorkerDied",
    "WorkersBusy",
    "assert_equal_on_all_ranks",
    "launch",
    "log_metrics",
    "reach",
    "run",
    "start_local",
    "worker_environment",
    "worker_settings",
]
