"""torchrun's contract on the workers of any Dask cluster: one function on several workers, as the ranks of one job.

`launch` starts a `Job`; `control` is a job's life, read it first. `cluster` is all that it asks of Dask, `claims` who owns
which worker, `scheduler` what runs in the scheduler's process, `rank` what runs on a worker, `why` how hangs and deaths are
explained.
"""

from daskrun.equal import assert_equal_on_all_ranks
from daskrun.errors import ClusterError, JobError, SchedulerLost, Stopped, WorkerDied, WorkersBusy
from daskrun.job import Job
from daskrun.launch import launch, run
from daskrun.local import start_local
from daskrun.metrics import log_metrics
from daskrun.settings import worker_environment, worker_settings

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
    "run",
    "start_local",
    "worker_environment",
    "worker_settings",
]
