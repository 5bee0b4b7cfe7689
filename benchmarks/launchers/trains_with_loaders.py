"""A training for torchrun, with a DataLoader of two processes; it also runs as a function under daskrun.

Prints one line of JSON on rank 0: the time of the first step, seconds of each epoch and of the loader's start, and the
median milliseconds of a step. With KILL_AT in the environment, rank 1 kills itself at that step of the first attempt,
and the times of the kill and of the next step are printed instead.
"""

import json
import os
import signal
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IMAGES, BATCH_SIZE, EPOCHS = 1024, 32, 4


class Images(Dataset):
    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=drawn), index % 10


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, stride=2), torch.nn.ReLU()]
    layers += [torch.nn.Conv2d(64, 128, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(128, 10))


def train():
    """Train as one rank of the process group that is there; return the figures."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = DistributedSampler(Images())
    loader = DataLoader(Images(), BATCH_SIZE, sampler=sampler, num_workers=2)
    kill_at, attempt = int(os.environ.get("KILL_AT", 0)), os.environ["TORCHELASTIC_RESTART_COUNT"]
    first, epochs, starts, steps = 0.0, [], [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        begin = last = time.time()
        for number, (images, labels) in enumerate(loader):
            if number == 0:
                starts.append(time.time() - begin)
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            first = first or time.time()
            if number:
                steps.append(time.time() - last)
            last = time.time()
            if attempt == "0" and epoch * len(loader) + number + 1 == kill_at and dist.get_rank() == 1:
                print(json.dumps({"killed": time.time()}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        epochs.append(time.time() - begin)
    return {
        "attempt": attempt,
        "first": first,
        "epochs_s": epochs,
        "loader_starts_s": starts,
        "step_ms": 1000 * statistics.median(steps),
        "loss": loss.item(),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    figures = train()
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    dist.destroy_process_group()
