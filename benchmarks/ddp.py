"""Step time and launch time of `workshop_utils.ddp` against torchrun: same function, model, batches and environment.

    python benchmarks/ddp.py [--rounds N] [--steps N]

Each round runs both, one after the other; the medians over the rounds count. The Dask cluster is started before the
clock, as in a notebook; torchrun starts its processes for each run, as it always does.
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
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import ddp
from workshop_utils.cluster import start_cluster

BATCH_SIZE = 16  # images of 224 x 224 on each rank
WARM_UP_STEPS = 3
MOMENTS = ("function runs", "first step begins", "first step done")


def train_steps(n_steps):
    """Train ResNet-18 on one synthetic batch; return this rank's median seconds a step, and MOMENTS as Unix times."""
    moments = [time.time()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = DistributedDataParallel(torchvision.models.resnet18().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.rand(BATCH_SIZE, 3, 224, 224, device=device)
    labels = torch.arange(BATCH_SIZE, device=device)
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
    return start, ddp.run(client, train_steps, n_steps)


def one_rank(folder, n_steps):
    # What a script for torchrun has around its function.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    Path(folder, os.environ["RANK"]).write_text(json.dumps(train_steps(n_steps)))
    dist.destroy_process_group()


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Times each contestant runs.")
@click.option("--steps", "n_steps", default=23, show_default=True, help=f"Steps; {WARM_UP_STEPS} do not count.")
@click.option("--rank-of-torchrun", "folder", hidden=True)
def main(rounds, n_steps, folder):
    if folder:
        return one_rank(folder, n_steps)
    client = start_cluster(None if torch.cuda.is_available() else 2)
    n_ranks = len(client.scheduler_info(n_workers=-1)["workers"])
    under_dask(client, WARM_UP_STEPS + 1)  # from a notebook's second job on, workers are warm
    runs = {"torchrun": [], "dask": []}
    for number in range(rounds):
        runs["torchrun"].append(summary(*under_torchrun(n_ranks, n_steps)))
        runs["dask"].append(summary(*under_dask(client, n_steps)))
        click.echo(f"round {number + 1} of {rounds} done", err=True)
    client.shutdown()
    report(runs, n_ranks, n_steps)


def summary(start, ranks):
    """Return the slowest rank's seconds per step, and the seconds from the launch to each of MOMENTS."""
    moments = [max(times) - start for times in zip(*(moments for _, moments in ranks), strict=True)]
    return {"step": max(step for step, _ in ranks), **dict(zip(MOMENTS, moments, strict=True))}


def report(runs, n_ranks, n_steps):
    medians = {name: {key: statistics.median(run[key] for run in rows) for key in rows[0]}
               for name, rows in runs.items()}  # fmt: skip
    lines = [f"{n_ranks} ranks, ResNet-18, {BATCH_SIZE} images a rank; medians of {len(runs['dask'])} rounds, seconds",
             f"{'':34}{'torchrun':>10}{'this':>10}{'ratio':>9}"]  # fmt: skip
    for key in ("step", *MOMENTS):
        ours, theirs = medians["dask"][key], medians["torchrun"][key]
        label = "a step" if key == "step" else f"launch until {key}"
        lines.append(f"{label:34}{theirs:>10.3f}{ours:>10.3f}{ours / theirs:>9.3f}")
    print("\n".join(lines))
    ratios = {key: medians["dask"][key] / medians["torchrun"][key] for key in medians["dask"]}
    path = write_result("ddp", {"ranks": n_ranks, "steps": n_steps, "batch_size": BATCH_SIZE, "seconds": medians,
                                "ratios": ratios, "runs": runs, "printed": lines})  # fmt: skip
    print(f"written to {path.relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
