"""Keep workers as Slurm jobs for notebooks, and print what connects these: python deploy/slurm/cluster.py WORKERS

On nodes with GPUs, a worker for each: python deploy/slurm/cluster.py WORKERS GPUS_OF_A_NODE. A job then has one node.
"""

import signal

import click
from dask_jobqueue import SLURMCluster

from daskrun import worker_environment

CORES = 4  # of each worker, one to a job, or to a GPU; add what your Slurm asks for, such as queue and account


@click.command()
@click.argument("workers", type=click.IntRange(1))
@click.argument("gpus_of_a_node", type=click.IntRange(1), required=False)
def main(workers, gpus_of_a_node):
    """Keep WORKERS as Slurm jobs, on nodes with GPUS_OF_A_NODE, until Ctrl-C."""
    n_in_job = gpus_of_a_node or 1
    with SLURMCluster(
        cores=CORES * n_in_job,
        processes=n_in_job,
        memory=f"{8 * n_in_job}GB",
        walltime="08:00:00",
        worker_command="dask_cuda.cli" if gpus_of_a_node else None,  # `dask cuda worker`; None for `dask worker`
        job_extra_directives=[f"--gres=gpu:{gpus_of_a_node}"] if gpus_of_a_node else [],
        worker_extra_args=["--nthreads=1"],
        job_script_prologue=worker_environment(CORES).splitlines(),
    ) as cluster:
        cluster.scale(workers)
        print(f"export DASK_SCHEDULER_ADDRESS={cluster.scheduler_address}", flush=True)
        signal.pause()  # until Ctrl-C, or its own job's end


if __name__ == "__main__":
    main()
