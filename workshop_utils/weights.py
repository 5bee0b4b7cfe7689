"""Load a ResNet with the transform and the categories that its weights were trained with."""

import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue

import torch
from torchvision.models import ResNet, ResNet50_Weights, get_model

from workshop_utils.checkpoint import WeightsError, load_checkpoint
from workshop_utils.storage import weights_setting

SKETCH_WEIGHTS = Path(__file__).with_name("resnet18_sketches.pt")  # by tools/train_sketch_weights.py
IMAGENET_WEIGHTS = ResNet50_Weights.IMAGENET1K_V2
ABOUT = ("arch", "stride_in_1x1", "size", "categories")  # of a checkpoint, beside weights and their number of classes
STALLED_S = 20  # a download that brings nothing for so long is given up
# What DistributedDataParallel and torch.compile put into a weight's name.
WRAPPER = re.compile(r"(?<![^.])(?:module|_orig_mod)\.")
IN_ALL_RESNETS = ("conv1.weight",)  # a weight's name


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
        wrapped = f" If it is a state_dict: {cure}" if (cure := _without_wrappers(checkpoint, IN_ALL_RESNETS)) else ""
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
        why = _without_wrappers(checkpoint["state_dict"], IN_ALL_RESNETS) or str(error)[:300]
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


def _without_wrappers(state_dict, expected):
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
