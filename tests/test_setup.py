"""One source of pins, held together; the package's modules stay apart."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workshop_utils"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = (ROOT / "requirements.txt").read_text()
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())


def pins():
    lines = re.findall(r"^(\S+==[^\\\n]+)", PINS, flags=re.MULTILINE)
    return [Requirement(line.strip()) for line in lines]


def test_every_range_has_a_pin_inside_it():
    asked = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]]
    for requirement in asked:
        versions = [next(iter(pin.specifier)).version for pin in pins() if pin.name == requirement.name]
        assert versions, f"{requirement.name} has no pin: run `make pins`"
        assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_every_pin_has_hashes_and_no_address():
    blocks = re.split(r"\n(?=\S)", PINS.strip())
    assert len(blocks) == len(pins())
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in PINS and "index" not in PINS


def test_this_environment_has_the_pinned_versions():
    for pin in pins():
        if pin.marker is None or pin.marker.evaluate():
            assert importlib.metadata.version(pin.name) == next(iter(pin.specifier)).version


def test_conda_takes_python_and_graphviz_from_conda_and_the_rest_from_the_pins():
    conda = [entry for entry in ENVIRONMENT["dependencies"] if isinstance(entry, str)]
    pip = next(entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict))
    assert conda == [f"python {PROJECT['requires-python']}", "graphviz", "pip"]
    assert pip[0] == "-r requirements.txt"
    assert not any("==" in entry for entry in pip)


# CI runs them on Linux with Python 3.11 and 3.13.
@pytest.mark.parametrize(
    ("platform", "python"),
    [
        ("x86_64-manylinux_2_28", "3.12"),
        ("x86_64-manylinux_2_28", "3.14"),
        ("aarch64-apple-darwin", "3.11"),
        ("aarch64-apple-darwin", "3.14"),
        ("x86_64-pc-windows-msvc", "3.11"),
        ("x86_64-pc-windows-msvc", "3.14"),
    ],
)
def test_the_pins_resolve_elsewhere(platform, python, tmp_path):
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "install", "--dry-run", "--target", str(tmp_path), "--python-platform", platform]
    command += ["--python-version", python, "--only-binary", ":all:", "-r", str(ROOT / "requirements.txt")]
    env = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest macOS that PyTorch has wheels for
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert result.returncode == 0, result.stderr
    assert ("+ dask-cuda==" in result.stderr) == ("linux" in platform)


def test_no_module_imports_upwards_or_in_a_circle():
    imports = {module_name(path): imported_modules(path) for path in PACKAGE.rglob("*.py")}
    imports = {name: {need for need in needs if need != name} for name, needs in imports.items()}
    order = []
    while imports:
        free = [name for name, needs in imports.items() if not needs & imports.keys()]
        assert free, f"a circle among {sorted(imports)}"
        order += free
        for name in free:
            del imports[name]
    assert order.index("dogs.breeds") < order.index("data") < order.index("inference") < order.index("tool.cli")


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def imported_modules(path):
    """The modules of the package that this file names in an import, wherever in it."""
    known, tree = {module_name(path) for path in PACKAGE.rglob("*.py")}, ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write the import in full"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    inside = {name.removeprefix("workshop_utils").lstrip(".") for name in names if name.startswith("workshop_utils")}
    return (inside & known) - {""}
