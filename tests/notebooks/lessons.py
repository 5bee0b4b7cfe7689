"""The notebooks as the tests read them."""

from pathlib import Path

import nbformat

from workshop_utils.progress import FINISHED

ROOT = Path(__file__).parents[2]
NUMBERED = "[0-9]*.ipynb"  # the lessons; quiz.ipynb is none
SOURCES = sorted((ROOT / "notebooks").glob(NUMBERED))
DEEP_DIVES = sorted((ROOT / "notebooks/deep-dives").glob("*.ipynb"))
RENDERED = ROOT / "notebook_output"
APPENDICES = ("09-horovod.ipynb",)  # shorter: a guess, an exercise, twenty minutes


def name_of(path):
    """Return a lesson's number, or a deep dive's name."""
    return path.stem[:2] if path in SOURCES else path.stem


def rendered_twin(path):
    """Return where the notebook with this source is rendered."""
    return RENDERED / path.relative_to(ROOT / "notebooks")


def read(path):
    return nbformat.read(path, as_version=4)


def without_bars(notebook):
    """Return a rendered notebook without its finished bars: where all went fast, a run has none."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = FINISHED.sub("", output.text)
        cell.outputs = [output for output in cell.outputs if output.get("text") != ""]
    return notebook


def says(cell):
    """Return whether the stored output of a cell has text that nbval can compare: a picture's is the same for all."""
    for output in cell.outputs:
        data = output.get("data", {})
        texts = [text for kind, text in data.items() if kind.startswith("text/")]
        if output.get("text", "").strip() or (texts and not any(kind.startswith("image/") for kind in data)):
            return True
    return False


def tags(cell):
    return set(cell.metadata.get("tags", []))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
