"""Execute notebooks headless and keep their outputs in a form that differs only where the results do."""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from workshop_utils.storage import whole_file

CELL_TIMEOUT_S = 1800
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"  # holds a random id; its plain text or HTML is kept


@dataclass(frozen=True)
class Rendered:
    """What executing one notebook took. seconds: one float per code cell run. error: None, or cell and reason."""

    name: str
    n_cells: int
    seconds: list[float]
    error: str | None


def render(path: str | Path, output: str | Path, progress: Callable[[int, int], object] = lambda *_: None) -> Rendered:
    """Execute the notebook at `path` in its own folder, write it to the folder `output`, return a Rendered.

    The written file has outputs and execution counts, and no times, widget ids or paths of this machine. It appears
    whole; where a cell fails, what an earlier run wrote stays.
    progress: called after each cell with how many are done and how many there are.
    """
    path, seconds, cells = Path(path), [], []
    try:
        notebook = nbformat.read(path, as_version=4)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for done, took in enumerate(_execute(notebook, path.parent), start=1):
            seconds += took
            progress(done, len(notebook.cells))
        tidy(notebook, path.resolve().parents[1])
        with whole_file(Path(output, path.name)) as part:
            nbformat.write(notebook, part)
    except Exception as error:  # whatever ends one notebook must not end the others
        where = f"code cell {len(seconds) + 1} of {len(cells)}: " if cells else ""
        kind, what = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", error)
        return Rendered(path.name, len(cells), seconds, f"{where}{kind}: {what}")
    return Rendered(path.name, len(cells), seconds, error=None)


def tidy(notebook: nbformat.NotebookNode, project: Path) -> None:
    """Take out of a notebook what differs from run to run or machine to machine; tags and execution counts stay.

    Paths below `project`, this Python and the home folder become `~/workshop`, `~/python` and `~`.
    """
    notebook.metadata.pop("widgets", None)
    notebook.metadata.update(kernelspec=KERNELSPEC, language_info={"name": "python"})
    folders = {str(Path.home()): "~", sys.base_prefix: "~/python", sys.prefix: "~/python", str(project): "~/workshop"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if len(output.get("data", ())) > 1:
                output.data.pop(WIDGET, None)
            _rename(output, sorted(folders.items(), key=lambda pair: -len(pair[0])))


def _execute(notebook, folder):
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", record_timing=False, coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=40"],  # it would warn of its own, local, connection
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    client.reset_execution_trackers()
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            start = time.perf_counter()
            client.execute_cell(cell, index, execution_count=client.code_cells_executed + 1)
            yield [time.perf_counter() - start] if cell.cell_type == "code" else []


def _rename(value, folders):
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, (dict, list)):
            _rename(item, folders)
        elif isinstance(item, str) and not str(key).startswith("image/p"):
            for folder, name in folders:
                item = re.sub(re.escape(folder) + r"(?![\w.-])", name, item) if len(folder) > 1 else item
            value[key] = item
