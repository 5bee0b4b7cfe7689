"""Photos per second from object storage, read alone and through a DataLoader: this project, s3fs and `S3ImageFolder`.

    python benchmarks/storage.py [--per-breed N] [--rounds N] [--delay-ms MS]

`S3ImageFolder` is dask-pytorch-ddp's; it needs boto3, which that package does not declare. All read the same JPEGs of
224×224 (sketches: cheap to decode, because the reading is what differs) from the same S3 server on this machine.
Through a DataLoader, they have the same transform and number of children, which start outside the clock; "from memory"
reads nothing, so no reader can be faster. Each round runs every contestant once; the medians over the rounds count.
"""

import importlib.metadata
import os
import statistics
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path

import click
import fsspec
import torch
from record import write_result
from torch.utils.data import DataLoader

from workshop_utils.dogs.breeds import HELD_OUT
from workshop_utils.dogs.sketches import write_sketches
from workshop_utils.object_store import BUCKET, local_object_store
from workshop_utils.photos import ImageFolder, decode_photo, list_photos, read_files
from workshop_utils.reading.latency import hold_back_requests
from workshop_utils.storage import open_address
from workshop_utils.weights import load_resnet

BATCH_SIZE = 32
CHILDREN = (0, 2)
THEIRS, OURS, BOUND = "S3ImageFolder", "ImageFolder", "from memory"
ROOT = f"s3://{BUCKET}/dogs"


@click.command()
@click.option("--per-breed", default=32, show_default=True, help="JPEGs of each of the 12 breeds.")
@click.option("--rounds", default=5, show_default=True, help="Times each contestant runs.")
@click.option("--delay-ms", default=20.0, show_default=True, help="Added to each request in the second condition.")
def main(per_breed, rounds, delay_ms):
    torch.set_num_threads(1)  # as a worker or a child has; two would wait for each other on every small tensor
    seconds, reading = {}, {}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "dogs")
        write_sketches(folder, per_breed, HELD_OUT)
        with local_object_store(folder) as options:
            near = options["client_kwargs"]["endpoint_url"]
            with hold_back_requests(near, delay_ms / 1000) as far:
                for delay, endpoint in ((0, near), (delay_ms, far)):
                    reading[f"{delay:g} ms"] = measure_reading(endpoint, rounds)
                    click.echo(f"{delay:g} ms: the same bytes; measured", err=True)
                for (delay, endpoint), children in product([(0, near), (delay_ms, far)], CHILDREN):
                    condition = f"{delay:g} ms, {children} children"
                    seconds[condition] = measure(endpoint, children, rounds)
                    click.echo(f"{condition}: the same tensors and labels; measured", err=True)
    report(per_breed * len(HELD_OUT), rounds, seconds, reading)


def measure_reading(endpoint, rounds):
    """Return the seconds of each round for each of READERS, having shown that they give the same."""
    options = {"anon": True, "client_kwargs": {"endpoint_url": endpoint}}
    paths = list_photos(ROOT, storage_options=options)
    batches = [paths[start : start + BATCH_SIZE] for start in range(0, len(paths), BATCH_SIZE)]
    first = {name: read(batches[0], options) for name, read in READERS.items()}  # connects, outside the clock
    assert all(isinstance(content, bytes) for content in first[OURS_READS])
    assert all(contents == first[OURS_READS] for contents in first.values())

    def run(read):
        for batch in batches:
            read(batch, options)

    return in_turn(rounds, {name: partial(run, read) for name, read in READERS.items()})


def measure(endpoint, children, rounds):
    """Return the seconds of each round for each contestant, having shown that they give the same."""
    loaders = {name: load(dataset, children) for name, dataset in make_datasets(endpoint).items()}
    for name in loaders.keys() - {OURS}:
        prove_equal(loaders[OURS], loaders[name])

    def run(loader):
        n_images = sum(len(labels) for _, labels in loader)
        assert n_images == len(loader.dataset), (n_images, len(loader.dataset))

    return in_turn(rounds, {name: partial(run, loader) for name, loader in loaders.items()})


def in_turn(rounds, contestants):
    seconds = {name: [] for name in contestants}
    for name, run in [*contestants.items()] * rounds:
        start = time.perf_counter()
        run()
        seconds[name].append(time.perf_counter() - start)
    return seconds


# --- readers: functions of (paths, storage_options) that return the bytes of each file, in order


def one_by_one(paths, options):
    fs = fsspec.filesystem("s3", **options)
    return [fs.cat_file(path) for path in paths]


def at_once(paths, options):
    found = fsspec.filesystem("s3", **options).cat(paths)  # sorted by path
    return [found[path.removeprefix("s3://")] for path in paths]


def at_once_tuned(paths, options):
    """Read as `read_files` does without obstore: with 64 connections, and no question for a file's size."""
    fs, _ = open_address(paths[0], options)
    return fs.cat_ranges(paths, None, None, on_error="raise")


OURS_READS = "read_files"
READERS = {
    "s3fs one by one": one_by_one,
    "s3fs concurrent": at_once,
    "s3fs tuned": at_once_tuned,
    OURS_READS: read_files,
}


class ReadWith(ImageFolder):
    """An `ImageFolder` that reads with another reader."""

    def __init__(self, read, *args, **settings):
        super().__init__(*args, **settings)
        self.read = read

    def __getitems__(self, indices):
        samples = [self.samples[index] for index in indices]
        contents = self.read([path for path, _ in samples], self.storage_options)
        photos = [decode_photo(content, path) for content, (path, _) in zip(contents, samples, strict=True)]
        return [(self.transform(photo), label) for photo, (_, label) in zip(photos, samples, strict=True)]


class Memory:
    """A reader that has read everything before."""

    def __init__(self, paths, options):
        self.contents = dict(zip(paths, read_files(paths, options), strict=True))

    def __call__(self, paths, options):
        return [self.contents[path] for path in paths]


def make_datasets(endpoint):
    """Return {name: dataset}, upstream's first."""
    _, transform, _ = load_resnet("sketches")
    os.environ["AWS_ENDPOINT_URL"] = endpoint  # S3ImageFolder can be told in no other way, and asks for every image
    try:
        from dask_pytorch_ddp.data import S3ImageFolder

        theirs = S3ImageFolder(BUCKET, "dogs/", transform, anon=True)
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error}, and S3ImageFolder needs it: pip install -e '.[peers]'") from error
    theirs.all_files = [key for key in theirs.all_files if not key.endswith("/")]  # it takes folders for images
    options = {"anon": True, "client_kwargs": {"endpoint_url": endpoint}}
    by_s3fs = {name: read for name, read in READERS.items() if name != OURS_READS}
    readers = {**by_s3fs, BOUND: Memory(list_photos(ROOT, storage_options=options), options)}
    return {
        THEIRS: theirs,
        **{name: ReadWith(read, ROOT, transform, storage_options=options) for name, read in readers.items()},
        OURS: ImageFolder(ROOT, transform, storage_options=options),
    }


def load(dataset, children):
    how = {"multiprocessing_context": "spawn", "persistent_workers": True} if children else {}
    return DataLoader(dataset, BATCH_SIZE, num_workers=children, **how)


def prove_equal(ours, other):
    """Raise unless both loaders give, batch by batch, the same tensors and labels for the same classes."""
    assert other.dataset.classes == ours.dataset.classes, (other.dataset.classes, ours.dataset.classes)
    for number, (expected, found) in enumerate(zip(ours, other, strict=True)):
        for a, b in zip(expected, found, strict=True):  # (batch, 3, 224, 224) images, (batch,) labels
            assert torch.equal(a, b), f"batch {number} differs"


def report(n_photos, rounds, seconds, reading):
    """Print the rates, and write them as JSON; table.py says which goals they meet."""
    rates = {condition: rates_of(n_photos, of) for condition, of in (reading | seconds).items()}
    lines = []
    for condition, of in rates.items():
        lines.append(condition)
        lines += [f"  {name:24}{rate:9.1f} photos/s" for name, rate in of.items()]
    print("\n".join(lines))
    versions = {name: importlib.metadata.version(name) for name in ("dask-pytorch-ddp", "boto3", "s3fs", "obstore")}
    path = write_result(
        "storage",
        {
            "photos": n_photos,
            "rounds": rounds,
            "batch_size": BATCH_SIZE,
            "versions": versions,
            "images_per_s": rates,
            "seconds": seconds,
            "reading": reading,
            "printed": lines,
        },
    )
    print(f"written to {path.relative_to(Path(__file__).parents[1])}")


def rates_of(n_photos, seconds):
    return {name: n_photos / statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
