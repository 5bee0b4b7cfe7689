"""Memory, bytes on the wire and step time of FSDP2, by layer and as one unit, against DDP, at two sizes.

    python benchmarks/sharding.py [--rounds N] [--small]

The model is a stack of PyTorch's transformer layers with AdamW in float32. Each way trains in workers of its own, since
a process does not shrink again; each round has every way once, and the medians over the rounds count. Workers have
MALLOC_MMAP_THRESHOLD_ set, without which glibc keeps what FSDP2 frees. A process has trained a tiny model before it is
watched. For Linux. On GPUs, memory is what PyTorch has allocated there.
"""

import ctypes
import gc
import os
import statistics
import threading
import time
from contextlib import contextmanager

import click
import psutil
import torch
import torch.distributed as dist
from record import RESULTS, write_result
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import ddp
from workshop_utils.cluster import n_gpus, start_cluster

SIZES = {"9 million": (384, 5), "25 million": (512, 8)}  # (width, number of layers)
TINY = (16, 1)
LENGTH, BATCH_SIZE = 25, 8  # positions of a sample, samples a rank
N_STEPS, WARM_UP_STEPS = 8, 3
WAYS = ("DDP", "FSDP2 by layer", "FSDP2 as one unit")
FIGURES = ("state_mb", "peak_mb", "sent_mb", "step_s")


def build(way, width, depth):
    """Return the model, with random weights that depend on nothing but the shapes that this rank holds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with torch.device("meta"):
        layers = (nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth))
        model = nn.Sequential(*layers)
    if way == "FSDP2 by layer":
        for layer in model:
            fully_shard(layer, mesh=mesh)
    if way != "DDP":
        fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    with torch.no_grad():
        for weight in model.parameters():
            local(weight).normal_(std=0.02)
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if way == "DDP" else model


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(way, width, depth):
    """Train for N_STEPS; return this rank's FIGURES, megabytes being 10⁶ bytes and `sent_mb` those of one step."""
    train(way, *TINY)
    with watched() as found:
        found |= train(way, width, depth)
    return found


def train(way, width, depth):
    model = build(way, width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = torch.randn(BATCH_SIZE, LENGTH, width, device=next(model.parameters()).device)
    seconds, sent = [], []
    for _ in range(N_STEPS):
        dist.barrier()
        before, start = bytes_written(), time.perf_counter()
        loss = model(samples).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()  # waits for a GPU
        seconds.append(time.perf_counter() - start)
        sent.append(bytes_written() - before)
        held = [weight for weight in model.parameters()] + [weight.grad for weight in model.parameters()]
        held += [moment for state in optimizer.state.values() for moment in state.values()]
        state_mb = sum(local(tensor).nbytes for tensor in held) / 1e6
        optimizer.zero_grad()
    step_s = statistics.median(seconds[WARM_UP_STEPS:])
    return {"state_mb": state_mb, "sent_mb": statistics.median(sent[WARM_UP_STEPS:]) / 1e6, "step_s": step_s}


def bytes_written():
    """Return what this process has written so far, to sockets too; over NCCL it writes hardly anything."""
    return psutil.Process().io_counters().write_chars


@contextmanager
def watched():
    """Yield a dict that has `peak_mb` after the block: by how much this rank's memory grew at its largest."""
    gc.collect()
    found = {}
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield found
        found["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        return
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    process, done = psutil.Process(), threading.Event()
    sizes = [process.memory_info().rss]

    def watch():
        while not done.wait(0.005):
            sizes.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()
    found["peak_mb"] = (max(sizes) - sizes[0]) / 1e6


def largest_of_ranks(way, width, depth):
    """Return FIGURES of one way, the largest of all ranks each, measured in new workers."""
    with start_cluster(n_gpus() or 2) as client, client.cluster:
        ranks = ddp.run(client, measure, way, width, depth)
    return {name: max(rank[name] for rank in ranks) for name in FIGURES} | {"ranks": len(ranks)}


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Times each way is measured.")
@click.option("--small", is_flag=True, help="Only the smaller model.")
def main(rounds, small):
    if n_gpus() == 1:
        raise click.ClickException("One GPU shares with nobody: hide it with CUDA_VISIBLE_DEVICES='', or use two.")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    sizes = dict(list(SIZES.items())[: 1 if small else None])
    runs = []
    for number in range(rounds):
        for size, (width, depth) in sizes.items():
            runs += [{"round": number, "size": size, "way": way, **largest_of_ranks(way, width, depth)} for way in WAYS]
        click.echo(f"round {number + 1} of {rounds} done", err=True)
    medians = {size: {way: median_of(runs, size, way) for way in WAYS} for size in sizes}
    path = write_result("sharding", {"rounds": rounds, "steps": N_STEPS, "medians": medians, "runs": runs})
    for size, ways in medians.items():
        for way, found in ways.items():
            shares = {name: found[name] / (ways["DDP"][name] or float("nan")) for name in FIGURES}
            click.echo(
                f"{size}, {way}: " + ", ".join(f"{name} {found[name]:.4g} ({shares[name]:.2f})" for name in FIGURES)
            )
    click.echo(f"written to {path.relative_to(RESULTS.parents[1])}; in brackets: times DDP's")


def median_of(runs, size, way):
    these = [run for run in runs if (run["size"], run["way"]) == (size, way)]
    return {name: round(statistics.median(run[name] for run in these), 4) for name in FIGURES}


if __name__ == "__main__":
    main()
