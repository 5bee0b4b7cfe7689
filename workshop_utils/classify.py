"""Classify many photos on a Dask cluster: each worker loads the model once, and decodes during the forward pass."""

import asyncio
import math
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures import Future as FutureOfThread
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import pandas as pd
import torch
from distributed import Client, Future, secede
from torch import nn

from daskrun.errors import SchedulerLost, check_client
from daskrun.settings import n_gpus
from workshop_utils.arguments import whole_number
from workshop_utils.checkpoint import WeightsError
from workshop_utils.cluster import result_of
from workshop_utils.photos import class_folder, read_files
from workshop_utils.precision import PRECISIONS, ieee_float32, precision_of
from workshop_utils.predicting.loaded_model import LoadedModel, loaded_model
from workshop_utils.progress import bar
from workshop_utils.reading.decode import BadPhoto, decode_photo
from workshop_utils.storage import absolute_address
from workshop_utils.weights import resolve_weights

if TYPE_CHECKING:
    from workshop_utils.predicting.int8 import Calibration

COLUMNS = ["path", "breed", "prediction", "probability", "correct", "error"]
TEXT = "str" if pd.Series(["text"]).dtype != object else "string"  # pandas 2 would write a missing value as "None"
TYPES = dict.fromkeys(COLUMNS, TEXT) | {"probability": "float64", "correct": "boolean"}
Row = tuple[str, str | None, str | None, float | None, bool | None, str | None]  # a value of each column
# A task takes seconds: a lost worker costs little, and neither does the pause between two tasks.
CPU_BATCHES_PER_TASK, GPU_BATCHES_PER_TASK = 8, 256
# Photos of a forward pass. A CPU's caches hold the activations of 16: ResNet-50 takes 19 ms of a core a photo. With 32,
# it takes 26 ms.
CPU_FORWARD, GPU_FORWARD = 16, 256
CPU_AHEAD, GPU_AHEAD = 1, 3  # batches that are read or decoded during a forward pass
TASKS_PER_THREAD = 4  # tasks on the cluster at a time: while the next one in order takes long, other threads have work


def classify(
    client: Client,
    paths: Iterable[str | os.PathLike],
    *,
    batch_size: int = 32,
    storage_options: dict | None = None,
    weights: str | os.PathLike = "auto",
    precision: str = "auto",
) -> pd.DataFrame:
    """Return a DataFrame with one row per path, in the order given: what a pretrained ResNet sees in each photo.

    paths: of files in any storages that the workers reach. A relative one is below this process's working directory.
    Columns: path; breed, from the folder's name; prediction, the likeliest category; probability, in [0, 1]; correct,
    missing if no category of the model is the folder's breed, by its WordNet id or its name; error, missing or why a
    file could not be classified (prediction, probability and correct are then missing).

    batch_size: photos that a worker reads in one call. A forward pass takes CPU_FORWARD or GPU_FORWARD of them.
    storage_options: what fsspec needs to open `paths`; None for anonymous reading of s3:// without credentials.
    weights: as in `load_resnet`; a file must be readable from the workers, and a relative path is this process's, too.
    precision: "fp32", "bf16", or "auto" for bf16 where the worker is faster in it; or "int8", on CPUs, for which each
    worker first calibrates the model with 32 of the photos, spread evenly over `paths`, or the first ones of a
    generator. A few predictions differ; more may if these photos are unlike the others. How much faster
    it is depends on the processor: most with VNNI or AMX; with AVX2 alone, perhaps not at all.
    Raises what loading the weights raises, WeightsError if workers had different weights, ValueError if none of the
    photos for calibration can be read, SchedulerLost if the client is closed, also meanwhile, or its scheduler is lost,
    TypeError if it is asynchronous. A worker that dies costs time, but no rows: Dask runs its batches again. A bar
    shows how many photos are done. A Dask task may call this, too: it then leaves its worker's pool of threads, as by
    `distributed.secede`.

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
        client, paths, batch_size=batch_size, storage_options=storage_options, weights=weights, precision=precision
    )
    frames = []
    with bar(desc="classifying", total=len(paths) if isinstance(paths, Sized) else None, unit=" photos") as line:
        for frame in stream:
            frames.append(frame)
            line.update(len(frame))
    return pd.concat(frames or [_frame([], [])], ignore_index=True)


def classify_stream(
    client: Client,
    paths: Iterable[str | os.PathLike],
    *,
    batch_size: int = 32,
    storage_options: dict | None = None,
    weights: str | os.PathLike = "auto",
    precision: str = "auto",
) -> Iterator[pd.DataFrame]:
    """Return an iterator over `classify`'s rows, in the order of `paths`: the DataFrame of each task, once it is done.

    All frames have the same types of columns, so that one file, such as Parquet, takes them all.
    Memory stays flat, however many paths there are, and `paths` may be a generator: no more are taken from it, and no
    more tasks given to the cluster, than keep the workers busy while you use a frame. The arguments are `classify`'s.
    An error, an interrupt and `close()` of the iterator free the workers.
    Raises ValueError at once for an argument that cannot be, and later what loading the weights raises.
    """
    check_client(client)
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise ValueError(f"paths is the single path {str(paths)!r}: give a list of paths.")
    batch_size = whole_number("batch_size", batch_size, 1)
    precision_of(precision, (*PRECISIONS, "int8"))  # raises ValueError for an unknown one
    photos: Iterator[str] = (os.fspath(path) if isinstance(path, os.PathLike) else str(path) for path in paths)
    on_gpu = any(client.run(_sees_gpu, on_error="ignore").values())
    _leave_the_pool()
    calibration = None
    if precision == "int8":
        if on_gpu:
            raise ValueError("precision is 'int8', which is for CPUs, but a worker has a GPU: write 'auto'.")
        from workshop_utils.predicting.int8 import Calibration, choose_for_calibration

        chosen, photos = choose_for_calibration(photos, all_at_hand=isinstance(paths, Sized))
        calibration = Calibration(uuid.uuid4().hex, list(map(absolute_address, chosen)), storage_options)
    batches = iter(lambda: list(islice(photos, batch_size)), [])
    tasks = _tasks(batches, _n_threads(client), GPU_BATCHES_PER_TASK if on_gpu else CPU_BATCHES_PER_TASK)
    submit = partial(
        client.submit,
        classify_batches,
        pure=False,
        weights=resolve_weights(weights),
        precision=precision,
        storage_options=storage_options,
        calibration=calibration,
    )
    return _frames(client, lambda task: submit([list(map(absolute_address, batch)) for batch in task]), tasks)


def _leave_the_pool() -> None:
    """Let a Dask task that calls this give its thread back, as the photos may need it; without a task do nothing."""
    with suppress(ValueError, AttributeError, KeyError):  # in no task, in none with a thread, or it has left before
        secede()


def _tasks(batches: Iterable[list[str]], n_threads: int, longest: int) -> Iterator[list[list[str]]]:
    """Yield `batches` as consecutive tasks: long ones first, single batches last, so that threads end together.

    longest: how many batches a task has at most. At most 2 * n_threads * longest batches are taken ahead: by these we
    know where the last, shorter tasks begin.

    >>> [len(task) for task in _tasks([["a.jpg"]] * 20, n_threads=2, longest=8)]
    [5, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1]
    """
    left = iter(batches)
    ahead = deque(islice(left, 2 * n_threads * longest))
    while ahead:
        size = min(max(len(ahead) // (2 * n_threads), 1) if n_threads > 1 else len(ahead), longest)
        yield [ahead.popleft() for _ in range(size)]
        ahead.extend(islice(left, size))


def _n_threads(client: Client) -> int:
    return sum(client.nthreads().values()) or 1  # the only worker may be restarting


def _frames(
    client: Client, submit: Callable[[list[list[str]]], Future], tasks: Iterable[list[list[str]]]
) -> Iterator[pd.DataFrame]:
    """Yield a DataFrame for each task, in order, while those after it run.

    submit: called with a task, it returns a Future of what `classify_batches` returns.
    """
    running: deque[tuple[list[str], Future]] = deque()
    checksums, warned = set(), set[str]()
    try:
        for task in chain(tasks, [None]):
            if task:
                running.append((list(chain(*task)), submit(task)))
            # Count the threads again: workers come and go.
            while running and (task is None or len(running) > TASKS_PER_THREAD * _n_threads(client)):
                paths, future = running[0]
                checksum, rows = result_of(client, future, warned)
                checksums.add(checksum)
                if len(checksums) > 1:
                    raise WeightsError(
                        "The workers had different weights, or in int8 other photos to calibrate with: a file was "
                        "replaced meanwhile, is another one on some machines, or could not be read by all. Call "
                        "classify again, with files that all workers share."
                    )
                frame = _frame(paths, rows)
                running.popleft()
                yield frame
    except Exception as error:  # each call of a closed client raises an error of another type
        if client.status != "running":
            raise SchedulerLost(
                f"The scheduler is lost or the client was closed (it is {client.status}): start or join a cluster, and "
                "classify the paths that have no row yet."
            ) from error
        raise
    finally:
        if client.status == "running":  # a closed one refuses, and its scheduler has cancelled them
            client.cancel([future for _, future in running])  # frees the workers after an error or Ctrl-C


def _frame(paths: Sequence[str], rows: Sequence[Row]) -> pd.DataFrame:
    """Return a DataFrame of rows. paths: as they were given; its errors name these, not the ones that workers read."""
    # The client's own strings take no memory again; those from a worker are copies.
    shown = [
        (_storable(path), _storable(breed), *others, _storable(error and error.replace(read, path, 1)))
        for path, (read, breed, *others, error) in zip(paths, rows, strict=True)
    ]
    return pd.DataFrame(shown, columns=COLUMNS).astype(TYPES)


def _storable(text: str | None) -> str | None:
    """Return a text as Parquet takes it: bytes in a file's name that are not UTF-8 are escaped."""
    return text if not text or text.isprintable() else text.encode(errors="backslashreplace").decode()


# --- on a worker


def classify_batches(
    batches: list[list[str]],
    *,
    weights: str = "auto",
    precision: str = "auto",
    storage_options: dict | None = None,
    calibration: "Calibration | None" = None,
) -> tuple[int, list[Row]]:
    """Return (`LoadedModel.checksum`, `classify`'s rows) for lists of paths, from this process.

    Later lists are decoded during a forward pass.
    Raises what `loaded_model` raises, whose arguments the others are.
    """
    loaded = loaded_model(weights, precision, calibration)
    rows: list[Row] = []
    if loaded.on_gpu:  # fewer and larger batches
        photos = list(chain.from_iterable(batches))
        batches = [photos[start : start + GPU_FORWARD] for start in range(0, len(photos), GPU_FORWARD)]
    with (
        ThreadPoolExecutor(1) as reader,
        ThreadPoolExecutor(1) as decoder,
        ThreadPoolExecutor(torch.get_num_threads()) as pool,
    ):
        load: Callable = partial(load_photos, transform=loaded.transform, pool=pool)
        if loaded.on_gpu:
            from workshop_utils.predicting.gpu_decode import load_on_gpu

            device = next(loaded.model.parameters()).device
            load = partial(load_on_gpu, transform=loaded.transform, device=device, load_others=load)

        def read_and_decode(paths: list[str]) -> FutureOfThread:
            contents = reader.submit(read_files, paths, storage_options)
            # In this task's context, by which a warning reaches the client.
            return decoder.submit(copy_context().run, lambda: load(contents.result(), paths))

        images_and_errors = _results_ahead(read_and_decode, batches, GPU_AHEAD if loaded.on_gpu else CPU_AHEAD)
        for paths, (images, errors) in zip(batches, images_and_errors, strict=True):
            # images: (photos that could be read, 3, 224, 224)
            answers = _forward(loaded.model, images) if len(images) else []
            rows += _rows(paths, errors, answers, loaded)
    return loaded.checksum, rows


def _results_ahead(start: Callable[[list[str]], FutureOfThread], batches: list[list[str]], n_ahead: int) -> Iterator:
    """Yield the result of start(batch), a future, for each batch in order, once the next `n_ahead` are started, too."""
    futures: deque[FutureOfThread] = deque()
    for batch in batches:
        futures.append(start(batch))
        if len(futures) > n_ahead:
            yield futures.popleft().result()
    while futures:
        yield futures.popleft().result()


def load_photos(
    contents: Sequence[bytes | Exception], paths: Sequence[str], transform: Callable, pool: Executor
) -> tuple[torch.Tensor, list[str | None]]:
    """Return (images, errors): the images of the photos that can be read; for each path None, or why it cannot be read.

    contents: from `photos.read_files`. transform: from `load_resnet`. pool: threads that decode.
    images: (n, 3, 224, 224) float32.
    """

    def load(content: bytes | Exception, path: str) -> tuple[torch.Tensor | None, str | None]:
        try:
            return transform(decode_photo(content, path)), None
        except BadPhoto as error:
            return None, str(error)

    loaded = list(pool.map(load, contents, paths))
    images = [image for image, _ in loaded if image is not None]
    return torch.stack(images) if images else torch.empty(0), [error for _, error in loaded]


@ieee_float32()
@torch.inference_mode()
def _forward(model: nn.Module, images: torch.Tensor) -> Iterable[tuple[float, int]]:
    """Return (probability, index of the category) of each image's likeliest category."""
    like = next(model.parameters(), torch.empty(0))  # a model in int8 has none: it takes float32, on the CPU
    images = images.to(like.device, like.dtype, memory_format=torch.channels_last)
    parts = [images] if images.is_cuda else images.split(CPU_FORWARD)
    logits = torch.cat([model(part) for part in parts]).float()  # (batch, n_categories)
    probabilities, indices = logits.softmax(1).max(1)
    return zip(probabilities.tolist(), indices.tolist(), strict=True)


def _rows(
    paths: Sequence[str], errors: Sequence[str | None], answers: Iterable[tuple[float, int]], loaded: LoadedModel
) -> list[Row]:
    """Return `classify`'s rows. answers: `_forward`'s, for each path without an error."""
    rows: list[Row] = []
    answers = iter(answers)
    for path, error in zip(paths, errors, strict=True):
        folder = class_folder(path)
        breed = folder[1] if folder else None
        truth = loaded.classes.label_of("-".join(folder)) if folder else None
        if truth is not None:
            breed = loaded.categories[truth]  # in the spelling of the predictions
        probability, index = (0.0, 0) if error else next(answers)
        if math.isnan(probability):
            error = "the model's output for this photo is not a number (NaN): its weights may be damaged"
        if error:
            rows.append((path, breed, None, None, None, error))
        else:
            correct = None if truth is None else index == truth
            rows.append((path, breed, loaded.categories[index], probability, correct, None))
    return rows


async def _sees_gpu() -> bool:
    return bool(await asyncio.to_thread(n_gpus))  # a worker's event loop goes on while PyTorch is imported
