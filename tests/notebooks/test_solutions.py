"""Each check fails after the stub with a hint, and passes after the solution."""

import pytest
from lessons import SOURCES, read, tags
from nbclient import NotebookClient

BEGIN_WITH_A_HINT = "Not yet: "


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_stubs_fail_their_checks_and_solutions_pass(path):
    notebook = read(path)
    cells, checks_of_stubs = [], []
    for cell in notebook.cells:
        if "solution" in tags(cell):  # between a stub and its solution, the check runs once more
            check = read(path).cells[notebook.cells.index(cell) + 1]
            check.metadata["tags"] = ["check", "raises-exception"]
            check.id += "-stub"
            cells.append(check)
            checks_of_stubs.append(check)
        cells.append(cell)
    notebook.cells = cells
    NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(path.parent)}}).execute()
    for check in checks_of_stubs:
        error = check.outputs[-1]
        assert error.output_type == "error" and error.ename == "NotYet", (check.source, check.outputs)
        assert error.traceback[0].startswith(BEGIN_WITH_A_HINT) and len(error.traceback) == 1, error.traceback
    passed = [cell for cell in cells if "check" in tags(cell) and cell not in checks_of_stubs]
    assert len(passed) == len(checks_of_stubs) >= 2
    assert all(cell.outputs[-1].text.startswith("Correct. ") for cell in passed)
