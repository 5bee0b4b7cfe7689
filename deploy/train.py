"""Train on Dask workers, and go on from the checkpoint after a death:

python train.py CHECKPOINT EPOCHS --workers 2

It needs PyTorch and daskrun only. Copy it, and put your own model and data in.
"""

import argparse
import fcntl
import os

import torch
import torch.distributed as dist
from distributed import Client
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import daskrun

BATCH_SIZE = 32  # of a rank; all ranks together take this many times the number of ranks


def train(path, epochs):
    """Train as one rank; return its mean loss in the last epoch, or None if all were done before."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # the same model and data on all ranks
    x = torch.randn(16_384, 16)
    dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
    layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if dist.get_rank() == 0:  # which alone reads and writes it
        lock(path)
    first = load(path, model, optimizer)
    parallel = DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())  # from here on each rank draws for itself, as dropout does
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    mean = None
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for features, target in loader:
            loss = torch.nn.functional.mse_loss(parallel(features.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = (total / len(loader)).item()
        if dist.get_rank() == 0:
            save(path, epoch, model, optimizer)
        daskrun.log_metrics(epoch=epoch, loss=mean, process=os.getpid())
    return mean


def lock(path):
    """Keep other jobs from the checkpoint for as long as this process lives, which holds the file open."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise RuntimeError(f"no folder {folder!r} on this worker: make it, or give another path")
    file = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise RuntimeError(f"another job is writing {path}: wait for its end, or give another path") from error
    except OSError as error:
        print(f"{path} isn't locked against other jobs, as its disk has no locks: {error}", flush=True)


def load(path, model, optimizer):
    """Load the checkpoint as rank 0 reads it, if there is one; return the epoch to begin with."""
    saved = [None]
    if dist.get_rank() == 0 and os.path.exists(path):  # a network's disk may show a new file to other hosts later
        try:
            saved = [torch.load(path, map_location="cpu", weights_only=True)]
        except Exception as error:
            raise RuntimeError(f"{path} is no checkpoint of this training: {error}") from error
    dist.broadcast_object_list(saved)
    if saved[0] is None:
        return 0
    try:
        model.load_state_dict(saved[0]["model"])
        optimizer.load_state_dict(saved[0]["optimizer"])
        return saved[0]["epoch"] + 1
    except Exception as error:
        raise RuntimeError(f"{path} is no checkpoint of this training: {error}") from error


def save(path, epoch, model, optimizer):
    """Write the checkpoint: whole or not at all, whenever this process dies."""
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"epoch": epoch, **states}, f"{path}.part")
    os.replace(f"{path}.part", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=os.path.abspath, help="a path that all workers reach")
    parser.add_argument("epochs", type=int)
    parser.add_argument("--workers", type=int, default=2, help="ranks; 2 if not given")
    given = parser.parse_args()
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")  # of a cluster that runs
    limits = {
        "n_workers": given.workers,
        "max_restarts": 3,
        "wait_for_workers": "10 min",
        "wait_for_successors": "10 min",
    }
    print(f"looking for {given.workers} workers, for ten minutes at most", flush=True)
    if address:
        daskrun.reach(address, 60)  # where something else listens, Client would wait for ever
    client = Client(address) if address else daskrun.start_local(given.workers)
    with client, daskrun.launch(client, train, given.checkpoint, given.epochs, **limits) as job:
        for row in job.rows():
            if row["rank"] == 0:
                line = "process {process}  attempt {attempt}  epoch {epoch}  loss {loss:.4f}"
                print(line.format(**row), flush=True)
        losses = job.result()
    print("All epochs were done before." if None in losses else f"loss of each rank: {losses}")


if __name__ == "__main__":
    main()
