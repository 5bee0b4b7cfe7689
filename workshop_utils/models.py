"""Load a ResNet with the transform and the categories that its weights were trained with."""

import errno
import os
import pickle
import re
import threading
import time
import zipfile
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from io import BytesIO
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory

import torch
from fsspec.implementations.local import LocalFileSystem
from torch.serialization import get_unsafe_globals_in_checkpoint
from torchvision.models import ResNet, ResNet50_Weights, get_model

from workshop_utils.storage import open_fresh, weights_setting, whole_file

SKETCH_WEIGHTS = Path(__file__).parent / "weights" / "resnet18_sketches.pt"  # by tools/train_sketch_weights.py
IMAGENET_WEIGHTS = ResNet50_Weights.IMAGENET1K_V2
ABOUT = ("arch", "stride_in_1x1", "size", "categories")  # of a checkpoint, beside weights and their number of classes
STALLED_S = 20  # a download that brings nothing for so long is given up
# What DistributedDataParallel and torch.compile put into a weight's name.
WRAPPER = re.compile(r"(?<![^.])(?:module|_orig_mod)\.")
IN_ALL_RESNETS = ("conv1.weight",)  # a weight's name
CONVERT = (
    "Convert them before you save: `.item()` of a NumPy number, `torch.as_tensor` of an array, `str` of a path, `vars` "
    "of a Namespace. If you trust the file, `torch.load(path, weights_only=False)` reads it"
)


class WeightsError(RuntimeError):
    """Weights cannot be loaded; the message says which, why, and what to do."""


class NoCheckpoint(WeightsError):
    """A file can be read, and is no whole checkpoint."""


def load_resnet(weights: str | os.PathLike = "auto") -> tuple[ResNet, Callable, list[str]]:
    """Return (model, transform, categories) of a pretrained ResNet, in eval mode on the CPU.

    weights: "auto" takes WORKSHOP_WEIGHTS if it is set, else torchvision's ImageNet weights; "imagenet" takes these,
    from torchvision's cache or by its download; "sketches" the ResNet-18 trained on sketches that comes with the
    workshop; anything else is the path or address of a checkpoint file, a dict with `arch`,
    `num_classes`, `state_dict`; perhaps `categories`; `stride_in_1x1` for a ResNet v1; `size`, the pixels that the
    shorter side is resized to (256 if absent) before the middle 224, or all if there are fewer, are cut out.

    transform: from an RGB `PIL.Image` to a normalised (3, 224, 224) float32 tensor, smaller if `size` is.
    categories: the model's category names; a logit's position is its index. The model carries what a checkpoint of it
    has to say in `model.about`: a dict with `arch`, and `stride_in_1x1`, `size`, `categories` if they apply.
    Raises WeightsError, also if ImageNet's weights cannot be downloaded; a download ends if nothing comes for 20 s.
    """
    name = resolve_weights(weights)
    checkpoint = _imagenet() if name == "imagenet" else load_checkpoint(SKETCH_WEIGHTS if name == "sketches" else name)
    model, categories = _build(checkpoint, name)
    model.about = {name: checkpoint[name] for name in ABOUT if name in checkpoint}
    size = checkpoint.get("size", 256)
    transform = IMAGENET_WEIGHTS.transforms(resize_size=size, crop_size=min(size, 224))
    return model.eval(), transform, categories


def resolve_weights(weights: str | os.PathLike = "auto") -> str:
    """Return "imagenet", "sketches", or a checkpoint's address: what `load_resnet(weights)` will load."""
    return "imagenet" if (named := named_weights(weights)) == "auto" else named


def named_weights(weights: str | os.PathLike = "auto") -> str:
    """Return "auto", "imagenet", "sketches", or the address of a checkpoint, which may be that of WORKSHOP_WEIGHTS.

    A local path is absolute, as a process in another folder may load it. Raises WeightsError for what is no address.
    """
    try:
        return weights_setting(weights if str(weights) != "auto" else None) or "auto"
    except ValueError as error:
        raise WeightsError(f"weights cannot be loaded: {error}") from error


def with_new_head(model: ResNet, n_classes: int) -> ResNet:
    """Replace the classifier `fc` of a ResNet by a new one for `n_classes`, drawn from torch's seed; return `model`.

    >>> with_new_head(get_model("resnet18"), 12).fc
    Linear(in_features=512, out_features=12, bias=True)
    """
    model.fc = torch.nn.Linear(model.fc.in_features, n_classes).to(model.fc.weight.device)
    getattr(model, "about", {}).pop("categories", None)  # those of the old head
    return model


def save_checkpoint(path: str | os.PathLike, /, put_aside: Callable[[], None] = lambda: None, **values: object) -> None:
    """Write `values` (tensors, numbers, strings, dicts and lists of them) to `path`: whole or not at all.

    path: a local path, or an address, protocol://…, such as "s3://…"; fsspec takes what it needs there, such as
    an endpoint, from the environment. put_aside: called when all is written, just before it replaces what is at `path`.
    Raises OSError, for example where the disk is full, and NoCheckpoint for a value that could not be read again.
    """
    fs, key = open_fresh(path)
    local = isinstance(fs, LocalFileSystem)
    place = nullcontext("") if local else TemporaryDirectory()
    try:
        with place as folder, whole_file(Path(folder, key if local else "checkpoint.pt")) as part:
            with part.open("wb") as file:
                torch.save(values, file)
            with part.open("rb") as file:
                _read(file, str(path))  # refuses now what could not be read later
            put_aside()
            if not local:
                fs.put_file(str(part), key)  # an object store shows a file once all of it is there
    except (RuntimeError, OSError) as error:
        # A full disk, of which PyTorch may say "unexpected pos"; or an error that names the file that is gone by now.
        why = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(why, OSError) and why.errno and (not why.filename or str(why.filename).endswith(".part")):
            raise OSError(why.errno, why.strerror, str(path)) from error
        raise


def load_checkpoint(path: str | os.PathLike) -> dict:
    """Return the dict in a checkpoint file, on the CPU, without running any code that the file may hold.

    path: as in `storage.absolute_address`.
    Raises NoCheckpoint if the file can be read and is no whole checkpoint, else WeightsError.
    """
    try:
        fs, key = open_fresh(path)
        file = fs.open(key, "rb") if isinstance(fs, LocalFileSystem) else BytesIO(fs.cat_file(key))
    except FileNotFoundError as error:
        raise WeightsError(f"There is no file {str(path)!r}: check the path, or unset WORKSHOP_WEIGHTS.") from error
    except Exception as error:  # fsspec raises errors of many types
        raise WeightsError(f"{str(path)!r} cannot be read: {_in_short(error)}") from error
    with file:
        return _read(file, str(path))


def _read(file, name):
    """Return the dict in an open file of a checkpoint, whose errors call it `name`."""
    try:
        if zipfile.is_zipfile(file) and (part := zipfile.ZipFile(file).testzip()):  # torch.load would not notice
            raise ValueError(f"its part {part!r} is damaged")
        file.seek(0)
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises errors of many types for other files
        # A disk that may answer later says nothing of damage. EINVAL comes from a place that a damaged file names.
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise WeightsError(f"{name!r} cannot be read: {_in_short(error)}") from error
        raise NoCheckpoint(f"{name!r} cannot be loaded as a PyTorch checkpoint: {_why(error, file)}") from error
    if not isinstance(checkpoint, dict):
        raise NoCheckpoint(f"{name!r} holds a {type(checkpoint).__name__}, not a dict of named values.")
    return checkpoint


def _why(error, file):
    """Return why torch.load raised `error`. Its own sentence for what it refuses has advice and escape codes first."""
    if "TorchScript" in str(error):
        return "it is a TorchScript archive: save torch.jit.load(path).state_dict() instead, with arch and num_classes."
    if isinstance(error, (RuntimeError, ValueError)):
        return _in_short(error)
    if isinstance(error, pickle.UnpicklingError):
        types = re.findall(r"GLOBAL (\S+)", str(error))[:1]  # the first one
        with suppress(Exception):  # it knows no files of PyTorch before 1.6
            file.seek(0)
            types = sorted(get_unsafe_globals_in_checkpoint(file)) or types
        if types:
            return f"it holds objects of {', '.join(types[:5])}, which could run code. {CONVERT}."
    found = re.search(r"Unsupported [^\n]+", str(error))
    what = found[0] if found else repr(error)[:200]
    return f"it is damaged, or a file of another kind ({what if file.seek(0, 2) else 'it is empty'}): save it again."


def _in_short(error):
    return str(error).split("\n")[0][:200]


def without_wrappers(state_dict: object, expected: Collection) -> str:
    """Return the cure if names in `state_dict` hold a wrapper of the model, and those in `expected` do not; else ""."""
    both = (state_dict if isinstance(state_dict, dict) else {}, expected)
    found, known = ({word for name in names for word in WRAPPER.findall(str(name))} for names in both)
    extra = sorted(found - known)
    plain = [re.sub("|".join(map(re.escape, extra)), "", str(name)) for name in both[0]]
    cut = "".join(f".replace({word!r}, '')" for word in extra)
    outer = os.path.commonprefix(plain).rpartition(".")[0] + "."  # the model is a part of another module
    if any(name.removeprefix(outer) in expected for name in plain if name.startswith(outer)):
        cut, extra = f"{cut}.removeprefix({outer!r})", [*extra, outer]
    if not extra:
        return ""
    return (
        f"its weights' names hold {' and '.join(map(repr, extra))}, since DistributedDataParallel, torch.compile or "
        f"another module had wrapped the model. Save {{name{cut}: weight for name, weight in state_dict.items()}} "
        "instead."
    )


def checkpoint_exists(path: str | os.PathLike) -> bool:
    """Return whether there is a file at `path`, which is as in `storage.absolute_address`.

    Raises OSError where the storage does not say: fsspec's own `exists` would then answer that there is none. Raises
    IsADirectoryError for a folder.
    """
    fs, key = open_fresh(path)
    try:
        if fs.info(key)["type"] == "directory":
            raise IsADirectoryError(f"{str(path)!r} is a folder: give the path of a file.")
    except FileNotFoundError:
        return False
    return True


def _imagenet():
    try:
        state_dict = _downloaded()
    except Exception as error:  # the download and torch.load raise errors of many types
        url, cached = IMAGENET_WEIGHTS.url, str(_cached())
        cure = (
            f"Delete {cached!r}, which is damaged"
            if _cached().exists()
            else "Check the network, or set https_proxy and start again"
        )
        raise WeightsError(
            f"torchvision's ImageNet weights could not be had ({str(error)[:200]}). {cure}; or download {url} "
            f"elsewhere and put it at {cached!r}; or set WORKSHOP_WEIGHTS to a checkpoint of yours. "
            "For sketches, and for them alone, write weights='sketches'."
        ) from error
    (size,) = IMAGENET_WEIGHTS.transforms().resize_size
    return {"arch": "resnet50", "num_classes": 1000, "state_dict": state_dict, "size": size}


def _downloaded():
    """Return what torchvision loads, from its cache or by its download; raise TimeoutError if nothing comes.

    The download itself would wait for ever, be it for a host's address, for the first answer or for more.
    """
    if _cached().exists():
        return IMAGENET_WEIGHTS.get_state_dict(check_hash=True)
    ended: Queue = Queue()

    def download():
        try:
            ended.put((IMAGENET_WEIGHTS.get_state_dict(check_hash=True), None))
        except BaseException as error:
            ended.put((None, error))

    threading.Thread(target=download, daemon=True).start()  # a daemon does not keep the program from ending
    size, came = 0, time.monotonic()
    while time.monotonic() - came < STALLED_S or _cached().exists():
        with suppress(Empty):
            state_dict, error = ended.get(timeout=0.5)
            if error:
                raise error
            return state_dict
        now = _n_bytes_so_far()
        if now != size:
            size, came = now, time.monotonic()
    raise TimeoutError(f"nothing came from {IMAGENET_WEIGHTS.url} for {STALLED_S} s")


def _n_bytes_so_far():
    n_bytes = 0
    for file in _cached().parent.glob(f"{_cached().name}.*"):  # torch.hub's name for it until all is there
        with suppress(FileNotFoundError):
            n_bytes += file.stat().st_size
    return n_bytes


def _cached():
    return Path(torch.hub.get_dir(), "checkpoints", Path(IMAGENET_WEIGHTS.url).name)


def _build(checkpoint, name):
    """Return (model, categories) of a checkpoint."""
    if missing := {"arch", "num_classes", "state_dict"} - checkpoint.keys():
        wrapped = f" If it is a state_dict: {cure}" if (cure := without_wrappers(checkpoint, IN_ALL_RESNETS)) else ""
        raise WeightsError(
            f"{name!r} lacks {sorted(missing)}: a checkpoint needs arch, num_classes and state_dict.{wrapped}"
        )
    arch, n_classes = checkpoint["arch"], checkpoint["num_classes"]
    if not (isinstance(arch, str) and arch.startswith(("resnet", "wide_resnet", "resnext"))):
        raise WeightsError(f"{name!r} has arch {arch!r}: this workshop loads ResNets, such as 'resnet18'.")
    try:
        model = get_model(arch, weights=None, num_classes=n_classes)
        model.load_state_dict(checkpoint["state_dict"])  # float32 afterwards, whatever they were saved in
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        why = without_wrappers(checkpoint["state_dict"], IN_ALL_RESNETS) or str(error)[:300]
        raise WeightsError(f"{name!r} does not fit {arch!r}: {why}") from error
    if checkpoint.get("stride_in_1x1"):
        # ResNet v1 halves the resolution in the first 1x1 convolution of a stage; torchvision's v1.5 in the 3x3 one.
        for stage in (model.layer2, model.layer3, model.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    size, names = checkpoint.get("size", 256), checkpoint.get("categories") or []
    if not isinstance(size, int) or size < 1:
        raise WeightsError(f"{name!r} has size {size!r}: write a number of pixels, such as 256.")
    if not isinstance(names, (list, tuple)):
        raise WeightsError(f"{name!r} has categories {str(names)[:100]!r}: write a list of names.")
    unnamed = IMAGENET_WEIGHTS.meta["categories"] if n_classes == 1000 else map("category {}".format, range(n_classes))
    categories = list(map(str, names or unnamed))
    if len(categories) != n_classes:
        raise WeightsError(f"{name!r} names {len(categories)} categories, but num_classes is {n_classes}.")
    return model, categories
