"""Ray Data and Daft on the task of inference.py: the same photos, model, precision, decoding and forward passes.

Peers: pip install -e '.[peers]'. Both start their processes and load the model in each run. `classify` finds workers
that have done so; so a peer's clock leaves its start out: what counts is its pace between two moments in the middle.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from dask.system import CPU_COUNT

from workshop_utils.photos import decode_photo, read_files
from workshop_utils.predicting.classifier import CPU_FORWARD
from workshop_utils.predicting.engine import module_for
from workshop_utils.predicting.loaded_model import loaded_model

SIZE = CPU_FORWARD  # photos at a time


def peers(
    paths: Sequence[str], weights: str, how: dict[str, tuple[str, str]]
) -> tuple[dict[str, Callable[[], Iterator]], dict[str, str]]:
    """Return {name: a function that returns an iterator over lists of predictions} and {name: why it cannot run}.

    how: {name: (precision, engine)}.
    """
    contestants, not_run = {}, {}
    for peer, package, run in (("Ray Data", "ray", with_ray), ("Daft", "daft", with_daft)):
        if importlib.util.find_spec(package) is None:
            not_run[peer] = f"{package} is not installed: pip install -e '.[peers]'"
        else:
            for name, (precision, engine) in how.items():
                contestants[f"{peer}, {name}"] = partial(run, paths, weights, precision, engine)
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

    def __init__(self, weights, precision, engine):
        torch.set_num_threads(1)
        self.loaded, self.engine = loaded_model(weights, precision), engine

    @torch.inference_mode()
    def of_paths(self, paths):
        images = decoded(paths, self.loaded.transform)
        model = module_for(self.engine, self.loaded.model, images)
        images = images.to(next(model.parameters(), images).dtype, memory_format=torch.channels_last)
        return [self.loaded.categories[index] for index in model(images).argmax(1)]


# --- Ray Data: https://docs.ray.io/en/latest/data/batch_inference.html


class RayClassifier(Classifier):
    def __call__(self, batch):
        return {"prediction": self.of_paths(list(batch["item"]))}


def with_ray(paths, weights, precision, engine):
    import ray

    ray.init(num_cpus=CPU_COUNT, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        photos = ray.data.from_items(list(paths), override_num_blocks=max(len(paths) // SIZE, 1))
        found = photos.map_batches(
            RayClassifier,
            fn_constructor_args=[weights, precision, engine],
            compute=ray.data.ActorPoolStrategy(size=CPU_COUNT),
            batch_size=SIZE,
            num_cpus=1,
        )
        for batch in found.iter_batches(batch_size=None, batch_format="numpy"):
            yield list(batch["prediction"])
    finally:
        ray.shutdown()


# --- Daft: https://docs.daft.ai/en/stable/custom-code/cls/


def with_daft(paths, weights, precision, engine):
    import daft
    from daft.pickle import cloudpickle

    with suppress(daft.exceptions.DaftCoreException):  # it is set already
        daft.set_runner_native()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its processes do not find this file

    @daft.cls(cpus=1, max_concurrency=CPU_COUNT, use_process=True)
    class DaftClassifier(Classifier):
        @daft.method.batch(return_dtype=str, batch_size=SIZE)
        def predict(self, paths):
            return self.of_paths(paths.to_pylist())

    frame = daft.from_pydict({"path": list(paths)}).into_batches(SIZE)
    classifier = DaftClassifier(weights, precision, engine)
    for part in frame.select(classifier.predict(daft.col("path")).alias("prediction")).iter_partitions():
        yield part.to_pydict()["prediction"]
