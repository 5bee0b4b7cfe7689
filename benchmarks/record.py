"""What every benchmark records beside its figures: the machine, the versions, the commit, the date."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path

import torch
from dask.system import CPU_COUNT

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "torchvision", "dask", "distributed", "pillow", "torchcodec")


def machine():
    """Return what the figures depend on: commit, processor, cores, bf16, GPU with its driver and CUDA, versions."""
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "processor": _processor(),
        "cores": CPU_COUNT,
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **({"driver": _driver(), "cuda": torch.version.cuda} if torch.cuda.is_available() else {}),
        "python": platform.python_version(),
        **versions(PACKAGES),
    }


def versions(packages):
    """Return {name: version} of packages, None where one is not installed."""
    found = dict.fromkeys(packages)
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit(folder=Path(__file__).parent):
    """Return the commit of the checkout that `folder` is in, or None outside git."""
    with suppress(OSError):
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
        return asked.stdout.strip() if asked.returncode == 0 else None


def device():
    """Return the word that names this machine's results, such as cpu2 or h200."""
    return short_name(torch.cuda.get_device_name()) if torch.cuda.is_available() else f"cpu{CPU_COUNT}"


def result_path(name, suffix=".json"):
    """Return where the figures of this machine belong: `results/<device>-<name>.json`, such as cpu2-… or h200-…."""
    return RESULTS / f"{device()}-{name}{suffix}"


def short_name(gpu):
    """Return a GPU's name as files bear it.

    >>> [short_name(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Tesla T4", "NVIDIA GeForce RTX 4090")]
    ['h200', 'a100-sxm4-80gb', 't4', 'rtx-4090']
    """
    words = [word for word in re.findall("[a-z0-9]+", gpu.lower()) if word not in ("nvidia", "tesla", "geforce")]
    return "-".join(words) or "gpu"


def write_result(name, result):
    """Write `result` and the machine to `result_path(name)`; return the path."""
    path = result_path(name)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    os.replace(part, path)
    return path


@contextmanager
def gpu_watched(name):
    """Keep what `nvidia-smi dmon` says of the GPU each second; yield a function that writes a line between.

    The log is `result_path(name, ".dmon.txt")`. Each line has a time, since the monitor may write late.
    """
    if not (torch.cuda.is_available() and shutil.which("nvidia-smi")):
        yield lambda what: None
        return
    path = result_path(name, ".dmon.txt")
    path.unlink(missing_ok=True)
    with path.open("a") as log:
        monitor = subprocess.Popen(["nvidia-smi", "dmon", "-s", "u", "-o", "T"], stdout=log, stderr=log)
        try:
            yield lambda what: os.write(log.fileno(), f"# {time.strftime('%H:%M:%S')} {what}\n".encode())
        finally:
            monitor.terminate()
            monitor.wait()


def _driver():
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(smi, capture_output=True, text=True).stdout.strip() if shutil.which(smi[0]) else None


def _processor():
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        return names[0] if names else platform.machine()
    return platform.processor() or platform.machine()
