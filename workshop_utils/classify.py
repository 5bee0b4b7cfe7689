"""Classify many photos on a Dask cluster: each worker loads the model once, and decodes during the forward pass."""

import math
import os
import threading
import unicodedata
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import chain, islice, pairwise

import pandas as pd
import torch
from distributed import Client, Future
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from daskrun.errors import SchedulerLost, check_client
from daskrun.settings import known_workers
from workshop_utils.checkpoint import WeightsError
from workshop_utils.decode import load_on_cpu, load_on_gpu
from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.int8 import Calibration, calibrated, for_calibration
from workshop_utils.photos import IN_BREED, read_files
from workshop_utils.precision import PRECISIONS, ieee_float32, precision_of
from workshop_utils.progress import bar
from workshop_utils.storage import address_for_workers, path_text, version_of
from workshop_utils.weights import IMAGENET_WEIGHTS, load_resnet, named_weights, resolve_weights

COLUMNS = ["path", "breed", "prediction", "probability", "correct", "error"]
TEXT = "str" if pd.Series(["text"]).dtype != object else "string"  # pandas 2 would write a missing value as "None"
TYPES = dict.fromkeys(COLUMNS, TEXT) | {"probability": "float64", "correct": "boolean"}
# A task takes seconds: a lost worker costs little, and neither does the pause between two tasks.
CPU_BATCHES_PER_TASK, GPU_BATCHES_PER_TASK = 8, 256
# Photos of a forward pass. A CPU's caches hold the activations of 16: ResNet-50 takes 19 ms of a core a photo. With 32,
# it takes 26 ms.
CPU_FORWARD, GPU_FORWARD = 16, 256
CPU_AHEAD, GPU_AHEAD = 1, 3  # batches that are read or decoded during a forward pass
TASKS_PER_THREAD = 4  # tasks on the cluster at a time: while the next one in order takes long, other threads have work
_loading = threading.Lock()


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
    missing if no category of the model is the folder's breed, by its WordNet id, its name, or ImageNet's name for it;
    error, missing or why a file could not be classified (prediction, probability and correct are then missing).

    batch_size: photos that a worker reads in one call. A forward pass takes CPU_FORWARD or GPU_FORWARD of them.
    storage_options: what fsspec needs to open `paths`; None for anonymous reading of s3:// without credentials.
    weights: as in `load_resnet`; a file must be readable from the workers, and a relative path is this process's, too.
    precision: "fp32", "bf16", or "auto" for bf16 where the worker is faster in it; or "int8", on CPUs, for which each
    worker first calibrates the model with 32 of the photos, spread evenly over `paths`, or the first ones of a
    generator. A few predictions differ; more may if these photos are unlike the others.
    Raises what loading the weights raises, WeightsError if workers had different weights, ValueError if none of the
    photos for calibration can be read, SchedulerLost if the client is closed, also meanwhile, or its scheduler is lost,
    TypeError if it is asynchronous. A worker that dies costs time, but no rows: Dask runs its batches again. A bar
    shows how many photos are done.

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
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}: give a whole number of at least 1.")
    precision_of(precision, (*PRECISIONS, "int8"))  # raises ValueError for an unknown one
    photos: Iterator[str] = (path_text(path) if isinstance(path, os.PathLike) else str(path) for path in paths)
    on_gpu = any("gpu" in about for about in known_workers(client).values())
    calibration = None
    if precision == "int8":
        if on_gpu:
            raise ValueError("precision is 'int8', which is for CPUs, but a worker has a GPU: write 'auto'.")
        spread, photos = for_calibration(photos, isinstance(paths, Sized))
        calibration = Calibration(uuid.uuid4().hex, list(map(address_for_workers, spread)))
    batches = iter(lambda: list(islice(photos, batch_size)), [])
    tasks = split_guided(batches, _n_threads(client), GPU_BATCHES_PER_TASK if on_gpu else CPU_BATCHES_PER_TASK)
    submit = partial(
        client.submit,
        classify_batches,
        pure=False,
        weights=resolve_weights(weights),
        precision=precision,
        storage_options=storage_options,
        calibration=calibration,
    )
    return _frames(client, lambda task: submit([list(map(address_for_workers, part)) for part in task]), tasks, weights)


def classify_batches(
    batches: list[list[str]],
    *,
    weights: str = "auto",
    precision: str = "auto",
    storage_options: dict | None = None,
    calibration: Calibration | None = None,
) -> tuple[int, list[tuple]]:
    """Return (checksum of the weights, `classify`'s rows) for lists of paths, from this process.

    Later lists are decoded during a forward pass.
    calibration: for "int8", the photos with which the model is calibrated: once in a call of `classify`.
    Raises what loading the weights raises, and in int8 ValueError if no photo for calibration can be read.
    """
    if precision == "int8":
        checksum, (model, transform, categories) = _loaded_in_int8(weights, calibration, storage_options)
    else:
        checksum, (model, transform, categories) = loaded_with_checksum(weights, precision)
    on_gpu, rows, truths = is_on_gpu(model), [], _truths(categories)
    if on_gpu:  # fewer and larger batches
        photos = list(chain.from_iterable(batches))
        batches = [photos[start : start + GPU_FORWARD] for start in range(0, len(photos), GPU_FORWARD)]
    with (
        ThreadPoolExecutor(1) as reader,
        ThreadPoolExecutor(1) as decoder,
        ThreadPoolExecutor(torch.get_num_threads()) as pool,
    ):
        load = partial(load_on_gpu, device=next(model.parameters()).device) if on_gpu else load_on_cpu

        def start(paths):
            contents = reader.submit(read_files, paths, storage_options)
            return decoder.submit(lambda: load(contents.result(), paths, transform, pool))

        loaded = _started_ahead(start, batches, GPU_AHEAD if on_gpu else CPU_AHEAD)
        for paths, (images, errors) in zip(batches, loaded, strict=True):
            # images: (photos that could be read, 3, 224, 224)
            rows += _rows(paths, errors, _forward(model, images) if len(images) else [], categories, truths)
    return checksum, rows


def loaded_model(weights: str = "auto", precision: str = "auto") -> tuple[nn.Module, Callable, list[str]]:
    """Return `load_resnet`'s (model, transform, categories) ready for this process.

    The first call loads, and the first after the weights' file was replaced.
    model: on the GPU if there is one, channels-last, each BatchNorm folded into the convolution before it. Its images
    need the device and the dtype of its parameters.
    """
    return loaded_with_checksum(weights, precision_of(precision))[1]


def loaded_with_checksum(
    weights: str = "auto", precision: str = "auto"
) -> tuple[int, tuple[nn.Module, Callable, list[str]]]:
    """Return (checksum of the weights, what `loaded_model` returns)."""
    name = named_weights(weights)
    version = None if name in ("auto", "imagenet", "sketches") else version_of(name)
    kind = precision if precision == "int8" else precision_of(precision)
    with _loading:  # otherwise two threads of a worker would both load
        return _load_model(name, kind, version)


def _loaded_in_int8(weights, calibration, storage_options):
    """Return what `loaded_with_checksum` does, the model in int8; the checksum is also that of the photos."""
    checksum, (model, transform, categories) = loaded_with_checksum(weights, "int8")
    try:
        checksum, model = calibrated(model, checksum, transform, calibration, storage_options)
    except WeightsError as error:
        raise WeightsError(f"{weights!r} cannot be used: {error} Save or download them again.") from error
    return checksum, (model, transform, categories)


def split_guided(batches: Iterable, n_threads: int, longest: int = CPU_BATCHES_PER_TASK) -> Iterator[list]:
    """Yield `batches` as consecutive tasks: long ones first, single batches last, so that threads end together.

    longest: how many batches a task has at most. At most 2 * n_threads * longest batches are taken ahead: by these we
    know where the last, shorter tasks begin.

    >>> [len(task) for task in split_guided(range(20), n_threads=2)]
    [5, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1]
    """
    left = iter(batches)
    ahead = deque(islice(left, 2 * n_threads * longest))
    while ahead:
        size = min(max(len(ahead) // (2 * n_threads), 1) if n_threads > 1 else len(ahead), longest)
        yield [ahead.popleft() for _ in range(size)]
        ahead.extend(islice(left, size))


def _n_threads(client):
    return sum(client.nthreads().values()) or 1  # the only worker may be restarting


def _frames(client, start, tasks, weights):
    """Yield a DataFrame for each task, in order, while those after it run.

    start: called with a task, it returns a Future of what `classify_batches` returns. weights: as given, for errors.
    """
    running: deque[tuple[list[str], Future]] = deque()
    checksums = set()
    try:
        for task in chain(tasks, [None]):
            if task:
                running.append((list(chain(*task)), start(task)))
            # Count the threads again: workers come and go.
            while running and (task is None or len(running) > TASKS_PER_THREAD * _n_threads(client)):
                paths, future = running[0]
                checksum, rows = future.result()
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
        if isinstance(error, WeightsError) and weights != "auto":
            raise type(error)(str(error).replace(repr(resolve_weights(weights)), repr(str(weights)))) from error
        raise
    finally:
        if client.status == "running":  # a closed one refuses, and its scheduler has cancelled them
            client.cancel([future for _, future in running])  # frees the workers after an error or Ctrl-C


@lru_cache(maxsize=2)
def _load_model(weights, precision, version):
    """Load for "bf16", "fp32", or in float32 on the CPU what `to_int8` takes."""
    model, transform, categories = load_resnet(weights)
    checksum = zlib.crc32(repr((model.about, categories)).encode())
    for tensor in model.state_dict().values():
        checksum = zlib.crc32(tensor.numpy().tobytes(), checksum)
    if precision == "int8":
        return checksum, (model, transform, categories)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    _fold_batch_norms(model)
    return checksum, (model.to(device, dtype).to(memory_format=torch.channels_last), transform, categories)


def _fold_batch_norms(model):
    """Multiply each BatchNorm of a ResNet into the convolution before it.

    torch.fx has a function for it, which would break forward passes in other threads meanwhile.
    """
    for module in list(model.modules()):
        for (name, before), (after, norm) in pairwise(list(module.named_children())):
            if isinstance(before, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(before, norm))
                setattr(module, after, nn.Identity())


def is_on_gpu(model: nn.Module) -> bool:
    """Return whether a model is on a GPU, which then decodes its photos, too."""
    return any(parameter.is_cuda for parameter in model.parameters())  # a model in int8 has none


def _started_ahead(start, items, n_ahead):
    """Yield the result of start(item), a future, for each item in order, once the next `n_ahead` are started, too."""
    futures: deque = deque()
    for item in items:
        futures.append(start(item))
        if len(futures) > n_ahead:
            yield futures.popleft().result()
    while futures:
        yield futures.popleft().result()


@ieee_float32()
@torch.inference_mode()
def _forward(model, images):
    like = next(model.parameters(), torch.empty(0))  # a model in int8 has none: it takes float32, on the CPU
    images = images.to(like.device, like.dtype, memory_format=torch.channels_last)
    parts = [images] if images.is_cuda else images.split(CPU_FORWARD)
    logits = torch.cat([model(part) for part in parts]).float()  # (batch, n_categories)
    probabilities, indices = logits.softmax(1).max(1)
    return zip(probabilities.tolist(), indices.tolist(), strict=True)


def _truths(categories):
    """Return {WordNet id or plain name of a breed: index among these categories}; ImageNet has names of its own.

    Of two categories with one name, the first counts: ImageNet's Cardigan is a dog before it is a garment.
    """
    truths: dict[str, int] = {}
    for index, name in enumerate(categories):
        if plain := _plain(name):
            truths.setdefault(plain, index)
    for breed in BREEDS:
        of_imagenet = IMAGENET_WEIGHTS.meta["categories"][breed.index]
        names = map(_plain, (breed.wnid, breed.folder, breed.name, of_imagenet))
        if known := [truths[name] for name in names if name in truths]:
            truths[breed.wnid] = known[0]
    return truths


def _plain(name):
    """Return a breed's name without what its writers do not agree on.

    >>> _plain("German short-haired_pointer")
    'germanshorthairedpointer'
    """
    return "".join(character for character in unicodedata.normalize("NFKD", name.lower()) if character.isalnum())


def _rows(paths, errors, results, categories, truths):
    """Return `classify`'s rows. results: an iterable of (probability, index) for each path without an error."""
    rows: list[tuple] = []
    results = iter(results)
    for path, error in zip(paths, errors, strict=True):
        folder = IN_BREED.fullmatch(path)
        wnid, breed = folder.groups() if folder else (None, None)
        truth = truths.get(wnid, truths.get(_plain(breed))) if folder else None
        if truth is not None:
            breed = categories[truth]  # in the spelling of the predictions
        probability, index = (0.0, 0) if error else next(results)
        if math.isnan(probability):
            error = "the model's output for this photo is not a number (NaN): its weights may be damaged"
        if error:
            rows.append((path, breed, None, None, None, error))
        else:
            correct = None if truth is None else index == truth
            rows.append((path, breed, categories[index], probability, correct, None))
    return rows


def _frame(paths, rows):
    """Return a DataFrame of rows. paths: as they were given; its errors name these, not the ones that workers read."""
    # The client's own strings take no memory again; those from a worker are copies.
    shown = [
        (_storable(path), _storable(breed), *others, _storable(error and error.replace(there, path, 1)))
        for path, (there, breed, *others, error) in zip(paths, rows, strict=True)
    ]
    return pd.DataFrame(shown, columns=COLUMNS).astype(TYPES)


def _storable(text):
    """Return a text as Parquet takes it: bytes in a file's name that are not UTF-8 are escaped."""
    return text if not text or text.isprintable() else text.encode(errors="backslashreplace").decode()
