"""What benchmarks/inference.py compares on a GPU: `classify`, a user's other choices, and each stage of it alone.

The choices are tuned: children for all cores but two, pinned memory, bf16 autocast, channels-last, batches of 256; the
model is loaded and the GPU warm before the clock starts.
"""

import importlib.util
import io
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import click
import cloudpickle
import numpy as np
import torch
from dask.system import CPU_COUNT
from jpegs import random_weights, write_jpegs
from PIL import Image, ImageOps
from record import gpu_watched, write_result
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from workshop_utils.classify import classify
from workshop_utils.cluster import start_cluster
from workshop_utils.photos import ImageFolder, list_photos
from workshop_utils.precision import precision_of
from workshop_utils.predicting import classifier
from workshop_utils.predicting.classifier import GPU_FORWARD
from workshop_utils.predicting.loaded_model import loaded_model
from workshop_utils.weights import load_resnet

N_DISTINCT = 512  # JPEGs that are drawn; the rest are hard links to them
CHILDREN = max(1, CPU_COUNT - 2)
WITHOUT_FORWARD, FORWARD = "read and decode alone", "forward alone"
RAY = "Ray Data, from when its model is loaded"


def compare(n_photos, rounds, device="cuda"):
    """Run all contestants on one GPU in each round; print and write the medians. device: "cpu" to try the code."""
    with tempfile.TemporaryDirectory() as folder, gpu_watched("inference") as mark:
        write_links(folder, n_photos)
        weights = os.environ.get("WORKSHOP_WEIGHTS") or random_weights(folder)
        paths = list_photos(folder)
        client = start_cluster(1)
        model, transform, _ = load_resnet(weights)
        model = model.to(device, memory_format=torch.channels_last)
        contestants = {
            f"DataLoader, {CHILDREN} children": partial(data_loader, model, ImageFolder(folder, transform), device),
            f"DataLoader, {CHILDREN} children that decode, transforms on the GPU": partial(
                data_loader, model, Decoded(paths), device, in_batches(transform)
            ),
            "classify": lambda: timed(classify, client, paths, batch_size=GPU_FORWARD, weights=weights),
            WITHOUT_FORWARD: lambda: client.submit(without_forward, paths, weights, pure=False).result(),
            FORWARD: lambda: client.submit(forward_alone, n_photos, weights, pure=False).result(),
        }
        not_run = {}
        if importlib.util.find_spec("ray") and importlib.util.find_spec("pyarrow"):
            contestants[RAY] = partial(ray_data, paths, weights, device)
        else:
            not_run[RAY] = "Ray is not installed: pip install 'ray[data]'"
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
        with torch.inference_mode():  # CUDA's libraries choose their kernels in the first passes
            model(torch.zeros(GPU_FORWARD if device == "cuda" else 1, 3, 224, 224, device=device))
        classify(client, paths[: 8 * GPU_FORWARD], batch_size=GPU_FORWARD, weights=weights)
        seconds = {name: [] for name in contestants}
        for number in range(rounds):
            for name, run in contestants.items():
                mark(f"{name} begins")
                seconds[name].append(run())
            click.echo(f"round {number + 1} of {rounds} done", err=True)
        client.shutdown()
    seconds["bound"] = list(map(max, seconds[WITHOUT_FORWARD], seconds[FORWARD]))
    return report(n_photos, rounds, seconds, not_run, bool(os.environ.get("WORKSHOP_WEIGHTS")))


def write_links(folder, n_photos):
    """Have `n_photos` JPEGs in seconds: N_DISTINCT are drawn, and linked to under other names."""
    write_jpegs(folder, min(n_photos, N_DISTINCT))
    drawn = sorted(Path(folder).glob("*/*.jpg"))
    for number in range(len(drawn), n_photos):
        photo = drawn[number % len(drawn)]
        os.link(photo, photo.with_name(f"{photo.stem}_{number}.jpg"))


def timed(function, *args, **kwargs):
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function(*args, **kwargs)
    return time.perf_counter() - start


class Decoded(Dataset):
    """Photos as uint8 tensors (3, 375, 500), with a label that nobody needs."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return decode_image(self.paths[index], ImageReadMode.RGB, apply_exif_orientation=True), 0


def in_batches(transform):
    """Return the transform for a batch of uint8 images of one size, as a user would write it with transforms v2."""
    return v2.Compose(
        [
            v2.Resize(transform.resize_size),
            v2.CenterCrop(transform.crop_size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(transform.mean, transform.std),
        ]
    )


def data_loader(model, dataset, device, transform=None):
    """Return the seconds of the usual loop: children read and decode, and transform unless the GPU does it here."""
    start, found = time.perf_counter(), []
    loader = DataLoader(dataset, GPU_FORWARD, num_workers=CHILDREN, pin_memory=device == "cuda")
    with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
        for images, _ in loader:
            images = images.to(device, non_blocking=True)  # (batch, 3, 224, 224), or as decoded
            images = transform(images) if transform else images
            found.append(model(images.to(memory_format=torch.channels_last)).argmax(1))  # stays there: no waiting
    assert len(torch.cat(found).tolist()) == len(dataset)
    return time.perf_counter() - start


def without_forward(paths, weights):
    """Return the seconds that `classify`'s own pipeline takes on a worker for all but the forward pass."""
    with patch.object(classifier, "_forward", lambda model, images: [(0.0, 0)] * len(images)):
        photos = classifier.Classifier(weights)
        parts = [paths[start : start + GPU_FORWARD] for start in range(0, len(paths), GPU_FORWARD)]
        return timed(lambda: [photos(photos.load([(path, path) for path in part])) for part in parts])


@torch.inference_mode()
def forward_alone(n_photos, weights):
    """Return the seconds of a worker's forward passes over images that lie on its device as its model wants them."""
    model = loaded_model(weights).model
    like = next(model.parameters())
    size = min(GPU_FORWARD, n_photos)
    images = torch.rand(size, 3, 224, 224, device=like.device).to(like.dtype, memory_format=torch.channels_last)

    def passes(number):
        for _ in range(number):
            logits = model(images)
        return logits.sum().item()  # waits for the GPU

    passes(3)
    return timed(passes, n_photos // size) * n_photos / (n_photos // size * size)


def ray_data(paths, weights, device):
    """Return the seconds of Ray Data: tasks on all cores decode, resize and crop; one actor has the GPU."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray brings its own
    ray.init(num_gpus=int(device == "cuda"), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        photos = ray.data.read_binary_files(paths).map_batches(cut, fn_args=(load_resnet(weights)[1],), batch_size=64)
        about = {"num_gpus": 1} if device == "cuda" else {}
        found = photos.map_batches(
            ModelOfRay,
            fn_constructor_args=(weights, device),
            batch_size=GPU_FORWARD,
            compute=ray.data.ActorPoolStrategy(size=1),
            **about,
        ).to_pandas()
        assert len(found) == len(paths), f"Ray Data classified {len(found)} of {len(paths)} photos"
        return time.time() - found.loaded.max()
    finally:
        ray.shutdown()


def cut(batch, transform):
    """Return uint8 (n, 224, 224, 3) of a batch of encoded photos: a quarter of the bytes that float32 would send."""
    to_size = v2.Compose([v2.Resize(transform.resize_size), v2.CenterCrop(transform.crop_size)])
    photos = [ImageOps.exif_transpose(Image.open(io.BytesIO(content))) for content in batch["bytes"]]
    images = [to_size(photo.convert("RGB")) for photo in photos]
    return {"image": np.stack([np.asarray(image) for image in images])}


class ModelOfRay:
    """The actor's model."""

    def __init__(self, weights, device):
        self.device = device
        model, transform, _ = load_resnet(weights)
        self.model = model.to(device, memory_format=torch.channels_last)
        self.transform = v2.Compose(
            [v2.ToDtype(torch.float32, scale=True), v2.Normalize(transform.mean, transform.std)]
        )
        with torch.inference_mode():
            self.model(torch.zeros(1, 3, 224, 224, device=device))
        self.loaded = time.time()

    def __call__(self, batch):
        images = torch.from_numpy(batch["image"]).to(self.device).permute(0, 3, 1, 2)  # channels-last as it comes
        with torch.inference_mode(), torch.autocast(self.device, torch.bfloat16):
            found = self.model(self.transform(images)).argmax(1).cpu().numpy()
        return {"prediction": found, "loaded": np.full(len(found), self.loaded)}


def report(n_photos, rounds, seconds, not_run, real_weights):
    """Print the table, with the ratios that the project promises, and write the same as JSON; return its path."""
    rate = {name: n_photos / statistics.median(values) for name, values in seconds.items()}
    slower = min(WITHOUT_FORWARD, FORWARD, key=rate.get)
    best = max((name for name in rate if name.startswith("DataLoader")), key=rate.get)
    ratios = {
        "classify / bound": rate["classify"] / rate[slower],
        "classify / best DataLoader": rate["classify"] / rate[best],
    }
    if RAY in rate:
        ratios["classify / Ray Data"] = rate["classify"] / rate[RAY]
    width = max(map(len, rate))
    lines = [f"{'':{width}}  images/s"]
    lines += [f"{name:{width}}  {value:8.0f}" for name, value in rate.items()]
    lines += [f"{name:{width}}  not run: {why}" for name, why in not_run.items()]
    lines += [f"{'bound, the slower stage':{width}}  {rate[slower]:8.0f}  {slower}"]
    lines += [f"{name:{width}}  {value:8.2f}" for name, value in ratios.items()]
    lines.append(f"{n_photos} JPEGs of 500x375, ResNet-50 in {precision_of()}; medians of {rounds} rounds")
    print("\n".join(lines))
    path = write_result(
        "inference",
        {
            "photos": n_photos,
            "distinct": min(n_photos, N_DISTINCT),
            "rounds": rounds,
            "batch_size": GPU_FORWARD,
            "children": CHILDREN,
            "real_weights": real_weights,
            "precision": precision_of(),
            "images_per_s": rate,
            "ratios": ratios,
            "not_run": not_run,
            "seconds": seconds,
            "printed": lines,
        },
    )
    print(f"written to {path.parent.name}/{path.name}")
    return path
