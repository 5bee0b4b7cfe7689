"""Two ranks in one allocation: task 0 is the scheduler, task 1 this script's client, the others are workers."""

import os
import signal

import torch
import torch.distributed as dist
from dask_jobqueue.slurm import SLURMRunner
from distributed import Client

import daskrun


def add_up():
    dist.all_reduce(total := torch.tensor(dist.get_rank()))
    return os.environ["SLURM_PROCID"], total.item()


if __name__ == "__main__":
    nannies = {"worker_class": "distributed.Nanny", "worker_options": {"nthreads": 1, "death_timeout": 60}}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # goes to all tasks: ranks that train save, and these outlive them
    with SLURMRunner(**nannies) as runner, Client(runner) as client:
        client.wait_for_workers(runner.n_workers)
        for task, total in daskrun.run(client, add_up):
            print("a rank in task", task, "has the sum", total)
