"""The notebooks compare when an attendee runs every cell twice."""

import shutil

import nbformat
import pytest
from lessons import RENDERED, ROOT, read
from test_nbval import run_nbval

CHOSEN = sorted(path for path in RENDERED.glob("*.ipynb") if path.stem[:2] in ("01", "04", "06", "08"))
FOLDER = ROOT / ".nbval-long"  # as deep as the notebooks, which open files beside them

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


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
def run_doubled():
    """Return a function that runs the doubled notebook offline and returns what became of its cells, and the log."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORKSHOP_DATA", "WORKSHOP_WEIGHTS", "WORKSHOP_NAMES", "DASK_SCHEDULER_ADDRESS"):
            patch.setenv(name, "")
        patch.setenv("WORKSHOP_CACHE", str(ROOT / ".venv/cache"))
        FOLDER.mkdir()

        def run(path):
            copy = FOLDER / path.name
            nbformat.write(doubled(read(path)), copy)
            return run_nbval(ROOT, copy, timeout=800)

        yield run
        shutil.rmtree(FOLDER)


@pytest.mark.parametrize("path", CHOSEN, ids=lambda path: path.stem)
def test_every_cell_can_be_run_twice(path, run_doubled):
    found, said = run_doubled(path)
    assert found == {path.stem: {"PASSED"}}, said
