"""The notebooks compare when an attendee runs every cell twice."""

import os
import shutil

import nbformat
import pytest
from compare import each_on_one_core, longest_first
from lessons import RENDERED, ROOT, read, without_bars

from workshop_utils.cluster import THREADS

NAMES = longest_first(("01", "04", "06", "08", "10"))
FOLDER = ROOT / ".nbval-long"  # as deep as the notebooks, which open files beside them


def doubled(notebook):
    """Return the notebook with each code cell twice in place, but the last, which shuts the cluster down."""
    cells = []
    for position, cell in enumerate(notebook.cells):
        cells.append(cell)
        if cell.cell_type == "code" and position < len(notebook.cells) - 1:
            cells.append(nbformat.from_dict({**cell, "id": f"{cell.id[:58]}-again"}))
    notebook.cells = cells
    return notebook


@pytest.fixture
def copies(monkeypatch):
    """The doubled notebooks, which run offline."""
    for name in ("WORKSHOP_DATA", "WORKSHOP_WEIGHTS", "WORKSHOP_NAMES", "WORKSHOP_SHARED", "DASK_SCHEDULER_ADDRESS"):
        monkeypatch.setenv(name, "")
    for name in THREADS:  # left in this process by the clusters of other tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORKSHOP_CACHE", str(ROOT / ".venv/cache"))
    FOLDER.mkdir()
    try:
        for name in NAMES:
            (path,) = RENDERED.glob(f"{name}-*.ipynb")
            nbformat.write(doubled(without_bars(read(path))), FOLDER / path.name)
        yield [next(FOLDER.glob(f"{name}-*.ipynb")) for name in NAMES]
    finally:
        shutil.rmtree(FOLDER)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="keeps a process on a core, as only Linux can")
def test_every_cell_can_be_run_twice(copies):
    assert each_on_one_core(copies, os.sched_getaffinity(0)), "see what differs above"
