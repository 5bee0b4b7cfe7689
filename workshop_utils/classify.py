"""Classify many photos on a Dask cluster: `daskrun.map_batches` with a ResNet, or a model of your own."""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial

import pandas as pd
from distributed import Client

from daskrun import map_batches
from daskrun.errors import check_client
from daskrun.settings import n_gpus
from workshop_utils.arguments import whole_number
from workshop_utils.checkpoint import WeightsError
from workshop_utils.precision import precision_of
from workshop_utils.predicting.classifier import COLUMNS, GPU_FORWARD, TYPES, Classifier
from workshop_utils.predicting.engine import ENGINES, WORTH_IT
from workshop_utils.predicting.loaded_model import Model
from workshop_utils.progress import bar
from workshop_utils.storage import absolute_address
from workshop_utils.weights import resolve_weights

# A task takes seconds: a lost worker costs little, and neither does the pause between two tasks.
CPU_BATCHES_PER_TASK, GPU_BATCHES_PER_TASK = 8, 32
CPU_AHEAD, GPU_AHEAD = 1, 3  # batches that are read and decoded during a forward pass


def classify(
    client: Client,
    paths: Iterable[str | os.PathLike],
    *,
    batch_size: int = 32,
    storage_options: dict | None = None,
    weights: str | os.PathLike = "auto",
    precision: str = "auto",
    engine: str = "auto",
    model: Callable[[], Model] | None = None,
    label_of: Callable[[str], str | None] | None = None,
) -> pd.DataFrame:
    """Classify images with a pretrained ResNet, or a model of your own, on every worker of a cluster.

    Rows keep the order of ``paths``. If a worker dies, its batches run again on another one. A bar shows how many
    photos are done. A Dask task may call this, too: it then leaves its worker's pool of threads, as by
    ``distributed.secede``.

    Args:
        client: A connected ``distributed.Client``.
        paths: Of files in any storages that the workers reach. A relative one is below this process's working folder.
        batch_size: Photos that a worker reads in one call; on a GPU, at least GPU_FORWARD.
        storage_options: What fsspec needs to open ``paths``; None for anonymous reading of s3:// without credentials.
        weights: As in `load_resnet`; a file must be readable from the workers, and a relative path is this process's.
        precision: "fp32", "bf16", or "auto" for bf16 where the worker is faster in it.
        engine: What computes forward passes on CPUs: "eager" for PyTorch's own kernels, or "openvino", which is faster
            and first converts the model, in seconds, in each worker's process. "auto" is OpenVINO for hundreds of
            photos and more for each thread of the cluster, where it's installed, if its logits for the first photos
            are within 0.1% of eager's largest one in fp32, and within 5% in bf16.
        model: A function that returns a `Model`, called once in each worker's process, instead of ``weights``.
        label_of: Returns the name of the class that a path shows, None if it isn't known; by default, the folder's
            WordNet id and name say so.

    Returns:
        A DataFrame with one row per path and the columns path; breed, from the folder's name or ``label_of``;
        prediction, the likeliest category; probability, in [0, 1]; correct, missing if no category of the model is the
        breed; error, missing or why a file could not be classified (the three before are then missing).

    Raises:
        WeightsError: If the weights can't be loaded, or differ between workers.
        ValueError: For an invalid argument.
        EngineError: For ``engine="openvino"``, if it isn't installed, can't compute the model, or disagrees.
        SchedulerLost: If the client is closed, also meanwhile, or its scheduler is lost.
        TypeError: If the client is asynchronous.

    >>> from tempfile import TemporaryDirectory
    >>> from workshop_utils.photos import list_photos
    >>> from workshop_utils.dogs.sketches import write_sketches
    >>> with TemporaryDirectory() as folder, Client(processes=False, dashboard_address="127.0.0.1:0") as client:
    ...     n_written = write_sketches(folder, per_breed=1, breeds=["boxer", "pug"])
    ...     frame = classify(client, list_photos(folder), weights="sketches")
    >>> frame.prediction.tolist(), frame.correct.tolist()
    (['boxer', 'pug'], [True, True])
    """
    stream = classify_stream(
        client,
        paths,
        batch_size=batch_size,
        storage_options=storage_options,
        weights=weights,
        precision=precision,
        engine=engine,
        model=model,
        label_of=label_of,
    )
    frames = []
    with bar(desc="classifying", total=len(paths) if isinstance(paths, Sized) else None, unit=" photos") as line:
        for frame in stream:
            frames.append(frame)
            line.update(len(frame))
    return pd.concat(frames or [pd.DataFrame([], columns=COLUMNS).astype(TYPES)], ignore_index=True)


def classify_stream(
    client: Client,
    paths: Iterable[str | os.PathLike],
    *,
    batch_size: int = 32,
    storage_options: dict | None = None,
    weights: str | os.PathLike = "auto",
    precision: str = "auto",
    engine: str = "auto",
    model: Callable[[], Model] | None = None,
    label_of: Callable[[str], str | None] | None = None,
) -> Iterator[pd.DataFrame]:
    """Return an iterator over `classify`'s rows, in the order of ``paths``: the DataFrame of each task, once it's done.

    All frames have the same types of columns, so that one file, such as Parquet, takes them all. Memory stays flat,
    however many paths there are, and ``paths`` may be a generator. The arguments are `classify`'s; an invalid one
    raises ValueError at once. An error, an interrupt and ``close()`` of the iterator free the workers.
    """
    check_client(client)
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise ValueError(f"paths is the single path {str(paths)!r}: give a list of paths.")
    batch_size = whole_number("batch_size", batch_size, 1)
    precision_of(precision)  # raises ValueError for an unknown one
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}: write one of {', '.join(ENGINES)}.")
    photos: Iterator[str] = (os.fspath(path) if isinstance(path, os.PathLike) else str(path) for path in paths)
    on_gpu = any(client.run(_sees_gpu, on_error="ignore").values())
    if engine == "openvino" and on_gpu:
        raise ValueError("engine is 'openvino', which is for CPUs, but a worker has a GPU: write 'auto'.")
    if (
        engine == "auto"
        and isinstance(paths, Sized)
        and len(paths) < WORTH_IT * max(sum(client.nthreads().values()), 1)
    ):
        engine = "eager"
    make = partial(
        Classifier, resolve_weights(weights), precision, engine, storage_options, model=model, label_of=label_of
    )
    frames = map_batches(
        client,
        make,
        ((path, absolute_address(path)) for path in photos),
        batch_size=max(batch_size, GPU_FORWARD) if on_gpu else batch_size,
        batches_per_task=GPU_BATCHES_PER_TASK if on_gpu else CPU_BATCHES_PER_TASK,
        ahead=GPU_AHEAD if on_gpu else CPU_AHEAD,
        progress=False,
    )
    return _of_one_model(frames)


def _of_one_model(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Yield frames without their checksums; raise WeightsError where these differ."""
    checksums: set[int] = set()
    for frame in frames:
        checksums |= set(frame.checksum)
        if len(checksums) > 1:
            raise WeightsError(
                "The workers had different weights: their file was replaced meanwhile, or is another one on some "
                "machines; or model= draws weights at random. Call classify again, with a file that all workers "
                "share, and a seed in model=."
            )
        yield frame.drop(columns="checksum")


# --- on a worker


async def _sees_gpu() -> bool:
    return bool(await asyncio.to_thread(n_gpus))  # a worker's event loop goes on while PyTorch is imported
