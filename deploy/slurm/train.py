"""Train on the tasks of one Slurm allocation, from the checkpoint on if there is one: see train.sbatch."""

import os
import signal
import sys

import torch
from dask_jobqueue.slurm import SLURMRunner
from distributed import Client

import daskrun
from daskrun.settings import own_gpu_first
from workshop_utils.photos import HELD_OUT, find_data
from workshop_utils.train import prepare, train


def teach(source, checkpoint, epochs):
    # Next to a GPU, the cores have little to compute: all but one read photos.
    n_readers = int(os.environ["SLURM_CPUS_PER_TASK"]) - 1 if torch.cuda.is_available() else 0
    return train(*prepare(source), checkpoint=checkpoint, epochs=epochs, num_workers=n_readers)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the ranks heed: they save, and this ends after them
    checkpoint, epochs = sys.argv[1], int(sys.argv[2])
    os.environ |= own_gpu_first(int(os.environ["SLURM_LOCALID"]))  # of a rank; scheduler and script see no GPU
    # A worker that starts while the scheduler ends would look for it until the allocation's time is over.
    nannies = {"worker_class": "distributed.Nanny", "worker_options": {"death_timeout": 60}}
    with SLURMRunner(**nannies) as runner, Client(runner) as client:
        client.wait_for_workers(runner.n_workers)
        print(daskrun.run(client, teach, find_data(breeds=HELD_OUT), checkpoint, epochs)[0])
