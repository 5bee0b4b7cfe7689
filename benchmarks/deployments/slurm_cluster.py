"""Two workers, each a job of Slurm: for tasks that do not wait for each other."""

import subprocess

from dask_jobqueue import SLURMCluster
from distributed import Client

if __name__ == "__main__":
    lines = subprocess.run(["workshop", "worker-env", "--threads", "1"], capture_output=True, text=True).stdout
    with SLURMCluster(
        queue="main", cores=1, processes=1, memory="4GB", job_script_prologue=lines.splitlines()
    ) as cluster:
        cluster.scale(jobs=2)
        with Client(cluster) as client:
            client.wait_for_workers(2)
            print(subprocess.run(["squeue", "--format=%.5i %.12j %.4t %N"], capture_output=True, text=True).stdout)
            print("squares of four numbers:", client.gather(client.map(lambda x: x * x, range(4))))
