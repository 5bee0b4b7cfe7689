"""Keep workers as Slurm jobs for notebooks, and print what connects these: python deploy/slurm/cluster.py WORKERS

On nodes with GPUs, a worker for each: python deploy/slurm/cluster.py WORKERS GPUS_OF_A_NODE. A job then has one node.
"""

import signal
import sys

from dask_jobqueue import SLURMCluster

from workshop_utils.cluster import worker_environment

CORES = 4  # of each worker, one to a job, or to a GPU; add what your Slurm asks for, such as queue and account
n_workers, gpus = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
n_in_job = gpus or 1
with SLURMCluster(
    cores=CORES * n_in_job,
    processes=n_in_job,
    memory=f"{8 * n_in_job}GB",
    walltime="08:00:00",
    worker_command="dask_cuda.cli" if gpus else None,  # `dask cuda worker`; None for `dask worker`
    job_extra_directives=[f"--gres=gpu:{gpus}"] if gpus else [],
    worker_extra_args=["--nthreads=1"],
    job_script_prologue=worker_environment(CORES).splitlines(),
) as cluster:
    cluster.scale(n_workers)
    print(f"export DASK_SCHEDULER_ADDRESS={cluster.scheduler_address}", flush=True)
    signal.pause()  # until Ctrl-C, or its own job's end
