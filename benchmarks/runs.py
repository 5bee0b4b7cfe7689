"""The run logs that notebook 07 reads: the same training on 1, 2 and 4 workers, every row of metrics kept.

    python benchmarks/runs.py [--photos FOLDER --weights FILE]

The images, their order and the number of images a step are the same for all, so the runs differ in how the work is
shared and in nothing else. Each worker has one PyTorch thread, except in the run that gives one worker all cores.
With a GPU there is one run, on all GPUs.
"""

import json
import time

import click
import torch
from dask.system import CPU_COUNT
from record import RESULTS, write_result

from workshop_utils import ddp
from workshop_utils.cluster import start_cluster
from workshop_utils.data import HELD_OUT, ImageFolder, find_data, train_val_split
from workshop_utils.models import load_resnet, with_new_head
from workshop_utils.training import train

BATCH_SIZE = 32
PER_BREED = 40  # sketches
ON_CPU = [(1, 1), (2, 1), (4, 1), (1, CPU_COUNT)]  # (workers, PyTorch threads of each)
SKETCHES = {"epochs": 3, "freeze_epochs": 2, "lr": 0.1, "body_lr": 0.1, "warmup_steps": 3}
PHOTOS = {"epochs": 3, "freeze_epochs": 3, "lr": 0.1, "warmup_steps": 3, "precision": "auto"}


@click.command()
@click.option("--photos", type=click.Path(exists=True, resolve_path=True), help="Folder of Stanford Dogs.")
@click.option("--weights", type=click.Path(exists=True, resolve_path=True), help="ImageNet weights for the photos.")
def main(photos, weights):
    sketches = find_data(PER_BREED, HELD_OUT)
    if sketches.kind != "sketches":
        raise click.ClickException("Unset WORKSHOP_DATA: photos are named with --photos.")
    jobs = [("sketches", sketches.url, "sketches", SKETCHES)]
    jobs += [("photos", photos, weights or "imagenet", PHOTOS)] if photos else []
    rows, runs = [], []
    for n_workers, n_threads in [(None, 1)] if torch.cuda.is_available() else ON_CPU:
        client = start_cluster(n_workers)
        ddp.run(client, prepare, sketches.url, "sketches")  # imports PyTorch, outside the clock
        for data, url, initial, settings in jobs:
            name = f"{data}, {len(client.nthreads())} x {n_threads}"
            job = ddp.launch(client, teach, url, initial, n_threads, settings)
            launched = time.time()
            numbers = job.result()[0]
            run = {"run": name, "data": data, "workers": len(job.workers), "threads": n_threads}
            rows += [run | row | {"seconds": row["time"] - launched} for row in job.metrics().to_dict("records")]
            runs.append(run | {"settings": settings | {"batch_size": BATCH_SIZE}} | numbers)
            click.echo(f"{name}: {numbers['images_per_s']:.1f} images/s, {numbers['accuracy']:.1%}", err=True)
        client.shutdown()
    path = write_result("runs", {"runs": runs})
    log = path.with_suffix(".jsonl")
    log.write_text("".join(json.dumps(tidy(row)) + "\n" for row in rows))
    print(f"written to {path.relative_to(RESULTS.parents[1])} and {log.name}: {len(runs)} runs, {len(rows)} rows")


def prepare(url, weights):
    torch.manual_seed(0)
    model, transform, _ = load_resnet(weights)
    dataset = ImageFolder(url, transform, breeds=HELD_OUT)
    return with_new_head(model, len(HELD_OUT)), *train_val_split(dataset, 0.25, seed=0)


def teach(url, weights, n_threads, settings):
    """Train; return its numbers and the confusion: for each (breed, prediction) of the validation set, how many."""
    torch.set_num_threads(n_threads)
    model, train_set, val_set = prepare(url, weights)
    numbers = train(model, train_set, val_set, batch_size=BATCH_SIZE, **settings)
    images, labels = zip(*(val_set[index] for index in range(len(val_set))), strict=True)
    with torch.inference_mode():
        device = next(model.parameters()).device
        answers = [model(image.unsqueeze(0).to(device)).argmax().item() for image in images]
    pairs = sorted((HELD_OUT[truth].name, HELD_OUT[answer].name) for truth, answer in zip(labels, answers, strict=True))
    return numbers | {"confusion": [[*pair, pairs.count(pair)] for pair in sorted(set(pairs))]}


def tidy(row):
    """Return a row without what it lacks, and with six digits, which a clock does not exceed."""
    return {name: round(value, 6) if isinstance(value, float) else value
            for name, value in row.items() if value == value and name not in ("time", "worker", "attempt")}  # fmt: skip


if __name__ == "__main__":
    main()
