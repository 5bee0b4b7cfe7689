"""What every benchmark records beside its figures: the machine, the versions, the date."""

import importlib.metadata
import json
import os
import platform
from datetime import date
from pathlib import Path

import torch
from dask.system import CPU_COUNT

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "torchvision", "dask", "distributed", "pillow")


def machine():
    """Return what the figures depend on: processor, cores, bf16, GPU, versions."""
    return {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "cores": CPU_COUNT,
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def write_result(name, result):
    """Write `result` and the machine to `results/<name>-<device>.json`; return the path."""
    about = machine()
    device = "h200" if "H200" in (about["gpu"] or "") else "gpu" if about["gpu"] else f"cpu{about['cores']}"
    path = RESULTS / f"{name}-{device}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"machine": about, **result}, indent=1) + "\n")
    os.replace(part, path)
    return path


def _processor():
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        return names[0] if names else platform.machine()
    return platform.processor() or platform.machine()
