"""A script for torchrun that does what real ones do, and prints what it computed. Its argument: a configuration.

The configuration is executed, global state is set, a DataLoader's children are forked and spawned, objects of a class
of `__main__` travel, and it ends by sys.exit(3).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from beside import LEARNING_RATE
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

exec(Path(sys.argv[1]).read_text())
torch.set_default_dtype(torch.float64)


class Squares(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, number):
        return torch.tensor([number / 32]), torch.tensor([(number / 32) ** 2])


@dataclass
class Result:
    rank: int
    loss: float


def say(what):
    print(f"{what}\n", end="")  # in one piece: under torchrun, all ranks write into one pipe


def train(context):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(
        Squares(), 4, sampler=DistributedSampler(Squares()), num_workers=1, multiprocessing_context=context
    )
    for epoch in range(n_epochs):  # noqa: F821  set by the configuration
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        say(f"{context}, rank {dist.get_rank()}, epoch {epoch}: {loss.item():.15f}")
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, Result(dist.get_rank(), loss.item()))
    say(results)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train("fork")
    train("spawn")
    dist.destroy_process_group()
    sys.exit(3)
