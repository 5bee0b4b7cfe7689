"""What a worker does to classify photos: it loads the model once, and decodes during the forward pass."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import pandas as pd
import torch
from torch import nn

from workshop_utils.photos import class_folder, read_files
from workshop_utils.precision import ieee_float32
from workshop_utils.predicting.engine import module_for
from workshop_utils.predicting.loaded_model import LoadedModel, Model, loaded_model, ready_model
from workshop_utils.reading.decode import BadPhoto, decode_photo

COLUMNS = ["path", "breed", "prediction", "probability", "correct", "error"]
TEXT = "str" if pd.Series(["text"]).dtype != object else "string"  # pandas 2 would write a missing value as "None"
TYPES = dict.fromkeys(COLUMNS, TEXT) | {"probability": "float64", "correct": "boolean"}
Row = tuple[str | float | bool | None, ...]  # a value of each column
# Photos of a forward pass. A CPU's caches hold the activations of 16: ResNet-50 takes 19 ms of a core a photo. With 32,
# it takes 26 ms.
CPU_FORWARD, GPU_FORWARD = 16, 256
Loaded = tuple[list[tuple[str, str]], torch.Tensor, list[str | None]]


class Classifier:
    """A model that names what photos show, for `daskrun.map_batches`."""

    def __init__(
        self,
        weights: str | os.PathLike = "auto",
        precision: str = "auto",
        engine: str = "auto",
        storage_options: dict | None = None,
        model: Callable[[], Model] | None = None,
        label_of: Callable[[str], str | None] | None = None,
    ) -> None:
        """Load the model; the arguments are those of `classify`."""
        self._loaded = ready_model(Model(*model()), precision) if model else loaded_model(weights, precision)
        self._engine, self._options, self._label_of = engine, storage_options, label_of
        self._decoders = ThreadPoolExecutor(torch.get_num_threads())

    def load(self, paths: Sequence[tuple[str, str]]) -> Loaded:
        """Return (paths, images, errors) of photos: see `load_photos`. paths: (as they're shown, as they're read)."""
        loaded, read = self._loaded, [path for _, path in paths]
        load: Callable = partial(load_photos, transform=loaded.transform, pool=self._decoders)
        if loaded.on_gpu and hasattr(loaded.transform, "resize_size"):  # one of torchvision's, which a GPU computes
            from workshop_utils.predicting.gpu_decode import load_on_gpu

            device = next(loaded.model.parameters()).device
            load = partial(load_on_gpu, transform=loaded.transform, device=device, load_others=load)
        images, errors = load(read_files(read, self._options), read)
        if torch.cuda.is_available() and not images.is_cuda:
            images = images.pin_memory()  # it's copied to the GPU without a stop
        return list(paths), images, errors

    def __call__(self, batch: Loaded) -> pd.DataFrame:
        """Return `classify`'s rows, and the model's checksum."""
        paths, images, errors = batch
        answers = self._forward(images) if len(images) else []
        frame = pd.DataFrame(self._rows(paths, errors, answers), columns=COLUMNS).astype(TYPES)
        return frame.assign(checksum=self._loaded.checksum)

    def _forward(self, images: torch.Tensor) -> Iterable[tuple[float, int]]:
        engine = "eager" if self._loaded.on_gpu else self._engine
        return _forward(module_for(engine, self._loaded.model, images[:CPU_FORWARD]), images)

    def _rows(
        self,
        paths: Sequence[tuple[str, str]],
        errors: Sequence[str | None],
        answers: Iterable[tuple[float, int]],
    ) -> list[Row]:
        """Return `classify`'s rows. answers: `_forward`'s, for each path without an error."""
        rows: list[Row] = []
        answers = iter(answers)
        for (path, read), error in zip(paths, errors, strict=True):
            breed, truth = _truth(read, self._loaded, self._label_of)
            probability, index = (0.0, 0) if error else next(answers)
            if math.isnan(probability):
                error = "the model's output for this photo is not a number (NaN): its weights may be damaged"
            if error:
                why = error.replace(read, path, 1)
                rows.append((_storable(path), _storable(breed), None, None, None, _storable(why)))
            else:
                correct = None if truth is None else index == truth
                rows.append(
                    (_storable(path), _storable(breed), self._loaded.categories[index], probability, correct, None)
                )
        return rows


def _truth(
    path: str, loaded: LoadedModel, label_of: Callable[[str], str | None] | None
) -> tuple[str | None, int | None]:
    """Return (the breed that a photo's path names, the category that it is), None for what isn't known."""
    folder = None if label_of else class_folder(path)
    name = label_of(path) if label_of else folder and "-".join(folder)
    truth = None if name is None else loaded.classes.label_of(name)
    if truth is not None:
        return loaded.categories[truth], truth  # in the spelling of the predictions
    return (folder[1] if folder else name), None


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
        except Exception as error:  # of a transform of one's own
            return None, f"{path}: {error!r}"

    loaded = list(pool.map(load, contents, paths))
    images = [image for image, _ in loaded if image is not None]
    return torch.stack(images) if images else torch.empty(0), [error for _, error in loaded]


@ieee_float32()
@torch.inference_mode()
def _forward(model: nn.Module, images: torch.Tensor) -> Iterable[tuple[float, int]]:
    """Return (probability, index of the category) of each image's likeliest category."""
    like = next(model.parameters(), torch.empty(0))  # OpenVINO's module has none: it takes float32, on the CPU
    images = images.to(like.device, non_blocking=True).to(like.dtype, memory_format=torch.channels_last)
    parts = images.split(GPU_FORWARD if images.is_cuda else CPU_FORWARD)
    logits = torch.cat([model(part) for part in parts]).float()  # (batch, n_categories)
    probabilities, indices = logits.softmax(1).max(1)
    return zip(probabilities.tolist(), indices.tolist(), strict=True)


def _storable(text: str | None) -> str | None:
    """Return a text as Parquet takes it: bytes in a file's name that are not UTF-8 are escaped."""
    return text if not text or text.isprintable() else text.encode(errors="backslashreplace").decode()
