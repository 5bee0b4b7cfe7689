"""The job for this project's launcher on Dask: python with_workshop.py RESTARTS FOLDER…"""

from pathlib import Path

import torch
import torch.distributed as dist
from shared import BATCH_SIZE, EPOCHS, LR, MOMENTUM, N_RANKS, build_model, jobs, make_images, step_done
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import daskrun
from workshop_utils.checkpoint import load_on_all_ranks, save_checkpoint
from workshop_utils.cluster import start_cluster


def train(folder):
    rank = dist.get_rank()
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    dataset = make_images()
    loader = DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset, shuffle=False))
    checkpoint, first = Path(folder, "checkpoint.pt"), 0
    if saved := load_on_all_ranks(checkpoint):
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    for epoch in range(first, EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step_done(folder, rank, epoch, loss)  # measuring
        if rank == 0:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            save_checkpoint(checkpoint, **saved)
    return loss.item()


if __name__ == "__main__":
    client = start_cluster(N_RANKS)
    for folder, restarts in jobs():  # measuring
        daskrun.run(client, train, folder, max_restarts=restarts)
