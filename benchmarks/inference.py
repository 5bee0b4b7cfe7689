"""Photos per second of `classify`, of the usual ways to do the same, and of the bound that the cores set.

    python benchmarks/inference.py [--photos N] [--rounds N]

All read the same JPEGs of 500×375 and run the same ResNet-50, one after the other in each round; the medians over the
rounds count. WORKSHOP_WEIGHTS names the weights; without it they are random, which costs the same time. The bound is
the pace of decoding and of the forward passes of whichever engine is faster here. Peers: pip install -e '.[peers]';
inference_peers.py says how their time is taken. With a GPU, the contestants are those of gpu_inference.py.
"""

import os
import statistics
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path

import click
import dask
import torch
import torchvision
from dask.system import CPU_COUNT
from inference_peers import peers, steady_seconds
from jpegs import random_weights, write_jpegs
from record import versions, write_result
from torch.utils.data import DataLoader

from workshop_utils.classify import classify
from workshop_utils.cluster import start_cluster
from workshop_utils.photos import ImageFolder, decode_photo, read_files
from workshop_utils.predicting.classifier import CPU_FORWARD
from workshop_utils.predicting.engine import module_for
from workshop_utils.predicting.loaded_model import loaded_model
from workshop_utils.weights import load_resnet

N_PHOTOS, N_PHOTOS_GPU = 384, 20_480
BATCH_SIZE = 32
PRECISIONS, ENGINES = ("fp32", "bf16"), ("eager", "openvino")


@click.command()
@click.option(
    "--photos",
    "n_photos",
    type=click.IntRange(min=8 * BATCH_SIZE),  # the pace of a peer is that between two of its batches
    help=f"JPEGs that each contestant classifies.  [default: {N_PHOTOS}; on a GPU {N_PHOTOS_GPU}]",
)
@click.option("--rounds", default=5, show_default=True, help="Times each contestant runs.")
def main(n_photos, rounds):
    if torch.cuda.is_available():
        from gpu_inference import compare

        return compare(n_photos or N_PHOTOS_GPU, rounds)
    n_photos = n_photos or N_PHOTOS
    with tempfile.TemporaryDirectory() as folder:
        photos = f"{folder}/photos"
        paths = write_jpegs(photos, n_photos)
        weights = os.environ.get("WORKSHOP_WEIGHTS") or random_weights(folder)
        client = start_cluster(threads_per_worker=1)
        contestants = {"upstream, fp32": partial(upstream, paths, weights)}
        for precision in PRECISIONS:
            contestants[f"DataLoader, {precision}"] = partial(data_loader, photos, weights, precision == "bf16")
        how = {f"{precision}, {engine}": (precision, engine) for precision, engine in product(PRECISIONS, ENGINES)}
        for name, (precision, engine) in how.items():
            run = partial(classify, client, paths, weights=weights, precision=precision, engine=engine)
            contestants[f"classify, {name}"] = run
        others, not_run = peers(paths, str(weights), how)
        bounds = {f"bound, {precision}": [] for precision in PRECISIONS}
        seconds = {name: [] for name in [*contestants, *others]} | bounds
        core_ms = {}
        for number in range(rounds):
            for name, run in contestants.items():
                if name.startswith("classify"):
                    run()  # every worker loads and converts, outside the clock: it keeps the last two models
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
            for name, run in others.items():
                seconds[name].append(steady_seconds(run(), n_photos))
            for precision in PRECISIONS:
                measured = client.run(core_seconds_per_photo, paths[: n_photos // 4], weights, precision).values()
                of_engine = [statistics.mean(of_workers) for of_workers in zip(*measured, strict=True)]
                decode, *forward = of_engine
                core_ms[precision] = [1e3 * part for part in of_engine]
                bounds[f"bound, {precision}"].append(n_photos * (decode + min(forward)) / CPU_COUNT)
            click.echo(f"round {number + 1} of {rounds} done", err=True)
        client.shutdown()
    report(n_photos, rounds, seconds, not_run, core_ms, os.environ.get("WORKSHOP_WEIGHTS") is not None)


def upstream(paths, weights):
    """The recipe that this workshop replaces: a task per image, then a task per batch that loads the model."""

    @dask.delayed
    def preprocess(path):
        transform = torchvision.transforms.Compose(
            [
                torchvision.transforms.Resize(256),
                torchvision.transforms.CenterCrop(224),
                torchvision.transforms.ToTensor(),
                torchvision.transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            ]
        )
        return transform(decode_photo(read_files([path])[0], path))

    @dask.delayed
    def predict(images):
        model, _, categories = load_resnet(weights)
        with torch.no_grad():
            return [categories[index] for index in model(torch.stack(images)).argmax(1)]

    starts = range(0, len(paths), BATCH_SIZE)
    return dask.compute(*[predict([preprocess(path) for path in paths[i : i + BATCH_SIZE]]) for i in starts])


def data_loader(folder, weights, bf16):
    """The usual loop of one process: all cores for the forward pass, in channels-last; two children read and decode."""
    model, transform, _ = load_resnet(weights)
    model = model.to(memory_format=torch.channels_last)
    torch.set_num_threads(CPU_COUNT)
    predictions = []
    loader = DataLoader(ImageFolder(folder, transform), CPU_FORWARD, num_workers=2)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for images, _ in loader:
            predictions += model(images.to(memory_format=torch.channels_last)).argmax(1).tolist()
    return predictions


def core_seconds_per_photo(paths, weights, precision):
    """Return seconds of a core per photo, while all workers do the same: to decode, and to compute with each engine."""
    loaded = loaded_model(weights, precision)

    def decode(paths):
        contents = read_files(paths)
        return torch.stack([loaded.transform(decode_photo(*pair)) for pair in zip(contents, paths, strict=True)])

    @torch.inference_mode()
    def forward(model, images):
        like = next(model.parameters(), images)
        for part in images.to(like.dtype, memory_format=torch.channels_last).split(CPU_FORWARD):  # as classify does
            model(part)

    def timed(run, *arguments):
        start = time.process_time()
        result = run(*arguments)
        seconds.append((time.process_time() - start) / len(paths))
        return result

    seconds = []
    models = [module_for(engine, loaded.model, decode(paths[:2])) for engine in ENGINES]
    for model in models:
        forward(model, decode(paths[: 2 * CPU_FORWARD]))  # the first pass pays for memory that later ones find
    images = timed(decode, paths)
    for model in models:
        timed(forward, model, images)
    return seconds


def report(n_photos, rounds, seconds, not_run, core_ms, real_weights):
    """Print the rates, and write them as JSON; table.py says which goals they meet."""
    rate = {name: n_photos / statistics.median(values) for name, values in seconds.items()}
    of_upstream = next(iter(rate.values()))
    width = max(map(len, rate))
    lines = [f"{'':{width}}  photos/s  × upstream"]
    lines += [f"{name:{width}}  {value:8.1f}  {value / of_upstream:10.2f}" for name, value in rate.items()]
    lines += [f"{name}: {why}" for name, why in not_run.items()]
    for precision, (decode, *forward) in core_ms.items():
        engines = ", ".join(f"{engine} {ms:.1f}" for engine, ms in zip(ENGINES, forward, strict=True))
        lines.append(f"core-ms per photo: decode {decode:.1f}, forward in {precision} {engines}")
    print("\n".join(lines))
    path = write_result(
        "inference",
        {
            "photos": n_photos,
            "rounds": rounds,
            "batch_size": BATCH_SIZE,
            "real_weights": real_weights,
            "images_per_s": rate,
            "seconds": seconds,
            "core_ms": core_ms,
            "not_run": not_run,
            "peers": versions(["ray", "daft"]),
            "printed": lines,
        },
    )
    print(f"written to {path.relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
