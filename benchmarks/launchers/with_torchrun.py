"""The job for torchrun: torchrun --standalone --nproc-per-node=2 with_torchrun.py FOLDER"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from shared import BATCH_SIZE, EPOCHS, LR, MOMENTUM, build_model, make_images, step_done
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    dataset = make_images()
    loader = DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset, shuffle=False))
    checkpoint, first = Path(folder, "checkpoint.pt"), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
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
            torch.save(saved, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1])
