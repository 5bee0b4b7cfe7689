"""The stacks that notebooks show are those of today's code: each frame's line is there, in the function it names."""

import ast
import re
import sysconfig
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ipykernel.compiler import get_tmp_hash_seed, murmur2_x86
from lessons import RENDERED, ROOT, SOURCES, code_cells, read

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)(?:\n {4}(.+))?')
OURS = [*ROOT.glob("workshop_utils/**/*.py"), *ROOT.glob("daskrun/src/**/*.py")]
PYTHONS, PYTORCHS = Path(sysconfig.get_path("stdlib")).glob("*.py"), Path(torch.__file__).parent.rglob("*.py")
LIBRARIES = {path.name for path in (*PYTHONS, *PYTORCHS)}
PLACE = re.compile(r"\bat ([\w.]+\.py|cell):(\d+) in (\w+)")  # in the sentences of `Job.explain`


class Frame(NamedTuple):
    """A line of a stack. source: what it shows of the line; empty if that was not there to read."""

    file: str
    line: int
    function: str
    source: str = ""

    def is_in(self, text):
        """Return whether the line is in `text`, as shown, and in that function."""
        lines = text.splitlines()
        there = self.line <= len(lines) and self.source.strip() in ("", lines[self.line - 1].strip())
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        inside = [one.name for one in functions if one.lineno <= self.line <= one.end_lineno]
        return there and self.function in inside


def frames(text):
    return [Frame(file, int(line), *rest) for file, line, *rest in [*FRAME.findall(text), *PLACE.findall(text)]]


def texts_of(file, cells):
    """Return what this file or cell may hold; None for a file of a library."""
    if file == "cell":
        return cells
    if re.fullmatch(r"\d+\.py", file):  # a kernel names a cell by a hash of its text
        return [cell for cell in cells if str(murmur2_x86(cell, get_tmp_hash_seed())) == file[:-3]]
    ours = [path.read_text(encoding="utf-8") for path in OURS if path.name == file]
    if file == "__init__.py" or (not ours and file in LIBRARIES):  # no stack passes an __init__.py of ours
        return None
    return ours


def stale(text, cells):
    """Return the frames of our files and of these cells that are not what they show."""
    found = [(frame, texts_of(frame.file, cells)) for frame in frames(text)]
    return [frame for frame, texts in found if texts is not None and not any(map(frame.is_in, texts))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_each_frame_shows_a_line_of_the_code_of_today_and_shows_it_once(path):
    notebook = read(RENDERED / path.name)
    cells = [cell.source for cell in code_cells(notebook)]
    shown = [output.get("text", "") for cell in code_cells(notebook) for output in cell.outputs]
    shown += [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for text in shown:
        assert not stale(text, cells), "run: tools/render.py " + path.stem[:2]
        assert not [one for one, after in pairwise(FRAME.findall(text)) if one == after]
