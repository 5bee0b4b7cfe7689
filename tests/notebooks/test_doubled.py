"""The notebooks compare when an attendee runs every cell twice, and on a machine with one core."""

import shutil
import sys

import nbformat
import pytest
from lessons import RENDERED, ROOT, read
from test_nbval import run_nbval

CHOSEN = sorted(path for path in RENDERED.glob("*.ipynb") if path.stem[:2] in ("01", "04", "06", "08"))
FOLDER = ROOT / ".nbval-long"  # as deep as the notebooks, which open files beside them

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="taskset is Linux'"),
]


def doubled(notebook):
    """Return the notebook with each code cell twice in place, but the last, which shuts the cluster down."""
    cells = []
    for position, cell in enumerate(notebook.cells):
        cells.append(cell)
        if cell.cell_type == "code" and position < len(notebook.cells) - 1:
            cells.append(nbformat.from_dict({**cell, "id": f"{cell.id[:58]}-again"}))
    notebook.cells = cells
    return notebook


@pytest.fixture(scope="module")
def compared():
    """Return a function that runs a copy of a notebook offline and returns what became of its cells, and the log."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORKSHOP_DATA", "WORKSHOP_WEIGHTS", "WORKSHOP_NAMES", "DASK_SCHEDULER_ADDRESS"):
            patch.setenv(name, "")
        patch.setenv("WORKSHOP_CACHE", str(ROOT / ".venv/cache"))
        FOLDER.mkdir()

        def compare(path, change=lambda notebook: notebook, before=()):
            copy = FOLDER / path.name
            nbformat.write(change(read(path)), copy)
            return run_nbval(ROOT, copy, before=before, timeout=800)

        yield compare
        shutil.rmtree(FOLDER)


@pytest.mark.parametrize("path", CHOSEN, ids=lambda path: path.stem)
def test_every_cell_can_be_run_twice(path, compared):
    found, said = compared(path, doubled)
    assert found == {path.stem: {"PASSED"}}, said


@pytest.mark.parametrize("path", CHOSEN, ids=lambda path: path.stem)
def test_one_core_is_enough(path, compared):
    found, said = compared(path, before=("taskset", "-c", "0"))
    assert found == {path.stem: {"PASSED"}}, said
