"""Classify all images in a folder or a bucket on Dask workers, and write Parquet; a second start does what is missing:

python predict.py IMAGES OUTPUT --workers 2

It needs PyTorch, Pillow, pyarrow and daskrun only. Copy it, and put your own model and transform in.
"""

import argparse
import io
import os

import fsspec
import numpy as np
import torch
from distributed import Client
from fsspec.core import url_to_fs
from PIL import Image

import daskrun

CATEGORIES = ["red", "green", "blue"]
EXTENSIONS = (".jpg", ".jpeg", ".png")


class Classifier:
    """One in each worker's process, and another one in that of its successor."""

    def __init__(self):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())  # yours, with its weights
        self.model = model.eval().to(self.device)

    def load(self, paths):
        """Read and transform the next images in a thread, while the model computes."""
        return paths, torch.stack([self.image(path) for path in paths])

    def image(self, path):
        with fsspec.open(path, "rb") as file:
            image = Image.open(io.BytesIO(file.read())).convert("RGB").resize((224, 224))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255

    @torch.inference_mode()
    def __call__(self, batch):
        paths, images = batch
        probabilities, labels = self.model(images.to(self.device)).softmax(1).max(1)
        named = [CATEGORIES[label] for label in labels.tolist()]
        return {"path": paths, "label": named, "probability": probabilities}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", help="a folder, or an address such as s3://BUCKET/FOLDER, that all workers reach")
    parser.add_argument("output", help="the same, for Parquet files")
    parser.add_argument("--workers", type=int, default=2, help="of a local cluster; 2 if not given")
    given = parser.parse_args()
    fs, root = url_to_fs(given.images if "://" in given.images else os.path.abspath(given.images))
    paths = [fs.unstrip_protocol(path) for path in sorted(fs.find(root)) if path.lower().endswith(EXTENSIONS)]
    print(f"{len(paths)} images", flush=True)
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")  # of a cluster that runs
    with Client(address) if address else daskrun.start_local(given.workers) as client:
        # An image that can't be read becomes a row with an error.
        parts = daskrun.map_batches(client, Classifier, paths, batch_size=32, output=given.output, on_error="row")
    print(f"{len(parts)} files in {given.output}")


if __name__ == "__main__":
    main()
