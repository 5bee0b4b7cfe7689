"""Load a ResNet with the transform and the categories that its weights were trained with."""

import os
import socket
import tempfile
from pathlib import Path

import fsspec
import torch
import torchvision
from fsspec.implementations.local import LocalFileSystem
from torchvision.models._meta import _IMAGENET_CATEGORIES
from torchvision.transforms._presets import ImageClassification

from workshop_utils.data import default_storage_options

SKETCH_WEIGHTS = Path(__file__).parent / "weights" / "resnet18_sketches.pt"
IMAGENET_WEIGHTS = torchvision.models.ResNet50_Weights.IMAGENET1K_V2
WEIGHTS_HOST = ("download.pytorch.org", 443)


class WeightsError(RuntimeError):
    """Weights could not be loaded; the message says which, why, and what to do."""


def load_resnet(weights="auto"):
    """Return (model, transform, categories) of a pretrained ResNet, in eval mode on the CPU.

    weights: "auto" takes the first that applies of WORKSHOP_WEIGHTS, torchvision's ImageNet weights where its cache
    holds them or the network gives them, and the ResNet-18 trained on sketches that comes with the workshop;
    "imagenet" and "sketches" name one of the last two; else the path or address of a checkpoint file, a dict with
    `arch`, `num_classes`, `state_dict`; `stride_in_1x1` where it is a ResNet v1; `size`, pixels that the shorter side
    is resized to before the crop to 224 (256 where absent).
    transform: an RGB `PIL.Image` to a normalised (3, 224, 224) float32 tensor.
    categories: the model's category names; a logit's position is its index. The model carries what a checkpoint of it
    has to say in `model.about`: a dict with `arch`, and `stride_in_1x1` and `size` where they apply.
    Raises WeightsError.
    """
    weights = resolve_weights(weights)
    if weights == "imagenet":
        model, transform = _imagenet(), IMAGENET_WEIGHTS.transforms()
        model.about = {"arch": "resnet50", "size": transform.resize_size[0]}
        return model.eval(), transform, list(_IMAGENET_CATEGORIES)
    checkpoint = load_checkpoint(SKETCH_WEIGHTS if weights == "sketches" else weights)
    model = _build(checkpoint, weights)
    model.about = {name: checkpoint[name] for name in ("arch", "stride_in_1x1", "size") if name in checkpoint}
    transform = ImageClassification(crop_size=224, resize_size=checkpoint.get("size", 256))
    n_classes = checkpoint["num_classes"]
    categories = checkpoint.get("categories") or _names_for(n_classes)
    if len(categories) != n_classes:
        raise WeightsError(f"{weights!r} names {len(categories)} categories, but num_classes is {n_classes}.")
    return model.eval(), transform, list(categories)


def resolve_weights(weights="auto"):
    """Return "imagenet", "sketches", or a checkpoint's address: what `load_resnet(weights)` will load."""
    if weights != "auto":
        return str(weights)
    if named := os.environ.get("WORKSHOP_WEIGHTS"):
        return named
    return "imagenet" if _cached().exists() or _reachable(WEIGHTS_HOST) else "sketches"


def with_new_head(model, n_classes):
    """Replace the classifier `fc` of a ResNet by a fresh one for `n_classes`, drawn from torch's seed; return `model`.

    >>> with_new_head(torchvision.models.resnet18(), 12).fc
    Linear(in_features=512, out_features=12, bias=True)
    """
    model.fc = torch.nn.Linear(model.fc.in_features, n_classes).to(model.fc.weight.device)
    return model


def save_checkpoint(path, storage_options=None, **values):
    """Write `values` (tensors, numbers, strings, dicts and lists of them) to `path`: whole or not at all.

    path: a local path, or any address that fsspec can write, such as "s3://…".
    storage_options: what fsspec needs there.
    """
    fs, key = _open(path, storage_options)
    if not isinstance(fs, LocalFileSystem):
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(Path(folder, "checkpoint.pt"), **values)
            fs.put_file(str(Path(folder, "checkpoint.pt")), key)  # an object store shows it when all of it is there
        return
    path = Path(key)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        torch.save(values, part)
        load_checkpoint(part)  # what could not be read again later is refused now
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_checkpoint(path, storage_options=None):
    """Return the dict of a checkpoint file, on the CPU, without running any code that it may hold.

    path: a local path, or any address that fsspec can open. storage_options: what fsspec needs there.
    Raises WeightsError.
    """
    try:
        fs, key = _open(path, storage_options)
        with fs.open(key, "rb") as file:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise WeightsError(f"There is no file {str(path)!r}: check the path, or unset WORKSHOP_WEIGHTS.") from error
    except Exception as error:  # torch.load and fsspec raise many kinds for files that are not checkpoints
        reason = str(error).split("\n")[0][:200]
        raise WeightsError(f"{str(path)!r} cannot be loaded as a PyTorch checkpoint: {reason}") from error
    if not isinstance(checkpoint, dict):
        raise WeightsError(f"{str(path)!r} holds a {type(checkpoint).__name__}, not a dict of named values.")
    return checkpoint


def checkpoint_exists(path, storage_options=None):
    """Return whether there is a file at `path`, which is as in `load_checkpoint`."""
    fs, key = _open(path, storage_options)
    return fs.exists(key)


def _open(path, storage_options):
    options = default_storage_options(path) if storage_options is None else storage_options
    fs, key = fsspec.core.url_to_fs(str(path), **options)
    fs.invalidate_cache()  # another process may have written since
    return fs, key


def _imagenet():
    try:
        return torchvision.models.resnet50(weights=IMAGENET_WEIGHTS)
    except Exception as error:  # the download's and torch.load's are many
        raise WeightsError(
            f"torchvision's ImageNet weights could not be had ({str(error)[:200]}). Check the network, delete "
            f"{str(_cached())!r} if it is there, or unset WORKSHOP_WEIGHTS and ask for weights='sketches'."
        ) from error


def _cached():
    return Path(torch.hub.get_dir(), "checkpoints", Path(IMAGENET_WEIGHTS.url).name)


def _build(checkpoint, name):
    missing = {"arch", "num_classes", "state_dict"} - checkpoint.keys()
    if missing:
        raise WeightsError(f"{name!r} lacks {sorted(missing)}: a checkpoint needs arch, num_classes and state_dict.")
    arch = checkpoint["arch"]
    if not (isinstance(arch, str) and arch.startswith(("resnet", "wide_resnet", "resnext"))):
        raise WeightsError(f"{name!r} has arch {arch!r}: this workshop loads ResNets, such as 'resnet18'.")
    try:
        model = torchvision.models.get_model(arch, weights=None, num_classes=checkpoint["num_classes"])
        model.load_state_dict({key: tensor.float() if tensor.is_floating_point() else tensor
                               for key, tensor in checkpoint["state_dict"].items()})  # fmt: skip
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        raise WeightsError(f"{name!r} does not fit {arch!r}: {str(error)[:300]}") from error
    if checkpoint.get("stride_in_1x1"):
        _stride_in_1x1(model)
    return model


def _stride_in_1x1(model):
    # ResNet v1 halves the resolution in the first 1x1 convolution of a stage; torchvision's v1.5 in the 3x3 one.
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)


def _names_for(n_classes):
    if n_classes == len(_IMAGENET_CATEGORIES):
        return _IMAGENET_CATEGORIES
    return [f"category {index}" for index in range(n_classes)]


def _reachable(address):
    try:
        with socket.create_connection(address, timeout=2):
            return True
    except OSError:
        return False
