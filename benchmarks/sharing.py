"""A cluster whose workers share one GPU, which `start_cluster` does not start: its workers have one each."""

import dask
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster

from workshop_utils.object_store import LOOPBACK


def start_sharing(n_workers):
    """Return a Client of `n_workers` local processes that all see every GPU; ranks on them talk over gloo."""
    # As start_cluster sets it: without MALLOC_TRIM_THRESHOLD_, and with all cores.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), max(1, CPU_COUNT // n_workers))
    dask.config.set({"distributed.nanny.pre-spawn-environ": threads})
    return Client(
        LocalCluster(n_workers=n_workers, threads_per_worker=1, host=LOOPBACK, dashboard_address=f"{LOOPBACK}:0")
    )
