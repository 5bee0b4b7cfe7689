"""What the two packages promise of each other: see docs/architecture.md."""

import ast
import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path

import daskrun

ROOT = Path(__file__).parents[1]
FOLDERS = {"daskrun": ROOT / "daskrun/src/daskrun", "workshop_utils": ROOT / "workshop_utils"}


def modules():
    """Return {module: the modules of the two packages that it imports, also within functions}."""
    files = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            files[".".join([package, *parts]).removesuffix(".__init__")] = path
    imported = {}
    for name, path in files.items():
        named = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                # From a package, a name may be a module or something that its __init__ holds.
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= whole if whole <= files.keys() else {node.module, *(whole & files.keys())}
        imported[name] = (named & files.keys()) - {name}
    return imported


def test_modules_import_one_another_in_no_circle():
    tuple(TopologicalSorter(modules()).static_order())  # raises CycleError, with the modules of the circle


def test_the_launcher_imports_nothing_of_the_workshop():
    of_the_launcher = {name: its for name, its in modules().items() if name.startswith("daskrun")}
    assert len(of_the_launcher) > 30
    assert not [its for its in of_the_launcher.values() if any(name.startswith("workshop_utils") for name in its)]


def test_of_the_launcher_the_workshop_uses_what_is_exported_or_listed():
    listed = set(re.findall(r"`(daskrun(?:\.\w+)+)`", (ROOT / "docs/architecture.md").read_text(encoding="utf-8")))
    taken = set()
    for path in (path for folder in ("workshop_utils", "deploy", "tools") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "daskrun":
                taken |= {f"{node.module}.{alias.name}" for alias in node.names}
    inner = {name for name in taken if name.rpartition(".")[2] not in daskrun.__all__}
    assert inner and inner <= listed
    for name in inner:
        module, _, what = name.rpartition(".")
        assert hasattr(importlib.import_module(module), what)
