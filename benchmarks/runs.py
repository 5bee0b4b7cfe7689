"""The run logs that notebook 07 reads: its training problem, taught in many ways, on 1, 2 and 4 workers.

    python benchmarks/runs.py [--rounds N]

Every row of metrics is kept. Each round has all runs in an order of its own, so that a machine that grows slower makes
no run look bad, and its own order of the images. Runs differ in what STUDIES changes, and in nothing else. The data are
the sketches at dusk, or what WORKSHOP_DATA and WORKSHOP_WEIGHTS name; see notebook 01.
Each worker has one PyTorch thread, except in the run that gives one worker all cores. With several GPUs, each worker
has one, and runs on more workers than GPUs are left out. With one GPU, a run is on one worker, except where workers are
what is compared: these share the GPU, over gloo. Then no run compresses gradients, as one rank sends none.
"""

import json
import os
import random
import time

import click
import torch
import torch.distributed as dist
from dask.system import CPU_COUNT
from record import RESULTS, write_result
from sharing import start_sharing

import daskrun
from daskrun import log_metrics
from daskrun.settings import n_gpus
from workshop_utils.cluster import start_cluster
from workshop_utils.photos import HELD_OUT, find_data
from workshop_utils.train import evaluate, prepare, train

PER_BREED = 32  # sketches
USUAL = {
    "pretrained": True,
    "lr": 0.005,
    "freeze_epochs": 0,
    "freeze_batchnorm": False,
    "epochs": 2,
    "batch_size": 32,
    "precision": "fp32",
    "compression": None,
    "warmup_steps": 3,
}
HEAD = {"training": "head alone", "epochs": 4, "freeze_epochs": 4, "lr": 0.01, "freeze_batchnorm": True}
SCALES = [(1, 1), (2, 1), (4, 1), (1, CPU_COUNT)]  # (workers, PyTorch threads of each)
STUDIES = {
    "trainings": [
        {"epochs": 4},
        {"epochs": 4, "training": "from scratch", "pretrained": False, "lr": 0.03},
        HEAD,
        HEAD | {"training": "head alone, statistics adapt", "freeze_batchnorm": False},
    ],
    "learning rate": [HEAD | {"lr": lr} for lr in (0.1, 0.03, 0.01, 0.003)],
    "strong scaling": [
        change | {"workers": workers, "threads": threads} for workers, threads in SCALES for change in ({}, HEAD)
    ],
    "weak scaling": [{"workers": workers, "batch_size": 16 * workers} for workers in (1, 2, 4)],
    "batch size": [{"batch_size": size} for size in (16, 32, 64)],
    "settings": [
        {},
        {"precision": "bf16"},
        {"compression": "fp16"},
        {"compression": "bf16"},
        {"batch_size": 64},
    ],
}


@click.command()
@click.option("--rounds", default=5, show_default=True, help="How often each run is made.")
def main(rounds):
    source = find_data(PER_BREED, HELD_OUT, light="dusk")
    gpus = n_gpus()
    client = start_sharing(4) if gpus == 1 else start_cluster(None if gpus else 4)
    usual_workers = 1 if gpus == 1 else min(2, len(client.nthreads()))
    sharing = {"virtual_local_rank": gpus == 1}  # each rank counts as a host of its own
    daskrun.run(client, prepare, source, **sharing)  # starts what ranks are forked from, outside the clock
    plans = planned(len(client.nthreads()), usual_workers)
    for plan in plans:
        if "settings" in plan["studies"]:  # the first run with a compression or a precision takes seconds more
            daskrun.run(client, teach, source, plan, 0, n_workers=plan["workers"], **sharing)
    rows, runs = [], []
    for round_ in range(rounds):
        random.Random(round_).shuffle(plans)
        for plan in plans:
            run = {"run": len(runs), "round": round_, **plan}
            launched = time.time()
            job = daskrun.launch(client, teach, source, plan, round_, n_workers=plan["workers"], **sharing)
            numbers = job.result()[0]
            rows += [{"run": run["run"], **tidy(row)} for row in job.metrics().to_dict("records")]
            runs.append(run | {"launched": round(launched, 3)} | tidy(numbers))
            click.echo(
                f"{run['run']} {plan['studies']} {plan['training']}, {plan['workers']} x {plan['threads']}: "
                f"{numbers['images_per_s']:.1f} images/s, {numbers['accuracy']:.1%}, "
                f"{time.time() - launched:.1f} s",
                err=True,
            )
        # After each round, so that one that is cut short leaves the rounds before it.
        path = write_result(
            "runs", {"data": source.noun, "rounds": round_ + 1, "sharing_one_gpu": gpus == 1, "runs": runs}
        )
        log = path.with_suffix(".jsonl")
        part = log.with_suffix(".part")
        part.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
        os.replace(part, log)
    client.shutdown()
    print(f"written to {path.relative_to(RESULTS.parents[1])} and {log.name}: {len(runs)} runs, {len(rows)} rows")


def planned(n_workers, usual_workers):
    """Return the settings of each run once, with the studies that it belongs to; of those that `n_workers` can make.

    usual_workers: those of a run whose study does not say how many.
    """
    plans = []
    for study, changes in STUDIES.items():
        for change in changes:
            default = {"training": "all layers", "workers": usual_workers, "threads": 1}
            plan = default | USUAL | change
            same = [other for other in plans if all(other[name] == value for name, value in plan.items())]
            if same:
                same[0]["studies"].append(study)
            elif can_be(plan, n_workers):
                plans.append({"studies": [study], **plan})
    return plans


def can_be(plan, n_workers):
    if plan["threads"] > 1 and torch.cuda.is_available():
        return False  # PyTorch's threads do not compute on a GPU
    return plan["workers"] <= n_workers and (plan["workers"] > 1 or plan["compression"] is None)


def teach(source, plan, seed):
    """Train as planned; return `train`'s numbers. Rank 0 also logs the accuracy before the first step."""
    torch.set_num_threads(plan["threads"])
    model, train_set, val_set = prepare(source, pretrained=plan["pretrained"])
    before = evaluate(model, val_set)
    if dist.get_rank() == 0:
        log_metrics(step=0, val_accuracy=before["accuracy"], val_loss=before["loss"])
    settings = {name: plan[name] for name in USUAL if name != "pretrained"}
    return train(model, train_set, val_set, seed=seed, **settings)


def tidy(row):
    """Return a row without what it lacks and what names a process: times in ms, other numbers with five digits."""
    kept = {name: value for name, value in row.items() if value == value and name not in ("worker", "attempt")}
    for name, value in kept.items():
        if isinstance(value, float):
            kept[name] = round(value, 3) if name == "time" else float(f"{value:.5g}")
            kept[name] = int(value) if value.is_integer() and name != "time" else kept[name]
    return kept


if __name__ == "__main__":
    main()
