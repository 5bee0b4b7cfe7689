"""Keep workers as Slurm jobs for notebooks, and print what connects these: python deploy/slurm/cluster.py WORKERS"""

import signal
import sys

from dask_jobqueue import SLURMCluster

from workshop_utils.cluster import worker_environment

CORES = 4  # of each worker, which is a job of its own; add what your Slurm asks for, such as queue and account
with SLURMCluster(
    cores=CORES,
    processes=1,
    memory="8GB",
    walltime="08:00:00",
    worker_extra_args=["--nthreads=1"],
    job_script_prologue=worker_environment(CORES).splitlines(),
) as cluster:
    cluster.scale(int(sys.argv[1]))
    print(f"export DASK_SCHEDULER_ADDRESS={cluster.scheduler_address}", flush=True)
    signal.pause()  # until Ctrl-C, or its own job's end
