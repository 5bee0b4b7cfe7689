"""Execute notebooks into notebook_output/ in a form that differs only where the results do.

`python tools/render.py` in the folder of the workshop executes all of them, `python tools/render.py 03 06` these two.
It prints a table of how long they took, and changes no source.
"""

import importlib.metadata
import platform
import re
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import click
import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

from workshop_utils.storage import whole_file

PROJECT = Path(__file__).resolve().parents[1]
CELL_TIMEOUT_S = 1800
CELL = re.compile(r"\S*/ipykernel_\d+/\d+\.py")  # as a kernel names a cell, in warnings
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"  # holds a random id; its plain text or HTML is kept


class Rendered(NamedTuple):
    """What executing one notebook took. seconds: one float per code cell run. error: None, or cell and reason."""

    name: str
    n_cells: int
    seconds: list[float]
    error: str | None


@click.command()
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    """Execute notebooks into notebook_output/: all, or those whose names begin with NAMES, such as 03."""
    known = [path for pattern in ("*.ipynb", "deep-dives/*.ipynb") for path in sorted(Path("notebooks").glob(pattern))]
    if not known:
        raise click.ClickException(f"{Path.cwd()} has no notebooks: run this in the folder of the workshop.")
    for name in names:
        if not any(path.name.startswith(name) for path in known):
            there = ", ".join(path.stem for path in known) or "nothing"
            raise click.ClickException(f"No notebook's name begins with {name!r}; {Path.cwd()}/notebooks has {there}.")
    chosen = [path for path in known if not names or path.name.startswith(names)]
    done = [render(path, Path("notebook_output", path.relative_to("notebooks").parent)) for path in chosen]
    click.echo(f"\n{'notebook':<40}{'cells':>6}{'minutes':>9}{'slowest, s':>12}")
    for one in done:
        click.echo(f"{one.name:<40}{one.n_cells:>6}{sum(one.seconds) / 60:>9.1f}{max(one.seconds, default=0):>12.1f}")
    if failed := [f"{one.name}, {one.error}" for one in done if one.error]:
        raise click.ClickException("\n".join(failed))


def render(path: str | Path, output: str | Path) -> Rendered:
    """Execute the notebook at `path` in its own folder, with a bar, write it to the folder `output`, return a Rendered.

    The written file has outputs, with bars as they ended, and execution counts, but no widget ids, paths of this
    machine or times when a cell ran. Its metadata says when and with what it was run, which the book shows. It appears
    whole; where a cell fails, what an earlier run wrote stays.
    """
    path, cells, error = Path(path), [], None
    seconds: list[float] = []
    try:
        notebook = nbformat.read(path, as_version=4)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        _execute(notebook, path, seconds)
        tidy(notebook, PROJECT)
        notebook.metadata["verified"] = verified()
        with whole_file(Path(output, path.name)) as part:
            nbformat.write(notebook, part)
    except Exception as caught:  # whatever ends one notebook must not end the others
        where = f"code cell {len(seconds) + 1} of {len(cells)}: " if len(seconds) < len(cells) else ""
        error = f"{where}{getattr(caught, 'ename', type(caught).__name__)}: {getattr(caught, 'evalue', caught)}"
    return Rendered(path.name, len(cells), seconds, error)


def tidy(notebook: nbformat.NotebookNode, project: Path) -> None:
    """Take out of a notebook what differs from run to run or machine to machine; tags and execution counts stay.

    Paths below `project`, this Python, the folder for temporary files and the home folder become `~/workshop`,
    `~/python`, `~/tmp` and `~`.
    """
    notebook.metadata.pop("widgets", None)
    notebook.metadata.update(kernelspec=KERNELSPEC, language_info={"name": "python"})
    folders = {
        str(Path.home()): "~",
        tempfile.gettempdir(): "~/tmp",
        sys.base_prefix: "~/python",
        sys.prefix: "~/python",
        str(project): "~/workshop",
    }
    longest_first = sorted((folder for folder in folders if len(folder) > 1), key=len, reverse=True)
    paths = re.compile(rf"({'|'.join(map(re.escape, longest_first))})(?![\w.-])")
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if len(output.get("data", ())) > 1:
                output.data.pop(WIDGET, None)
            _rename(output, paths, folders)


def verified() -> dict[str, str]:
    """Return what a run depends on: date, versions of python, torch and dask, and the device."""
    import torch
    from dask.system import CPU_COUNT

    gpus = torch.cuda.device_count()
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "dask": importlib.metadata.version("dask"),
        "device": f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{CPU_COUNT} CPU cores",
    }


def _execute(notebook, path, seconds):
    quiet = ["--IPKernelApp.log_level=40"]  # it would warn of its own, local, connection
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=quiet,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": path.parent}},
    )
    client.reset_execution_trackers()
    with client.setup_kernel():
        for index, cell in enumerate(tqdm(notebook.cells, desc=path.stem, unit="cell")):
            start = time.perf_counter()
            client.execute_cell(cell, index, execution_count=client.code_cells_executed + 1)
            if cell.cell_type == "code":
                seconds.append(time.perf_counter() - start)


def _rename(value, paths, names):
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, (dict, list)):
            _rename(item, paths, names)
        elif isinstance(item, str) and not str(key).startswith("image/p"):
            value[key] = paths.sub(lambda found: names[found[1]], CELL.sub("cell", item))


if __name__ == "__main__":
    main()
