"""Step time and launch time of `daskrun` against torchrun: same function, model, batches and environment.

    python benchmarks/ddp.py [--rounds N] [--steps N]

Each round runs both, one after the other; the medians over the rounds count. The Dask cluster is started before the
clock, as in a notebook; torchrun starts its processes for each run, as it always does. With a GPU, it also compares
DDP with one rank, and with two that share the GPU over gloo, with the plain loop.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torchvision
from record import write_result
from sharing import start_sharing
from torch.nn.parallel import DistributedDataParallel

import daskrun
from workshop_utils.cluster import known_workers, start_cluster

BATCH_SIZE = 16  # images of 224 x 224 on each rank
GPU_BATCHES = (32, 128)  # images a step, over all ranks, where one GPU is compared with itself
N_STEPS, N_STEPS_GPU = 23, 203
WARM_UP_STEPS = 3
MOMENTS = ("function runs", "first step begins", "first step done")


def train_steps(n_steps, batch_size=BATCH_SIZE, parallel=True):
    """Train ResNet-18 on one synthetic batch; return this rank's median seconds a step, and MOMENTS as Unix times.

    parallel: False for the plain loop, without DDP and outside any process group.
    """
    moments = [time.time()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = torchvision.models.resnet18().to(device)
    model = DistributedDataParallel(model) if parallel else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.rand(batch_size, 3, 224, 224, device=device)
    labels = torch.arange(batch_size, device=device)
    moments.append(time.time())
    seconds = []
    for _ in range(n_steps):
        start = time.perf_counter()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1:
            moments.append(time.time())
    return statistics.median(seconds[WARM_UP_STEPS:]), moments


def under_torchrun(n_ranks, n_steps):
    """Return (when it was launched, what each rank returned)."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
        script = [__file__, "--rank-of-torchrun", folder, "--steps", str(n_steps)]
        start = time.time()
        subprocess.run([*torchrun, *script], check=True, stderr=subprocess.DEVNULL)
        return start, [json.loads(Path(folder, str(rank)).read_text()) for rank in range(n_ranks)]


def under_dask(client, n_steps):
    """Return (when it was launched, what each rank returned)."""
    start = time.time()
    return start, daskrun.run(client, train_steps, n_steps)


def one_rank(folder, n_steps):
    # What a script for torchrun has around its function.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    Path(folder, os.environ["RANK"]).write_text(json.dumps(train_steps(n_steps)))
    dist.destroy_process_group()


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Times each contestant runs.")
@click.option(
    "--steps",
    "n_steps",
    type=int,
    help=f"Steps; {WARM_UP_STEPS} do not count.  [default: {N_STEPS}; on a GPU {N_STEPS_GPU}]",
)
@click.option("--rank-of-torchrun", "folder", hidden=True)
def main(rounds, n_steps, folder):
    n_steps = n_steps or (N_STEPS_GPU if torch.cuda.is_available() else N_STEPS)
    if folder:
        return one_rank(folder, n_steps)
    client = start_cluster(None if torch.cuda.is_available() else 2)
    n_ranks = len(known_workers(client))
    under_dask(client, WARM_UP_STEPS + 1)  # from a notebook's second job on, workers are warm
    runs = {"torchrun": [], "dask": []}
    for number in range(rounds):
        runs["torchrun"].append(summary(*under_torchrun(n_ranks, n_steps)))
        runs["dask"].append(summary(*under_dask(client, n_steps)))
        click.echo(f"round {number + 1} of {rounds} done", err=True)
    client.shutdown()
    report(runs, n_ranks, n_steps, on_one_gpu(rounds, n_steps) if torch.cuda.is_available() else {})


def on_one_gpu(rounds, n_steps, batches=GPU_BATCHES):
    """Return {batch size: {"plain loop", "DDP, one rank", "DDP, two ranks over gloo": median seconds of a step}}.

    All take the same images a step on the same GPU. The two ranks take half of them each.
    """
    client = start_sharing(2)
    first = min(client.nthreads())

    def plain(size):
        return [client.submit(train_steps, n_steps, size, parallel=False, workers=[first], pure=False).result()]

    def ranks(n, size):  # each counts as a host of its own, so that they may share the GPU
        return daskrun.run(client, train_steps, n_steps, size // n, n_workers=n, virtual_local_rank=True)

    ways = {
        "plain loop": plain,
        "DDP, one rank": lambda size: ranks(1, size),
        "DDP, two ranks over gloo": lambda size: ranks(2, size),
    }
    seconds = {size: {name: [] for name in ways} for size in batches}
    for _ in range(rounds):
        for size, ran in seconds.items():
            for name, way in ways.items():
                ran[name].append(max(step for step, _ in way(size)))
    client.shutdown()
    return {size: {name: statistics.median(ran) for name, ran in names.items()} for size, names in seconds.items()}


def summary(start, ranks):
    """Return the slowest rank's seconds per step, and the seconds from the launch to each of MOMENTS."""
    moments = [max(times) - start for times in zip(*(moments for _, moments in ranks), strict=True)]
    return {"step": max(step for step, _ in ranks), **dict(zip(MOMENTS, moments, strict=True))}


def report(runs, n_ranks, n_steps, one_gpu):
    medians = {
        name: {key: statistics.median(run[key] for run in rows) for key in rows[0]} for name, rows in runs.items()
    }
    lines = [
        f"{n_ranks} ranks, ResNet-18, {BATCH_SIZE} images a rank; medians of {len(runs['dask'])} rounds, seconds",
        f"{'':34}{'torchrun':>10}{'this':>10}{'ratio':>9}",
    ]
    for key in ("step", *MOMENTS):
        ours, theirs = medians["dask"][key], medians["torchrun"][key]
        label = "a step" if key == "step" else f"launch until {key}"
        lines.append(f"{label:34}{theirs:>10.3f}{ours:>10.3f}{ours / theirs:>9.3f}")
    for size, seconds in one_gpu.items():
        plain = seconds["plain loop"]
        lines.append(f"one GPU, {size} images a step, seconds and images/s relative to the plain loop")
        lines += [f"{name:34}{step:>10.4f}{plain / step:>20.3f}" for name, step in seconds.items()]
    print("\n".join(lines))
    path = write_result(
        "ddp",
        {
            "ranks": n_ranks,
            "steps": n_steps,
            "batch_size": BATCH_SIZE,
            "seconds": medians,
            "one_gpu": one_gpu,
            "runs": runs,
            "printed": lines,
        },
    )
    print(f"written to {path.relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
