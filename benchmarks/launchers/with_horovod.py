"""The job for Horovod on Dask: python with_horovod.py RESTARTS FOLDER…"""

import os
from pathlib import Path

import horovod.torch as hvd
import torch
from shared import BATCH_SIZE, EPOCHS, LR, MOMENTUM, N_RANKS, build_model, jobs, make_images, step_done
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import daskrun
from workshop_utils.cluster import start_cluster
from workshop_utils.horovod import with_horovod


def train(folder):
    rank = hvd.rank()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    # Before the checkpoint is loaded: it does not take over the momentum of the optimizer that it is given.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    dataset = make_images()
    loader = DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset, hvd.size(), rank, shuffle=False))
    checkpoint, first = Path(folder, "checkpoint.pt"), 0
    if rank == 0 and checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    first = hvd.broadcast_object(first, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(first, EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step_done(folder, rank, epoch, loss)  # measuring
        if rank == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(saved, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)
    return loss.item()


if __name__ == "__main__":
    client = start_cluster(N_RANKS)
    for folder, restarts in jobs():  # measuring
        daskrun.run(client, with_horovod(train), folder, backend=None, max_restarts=restarts)
