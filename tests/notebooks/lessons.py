"""The notebooks as the tests read them."""

from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
NUMBERED = "[0-9]*.ipynb"  # the lessons; quiz.ipynb is none
SOURCES = sorted((ROOT / "notebooks").glob(NUMBERED))
RENDERED = ROOT / "notebook_output"


def read(path):
    return nbformat.read(path, as_version=4)


def tags(cell):
    return set(cell.metadata.get("tags", []))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
