"""Train on Dask workers, and go on from the checkpoint after a death: python train.py CHECKPOINT EPOCHS

It needs PyTorch and daskrun only. Copy it, and put your own model and data in.
"""

import os
import sys

import torch
import torch.distributed as dist
from distributed import Client
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import daskrun


def train(path, epochs):
    """Train as one rank; return its mean loss in the last epoch, or None if all epochs were done before."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # the same model and data on all ranks
    x = torch.randn(16_384, 16)
    dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
    layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = load(path, model, optimizer)
    parallel = DistributedDataParallel(model)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler)
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


def load(path, model, optimizer):
    """Load the checkpoint, if there is one; return the number of the epoch to begin with."""
    if not os.path.exists(path):
        return 0
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"] + 1


def save(path, epoch, model, optimizer):
    """Write the checkpoint: whole or not at all, whenever this process dies."""
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"epoch": epoch, **states}, f"{path}.part")
    os.replace(f"{path}.part", path)


def cluster():
    """Return a client of the cluster that DASK_SCHEDULER_ADDRESS names, or of local workers."""
    return Client() if "DASK_SCHEDULER_ADDRESS" in os.environ else daskrun.start_local()


if __name__ == "__main__":
    path, epochs = os.path.abspath(sys.argv[1]), int(sys.argv[2])  # where all workers reach it
    with cluster() as client, daskrun.launch(client, train, path, epochs, max_restarts=3) as job:
        for row in job.rows():
            if row["rank"] == 0:
                print("attempt {attempt}  epoch {epoch}  loss {loss:.4f}  process {process}".format(**row))
        print("loss of each rank:", job.result())
