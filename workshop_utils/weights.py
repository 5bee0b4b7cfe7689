"""Load a ResNet with the transform and the categories that its weights were trained with."""

import hashlib
import os
import re
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from torchvision.models import ResNet, ResNet50_Weights, get_model
from tqdm import tqdm

from daskrun.screen import screen
from workshop_utils.checkpoint import OTHER_HEAD, WeightsError, load_checkpoint
from workshop_utils.labels import unnamed
from workshop_utils.storage import absolute_address, variables, whole_file

SKETCH_WEIGHTS = Path(__file__).with_name("resnet18_sketches.pt")  # by tools/train_sketch_weights.py
IMAGENET_WEIGHTS = ResNet50_Weights.IMAGENET1K_V2
ABOUT = ("arch", "stride_in_1x1", "size")  # of a checkpoint, beside weights and what their classes are
STALLED_S = 20  # a download that brings nothing for so long is given up
# What DistributedDataParallel and torch.compile put before a weight's name.
WRAPPER = re.compile(r"(?<![\w.])((?:module\.|_orig_mod\.)+)(?=conv1\.weight)")


def load_resnet(weights: str | os.PathLike = "auto") -> tuple[ResNet, Callable, list[str]]:
    """Return (model, transform, categories) of a pretrained ResNet, in eval mode on the CPU.

    weights: "auto" takes WORKSHOP_WEIGHTS if it is set, else torchvision's ImageNet weights; "imagenet" takes these,
    from torchvision's cache or by its download; "sketches" the ResNet-18 trained on sketches that comes with the
    workshop; anything else is the path or address of a checkpoint file, a dict with `arch`,
    `num_classes`, `state_dict`; perhaps `categories`; `stride_in_1x1` for a ResNet v1; `size`, the pixels that the
    shorter side is resized to (256 if absent) before the middle 224, or all if there are fewer, are cut out.

    transform: from an RGB `PIL.Image` to a normalised (3, 224, 224) float32 tensor, smaller if `size` is.
    categories: the model's category names; a logit's position is its index. A file that names none has "category 0" and
    so on; a warning says so where there are 1,000, as they may be ImageNet's.
    The model carries what a checkpoint of it has to say: in `model.about`, a dict, `arch`, and `stride_in_1x1` and
    `size` if they apply; in `model.fc.categories` the names, if they are known. So a new head has none.
    Raises WeightsError, also if ImageNet's weights cannot be downloaded, such as from a server that is silent for 20 s.
    """
    name = resolve_weights(weights)
    checkpoint = _imagenet() if name == "imagenet" else load_checkpoint(SKETCH_WEIGHTS if name == "sketches" else name)
    if name in ("imagenet", "sketches"):
        checkpoint["categories"] = IMAGENET_WEIGHTS.meta["categories"]
    model, categories = _build(checkpoint, name)
    model.about = {name: checkpoint[name] for name in ABOUT if name in checkpoint}
    size = checkpoint.get("size", 256)
    transform = IMAGENET_WEIGHTS.transforms(resize_size=size, crop_size=min(size, 224))
    return model.eval(), transform, categories


def resolve_weights(weights: str | os.PathLike = "auto", default: str = "imagenet") -> str:
    """Return what `load_resnet(weights)` will load: "imagenet", "sketches", or the absolute address of a checkpoint.

    "auto" and "" are WORKSHOP_WEIGHTS, or `default` if that is unset.
    """
    wanted = variables().weights if weights in ("", "auto") else weights
    if wanted in ("", "auto"):
        return default
    return str(wanted) if wanted in ("imagenet", "sketches") else absolute_address(wanted)


def with_new_head(model: ResNet, n_classes: int) -> ResNet:
    """Replace the classifier `fc` of a ResNet by a new one for `n_classes`, drawn from torch's seed; return `model`.

    >>> with_new_head(get_model("resnet18"), 12).fc
    Linear(in_features=512, out_features=12, bias=True)
    """
    model.fc = torch.nn.Linear(model.fc.in_features, n_classes).to(model.fc.weight.device)
    return model


def _imagenet():
    cached = Path(torch.hub.get_dir(), "checkpoints", Path(IMAGENET_WEIGHTS.url).name)
    try:
        if not cached.exists():
            _download(IMAGENET_WEIGHTS.url, cached)
        state_dict = IMAGENET_WEIGHTS.get_state_dict()  # from its cache
    except Exception as error:  # the download and torch.load raise errors of many types
        cure = "Check the network, or set https_proxy and start again"
        if cached.exists():
            cure = f"Delete {str(cached)!r}, which is damaged"
        raise WeightsError(
            f"torchvision's ImageNet weights could not be had ({str(error)[:200]}). {cure}; or download "
            f"{IMAGENET_WEIGHTS.url} elsewhere and put it at {str(cached)!r}; or set WORKSHOP_WEIGHTS to a checkpoint "
            "of yours. For sketches, and for them alone, write weights='sketches'."
        ) from error
    (size,) = IMAGENET_WEIGHTS.transforms().resize_size
    return {"arch": "resnet50", "num_classes": 1000, "state_dict": state_dict, "size": size}


def _download(url, path):
    """Write what lies at `url` to `path`. Raise an error if the server is silent for STALLED_S, or sends other content.

    torchvision's own download would wait for ever.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "torch.hub"})  # as torchvision asks
    with whole_file(path) as part:
        with urllib.request.urlopen(request, timeout=STALLED_S) as answer, part.open("wb") as file:
            n_bytes = int(answer.headers.get("Content-Length", 0)) or None
            with tqdm.wrapattr(file, "write", n_bytes, desc=path.name, file=screen()) as counted:
                shutil.copyfileobj(answer, counted)
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if not digest.startswith(path.stem.rpartition("-")[2]):
            raise ValueError(f"what came from {url} has SHA-256 {digest}, and the name says how that should begin")


def _build(checkpoint, name):
    """Return (model, categories) of a checkpoint."""
    if missing := {"arch", "num_classes", "state_dict"} - checkpoint.keys():
        if "training" in checkpoint and "arch" in checkpoint:
            raise WeightsError(f"{name!r} holds a model of its own kind: {OTHER_HEAD}")
        wrapped = f" If it is a state_dict, {cure}" if (cure := _cure_of_wrappers(checkpoint)) else ""
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
        why = _cure_of_wrappers(checkpoint["state_dict"]) or str(error)[:300]
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
    if names and len(names) != n_classes:
        raise WeightsError(f"{name!r} names {len(names)} categories, but num_classes is {n_classes}.")
    if not names and n_classes == len(IMAGENET_WEIGHTS.meta["categories"]):  # as in torchvision's own files
        names = IMAGENET_WEIGHTS.meta["categories"]
    if names:
        model.fc.categories = list(map(str, names))
    return model, getattr(model.fc, "categories", list(map(unnamed, range(n_classes))))


def _cure_of_wrappers(state_dict):
    """Return how to save weights of the model alone, if their names say that it was wrapped; else ""."""
    found = WRAPPER.search(" ".join(map(str, state_dict))) if isinstance(state_dict, dict) else None
    if not found:
        return ""
    return (
        f"its weights' names begin with {found[1]!r}, since DistributedDataParallel or torch.compile had wrapped the "
        f"model: save {{name.removeprefix({found[1]!r}): weight for name, weight in state_dict.items()}} as state_dict."
    )
