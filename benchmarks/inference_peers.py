"""Ray Data and Daft on the task of inference.py: the same photos, model, precision, decoding and forward passes.

Peers: pip install -e '.[peers]'. Both start their processes and load the model in each run. `classify` finds workers
that have done so; so a peer's clock leaves its start out: what counts is its pace between two moments in the middle.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from dask.system import CPU_COUNT

from workshop_utils.photos import decode_photo, read_files
from workshop_utils.predicting.classifier import CPU_FORWARD
from workshop_utils.predicting.loaded_model import loaded_model

SIZES = (CPU_FORWARD, 2 * CPU_FORWARD)  # photos at a time


def peers(paths: Sequence[str], weights: str) -> tuple[dict[str, Callable[[], Iterator]], dict[str, str]]:
    """Return {name: a function that returns an iterator over lists of predictions} and {name: why it cannot run}."""
    contestants, not_run = {}, {}
    for name, package, ways in (("Ray Data", "ray", with_ray), ("Daft", "daft", with_daft)):
        if importlib.util.find_spec(package) is None:
            not_run[name] = f"{package} is not installed: pip install -e '.[peers]'"
        else:
            contestants |= ways(paths, weights)
    return contestants, not_run


def steady_seconds(predictions: Iterator, n_photos: int) -> float:
    """Return the seconds for all photos, at the pace from a quarter of them to three quarters.

    At both, about as many photos are half done. At the end none are, so the pace up to there would be too fast.
    Raises ValueError if some photos are missing.
    """
    done, passed = 0, []  # (photos, moment), twice
    for part in predictions:
        done += len(part)
        if done >= (1 + 2 * len(passed)) * n_photos / 4:
            passed.append((done, time.perf_counter()))
    if done != n_photos:
        raise ValueError(f"{done} of {n_photos} photos are classified.")
    (n_before, begun), (n_after, ended) = passed
    return (ended - begun) * n_photos / (n_after - n_before)


# --- what both run


def decoded(paths, transform):
    """Return (n, 3, 224, 224) float32."""
    contents = read_files(paths)
    return torch.stack([transform(decode_photo(*pair)) for pair in zip(contents, paths, strict=True)])


class Classifier:
    """The model in one process, on one core."""

    def __init__(self, weights):
        torch.set_num_threads(1)
        self.loaded = loaded_model(weights)

    def of_paths(self, paths):
        return self.of_images(decoded(paths, self.loaded.transform))

    @torch.inference_mode()
    def of_images(self, images):
        model, categories = self.loaded.model, self.loaded.categories
        like = next(model.parameters())
        images = images.to(like.dtype, memory_format=torch.channels_last)
        parts = [model(part).argmax(1) for part in images.split(CPU_FORWARD)]
        return [categories[index] for index in torch.cat(parts)]


# --- Ray Data: https://docs.ray.io/en/latest/data/batch_inference.html


class RayClassifier(Classifier):
    def __call__(self, batch):
        if "image" in batch:
            return {"prediction": self.of_images(torch.from_numpy(batch["image"]))}
        return {"prediction": self.of_paths(list(batch["item"]))}


def with_ray(paths, weights):
    import ray

    def classified(make_dataset, size):
        # A core more than there is: where an actor holds each core, the tasks that feed them would wait for ever.
        ray.init(num_cpus=CPU_COUNT + 1, include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            actors = ray.data.ActorPoolStrategy(size=CPU_COUNT)
            found = make_dataset(size).map_batches(
                RayClassifier, fn_constructor_args=[weights], compute=actors, batch_size=size, num_cpus=1
            )
            for batch in found.iter_batches(batch_size=None, batch_format="numpy"):
                yield list(batch["prediction"])
        finally:
            ray.shutdown()

    def of_paths(size):
        return ray.data.from_items(list(paths), override_num_blocks=max(len(paths) // size, 1))

    def of_images(size):
        transform = loaded_model(weights).transform

        def decode(batch):
            torch.set_num_threads(1)
            return {"image": decoded(list(batch["item"]), transform).numpy()}

        return of_paths(size).map_batches(decode, batch_size=size)

    ways = {f"Ray Data, actors decode {size} photos at a time": partial(classified, of_paths, size) for size in SIZES}
    return ways | {f"Ray Data, tasks decode {CPU_FORWARD} at a time": partial(classified, of_images, CPU_FORWARD)}


# --- Daft: https://docs.daft.ai/en/stable/custom-code/cls/


def with_daft(paths, weights):
    import daft
    from daft.pickle import cloudpickle

    daft.set_runner_native()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its processes do not find this file

    def classified(use_process, size):
        @daft.cls(cpus=1, max_concurrency=CPU_COUNT, use_process=use_process)
        class DaftClassifier(Classifier):
            @daft.method.batch(return_dtype=str, batch_size=size)
            def predict(self, paths):
                return self.of_paths(paths.to_pylist())

        frame = daft.from_pydict({"path": list(paths)}).into_batches(size)
        frame = frame.select(DaftClassifier(weights).predict(daft.col("path")).alias("prediction"))
        for part in frame.iter_partitions():
            yield part.to_pydict()["prediction"]

    return {
        f"Daft, {CPU_COUNT} {'processes' if process else 'threads'}, {size} photos at a time": partial(
            classified, process, size
        )
        for process in (False, True)
        for size in SIZES
    }
