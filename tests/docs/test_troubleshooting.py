"""Each message that the instructor's page explains exists, in the workshop's code or in the library that it names."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/instructor/troubleshooting.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^### `(.+?)`(?: \((\w+)\))? *$", re.MULTILINE)
MESSAGES = HEADING.findall(PAGE)


def strings(path):
    """Return all strings of a Python file, pieces that lie beside each other joined, with … for what is put in."""
    return [text for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if (text := as_text(node))]


def as_text(node):
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(as_text(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = as_text(node.left), as_text(node.right)
        return f"{left or '…'}{right or '…'}" if left or right else None
    return None


def of_modules(*names):
    return [text for name in names for text in strings(Path(importlib.util.find_spec(name).origin))]


def of_notebooks():
    notebooks = [nbformat.read(path, as_version=4) for path in (ROOT / "notebook_output").glob("06-*.ipynb")]
    return [output.get("text", "") for one in notebooks for cell in one.cells for output in cell.get("outputs", ())]


@pytest.fixture(scope="module")
def said():
    """Who says what: "" is the workshop."""
    with pytest.raises(ModuleNotFoundError) as missing:
        importlib.import_module("a_module_that_nobody_installed")
    jupyter = Path(importlib.util.find_spec("jupyter_server").origin).parent / "templates/login.html"
    ours = [text for path in (ROOT / "workshop_utils").rglob("*.py") for text in strings(path)]
    setup = ("Makefile", "tools/why_broken.sh", "tools/install.sh")
    return {
        "": [*ours, *((ROOT / name).read_text(encoding="utf-8") for name in setup)],
        "Dask": of_modules("distributed.scheduler", "distributed.worker_memory"),
        "JupyterLab": [jupyter.read_text(encoding="utf-8")],
        "Python": [*of_modules("multiprocessing.process"), str(missing.value)],
        "PyTorch": [*of_notebooks(), *of_modules("torch")],
        "fsspec": of_modules("fsspec.asyn"),
    }


def is_said(message, texts):
    pattern = re.compile(".*?".join(map(re.escape, message.split("…"))), re.DOTALL)
    return any(pattern.search(text) for text in texts)


@pytest.mark.parametrize(("message", "who"), MESSAGES, ids=[message[:50] for message, _ in MESSAGES])
def test_somebody_says_this_message(message, who, said):
    assert is_said(message, said[who]), f"{who or 'the workshop'} says it no longer"


def test_every_message_has_its_cause_and_its_cure():
    parts = re.split(r"^### .+\n", PAGE, flags=re.MULTILINE)[1:]
    assert len(parts) == len(MESSAGES) >= 30 and len(set(MESSAGES)) == len(MESSAGES)
    for part in parts:
        assert re.search(r"^\n\*\*Why:\*\* .+ \*\*Cure:\*\* .+", part), part
