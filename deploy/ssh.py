"""Start a scheduler here and a worker on each host, over SSH, and let their ranks meet: python deploy/ssh.py HOST HOST

SSHCluster logs in with your key, and expects Python in the same place on all hosts: `connect_options` and
`remote_python` change that.
"""

import sys

import dask
import torch
import torch.distributed as dist
from distributed import Client, SSHCluster

import daskrun

CORES = 4  # of each host; add what your hosts ask for


def add_up():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return total.item()


if __name__ == "__main__":
    # What `workshop worker-env` prints, as settings, which SSHCluster sends along.
    before = {"MALLOC_TRIM_THRESHOLD_": None, "OMP_NUM_THREADS": CORES}
    dask.config.set({"distributed.worker.daemon": False, "distributed.nanny.pre-spawn-environ": before})
    hosts = sys.argv[1:]
    with SSHCluster(["localhost", *hosts], worker_options={"nthreads": 1}) as cluster, Client(cluster) as client:
        client.wait_for_workers(len(hosts))
        print(len(hosts), "workers over SSH; each rank has the sum", daskrun.run(client, add_up))
