"""Images per second from object storage through a DataLoader: this project's `ImageFolder` and `S3ImageFolder`.

    python benchmarks/storage.py [--per-breed N] [--rounds N] [--delay-ms MS]

`S3ImageFolder` is dask-pytorch-ddp's; it needs boto3, which that package does not declare. Both read the same JPEGs of
224×224 (sketches: cheap to decode, because the reading is what differs) from the same S3 server on this machine, with
the same transform and number of children, one after the other in each round; the medians over the rounds count.
Children start outside the clock.
"""

import importlib.metadata
import os
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path

import click
import torch
from latency import hold_back_requests
from record import write_result
from torch.utils.data import DataLoader

from workshop_utils.data import ImageFolder
from workshop_utils.dogs.breeds import HELD_OUT
from workshop_utils.dogs.sketches import write_sketches
from workshop_utils.models import load_resnet
from workshop_utils.object_store import BUCKET, local_object_store

BATCH_SIZE = 32
CHILDREN = (0, 2)


@click.command()
@click.option("--per-breed", default=32, show_default=True, help="JPEGs of each of the 12 breeds.")
@click.option("--rounds", default=3, show_default=True, help="Times each contestant runs.")
@click.option("--delay-ms", default=20.0, show_default=True, help="Added to each request in the second condition.")
def main(per_breed, rounds, delay_ms):
    torch.set_num_threads(1)  # as a worker or a child has; two would wait for each other on every small tensor
    seconds = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "dogs")
        write_sketches(folder, per_breed, HELD_OUT)
        with local_object_store(folder) as options:
            near = options["client_kwargs"]["endpoint_url"]
            with hold_back_requests(near, delay_ms / 1000) as far:
                for (delay, endpoint), children in product([(0, near), (delay_ms, far)], CHILDREN):
                    condition = f"{delay:g} ms, {children} children"
                    seconds[condition] = measure(endpoint, children, rounds)
                    click.echo(f"{condition}: the same tensors and labels; measured", err=True)
    report(per_breed * len(HELD_OUT), rounds, seconds)


def measure(endpoint, children, rounds):
    """Return the seconds of each round for both contestants, having shown that they give the same."""
    loaders = {dataset.__class__.__name__: load(dataset, children) for dataset in make_datasets(endpoint)}
    prove_equal(*loaders.values())
    seconds = {name: [] for name in loaders}
    for name, loader in [*loaders.items()] * rounds:
        start = time.perf_counter()
        n_images = sum(len(labels) for _, labels in loader)
        seconds[name].append(time.perf_counter() - start)
        assert n_images == len(loader.dataset), (n_images, len(loader.dataset))
    return seconds


def make_datasets(endpoint):
    """Return both contestants, upstream's first."""
    _, transform, _ = load_resnet("sketches")
    os.environ["AWS_ENDPOINT_URL"] = endpoint  # S3ImageFolder can be told in no other way, and asks for every image
    try:
        from dask_pytorch_ddp.data import S3ImageFolder

        theirs = S3ImageFolder(BUCKET, "dogs/", transform, anon=True)
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error}, and S3ImageFolder needs it: pip install -e '.[peers]'") from error
    theirs.all_files = [key for key in theirs.all_files if not key.endswith("/")]  # it takes folders for images
    options = {"anon": True, "client_kwargs": {"endpoint_url": endpoint}}
    return theirs, ImageFolder(f"s3://{BUCKET}/dogs", transform, storage_options=options)


def load(dataset, children):
    how = {"multiprocessing_context": "spawn", "persistent_workers": True} if children else {}
    return DataLoader(dataset, BATCH_SIZE, num_workers=children, **how)


def prove_equal(theirs, ours):
    """Raise unless both loaders give, batch by batch, the same tensors and labels for the same classes."""
    assert theirs.dataset.classes == ours.dataset.classes, (theirs.dataset.classes, ours.dataset.classes)
    for number, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
        for a, b in zip(expected, found, strict=True):  # (batch, 3, 224, 224) images, (batch,) labels
            assert torch.equal(a, b), f"batch {number} differs"


def report(n_photos, rounds, seconds):
    """Print the table with the ratios, and write the same as JSON."""
    rates, ratios = {}, {}
    lines = [f"{'images/s':22}S3ImageFolder  ImageFolder  ratio"]
    for condition, of in seconds.items():
        rates[condition] = {name: n_photos / statistics.median(values) for name, values in of.items()}
        theirs, ours = rates[condition].values()
        ratios[condition] = ours / theirs
        lines.append(f"{condition:22}{theirs:13.1f}{ours:13.1f}{ours / theirs:7.2f}")
    print("\n".join(lines))
    versions = {name: importlib.metadata.version(name) for name in ("dask-pytorch-ddp", "boto3", "s3fs")}
    path = write_result(
        "storage",
        {
            "photos": n_photos,
            "rounds": rounds,
            "batch_size": BATCH_SIZE,
            "versions": versions,
            "images_per_s": rates,
            "ratios": ratios,
            "seconds": seconds,
            "printed": lines,
        },
    )
    print(f"written to {path.relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
