"""What a process of a training run knows of itself and of the others; without a process group it is rank 0 of one."""

import torch
import torch.distributed as dist


def world() -> tuple[int, int]:
    """Return (rank of this process, world size)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def own_device() -> torch.device:
    """Return the device that this rank computes on: its own GPU, which it sees first, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_all_alike(values: dict) -> None:
    """Raise ValueError on all ranks, with the name and what each rank has, unless all give the same `values`."""
    ranks: list = [values] * world()[1]
    if len(ranks) > 1:
        dist.all_gather_object(ranks, values)
    for name, mine in values.items():
        theirs = [rank[name] for rank in ranks]
        if any(value != mine for value in theirs):
            raise ValueError(
                f"The ranks differ in {name}: {theirs}. Give all ranks the same settings and images, and a checkpoint "
                "that all can read, such as s3://…"
            )
