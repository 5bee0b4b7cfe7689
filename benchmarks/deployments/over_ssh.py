"""One scheduler and two workers, started over SSH on hosts that a key opens; they add up their ranks."""

import sys

import dask
import torch
import torch.distributed as dist
from dask.distributed import Client, SSHCluster

import daskrun


def add_up():
    dist.all_reduce(total := torch.tensor(dist.get_rank()))
    return total.item()


if __name__ == "__main__":
    # What `workshop worker-env` says, as settings, which SSHCluster sends along.
    dask.config.set({"distributed.worker.daemon": False})
    dask.config.set({"distributed.nanny.pre-spawn-environ": {"MALLOC_TRIM_THRESHOLD_": None, "OMP_NUM_THREADS": 1}})
    hosts = ["localhost", *sys.argv[1:]]  # the scheduler's first
    with SSHCluster(hosts, worker_options={"nthreads": 1}) as cluster, Client(cluster) as client:
        client.wait_for_workers(len(hosts) - 1)
        print(len(client.nthreads()), "workers over SSH; each rank has the sum", daskrun.run(client, add_up))
