"""Notebooks are executed as they are in the lesson, and what is written changes only when results do."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

import dask
import nbformat
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from render import main, render, tidy


def notebook(folder, *sources, name="01-try.ipynb"):
    """Write a notebook with one code cell for each source, and return its path."""
    path = folder / "notebooks" / name
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)
    return path


def outputs(path):
    return [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]


def test_a_notebook_runs_in_its_own_folder_and_keeps_tags_and_counts(tmp_path):
    path = notebook(tmp_path, "import os; print(os.path.basename(os.getcwd()))", "6 * 7")
    book = nbformat.read(path, 4)
    book.cells[1].metadata.tags = ["solution"]
    book.cells.insert(1, new_markdown_cell("# Text"))
    book.metadata.kernelspec = {"name": "my-env", "display_name": "Mine", "language": "python"}
    nbformat.write(book, path)

    done = render(path, tmp_path / "out")

    assert (done.name, done.n_cells, len(done.seconds), done.error) == ("01-try.ipynb", 2, 2, None)
    written = nbformat.read(tmp_path / "out" / "01-try.ipynb", 4)
    nbformat.validate(written)
    assert written.cells[0].outputs[0].text == "notebooks\n"
    assert written.cells[2].outputs[0].data["text/plain"] == "42"
    assert [cell.get("execution_count") for cell in written.cells] == [1, None, 2]
    assert written.cells[2].metadata == {"tags": ["solution"]}
    assert written.metadata.kernelspec.name == "python3"
    assert outputs(path) == []


def test_a_run_says_when_it_was_and_with_what(tmp_path):
    path = notebook(tmp_path, "1 + 1")
    before = date.today().isoformat()
    assert render(path, tmp_path / "out").error is None
    run = nbformat.read(tmp_path / "out" / path.name, 4).metadata["verified"]
    assert before <= run["date"] <= date.today().isoformat()
    assert run["python"] == platform.python_version() and run["torch"] == importlib.metadata.version("torch")
    assert run["dask"] == importlib.metadata.version("dask") and run["device"]
    assert "verified" not in nbformat.read(path, 4).metadata


def test_minutes_are_those_of_a_cluster_on_this_machine(tmp_path):
    path = notebook(tmp_path, "1 + 1")
    source = nbformat.read(path, 4)
    source.cells.insert(0, new_markdown_cell("**Time:** long"))
    nbformat.write(source, path)
    for address, line in (("tcp://10.0.0.1:8786", "**Time:** long"), (None, "**Time:** 0 minutes in class; its cells")):
        with dask.config.set({"scheduler-address": address}):
            assert render(path, tmp_path / "out").error is None
        for written in (path, tmp_path / "out" / path.name):
            assert nbformat.read(written, 4).cells[0].source.startswith(line)


def test_two_runs_write_the_same_bytes(tmp_path):
    path = notebook(
        tmp_path,
        "import sys, time\nfor i in range(3):\n    print(i, flush=True); time.sleep(0.05)",
        "from tqdm.auto import tqdm\nfor _ in tqdm(range(3), bar_format='{n}'): pass",
        "import ipywidgets; ipywidgets.IntSlider()",
    )
    for folder in ("one", "two"):
        assert render(path, tmp_path / folder).error is None
    one, two = ((tmp_path / folder / path.name).read_text() for folder in ("one", "two"))
    assert one == two
    assert outputs(tmp_path / "one" / path.name)[0].text == "0\n1\n2\n"
    assert "model_id" not in one and 'execution"' not in one


def test_paths_of_this_machine_are_taken_out(tmp_path):
    here, home = str(tmp_path), str(Path.home())
    cell = new_code_cell(
        outputs=[
            new_output("stream", text=f"{here}/img/a.svg {home}/.cache/x {home}2/y {sys.prefix}/lib"),
            new_output("display_data", data={"text/html": f"<b>{here}</b>", "image/png": "aaaa"}),
            new_output("error", ename="E", evalue=here, traceback=[f"File {here}/a.py"]),
        ]
    )
    book = new_notebook(cells=[cell])
    tidy(book, tmp_path)
    assert cell.outputs[0].text == f"~/workshop/img/a.svg ~/.cache/x {home}2/y ~/python/lib"
    assert cell.outputs[1].data == {"text/html": "<b>~/workshop</b>", "image/png": "aaaa"}
    assert (cell.outputs[2].evalue, cell.outputs[2].traceback) == ("~/workshop", ["File ~/workshop/a.py"])


def test_a_failing_cell_is_named_and_the_earlier_file_stays(tmp_path):
    path = notebook(tmp_path, "print('fine')", "1 / 0", "print('never')")
    kept = tmp_path / "out" / path.name
    kept.parent.mkdir()
    kept.write_text("from an earlier run")
    done = render(path, tmp_path / "out")
    assert done.error == "code cell 2 of 3: ZeroDivisionError: division by zero"
    assert len(done.seconds) == 1
    assert kept.read_text() == "from an earlier run" and os.listdir(tmp_path / "out") == [path.name]


def test_a_result_that_cannot_be_written_is_no_fault_of_a_cell(tmp_path):
    (tmp_path / "out").touch()
    assert "code cell" not in (error := render(notebook(tmp_path, "1"), tmp_path / "out").error)
    assert str(tmp_path / "out") in error


@pytest.mark.parametrize(
    ("content", "reason"),
    [("not json", "NotJSONError"), (None, "FileNotFoundError"), ("{}", "ValidationError|KeyError|AttributeError")],
)
def test_a_file_that_is_no_notebook_is_reported(tmp_path, content, reason):
    path = tmp_path / "01-try.ipynb"
    if content:
        path.write_text(content)
    assert any(word in render(path, tmp_path / "out").error for word in reason.split("|"))


def test_a_kernel_that_dies_is_reported(tmp_path):
    done = render(notebook(tmp_path, "import os; os._exit(1)"), tmp_path / "out")
    assert done.error.startswith("code cell 1 of 1: DeadKernelError")


def test_the_chosen_notebooks_are_rendered_and_a_table_says_their_minutes(tmp_path):
    notebook(tmp_path, "import time; time.sleep(0.3)", name="01-one.ipynb")
    notebook(tmp_path, "2", name="02-two.ipynb")
    notebook(tmp_path, "3", name="03-three.ipynb")
    command = [sys.executable, Path(__file__).parents[2] / "tools/render.py", "02", "01-one.ipynb"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    rows = [line.split() for line in said.stdout.strip().splitlines()]
    assert rows[0] == ["notebook", "cells", "minutes", "slowest,", "s"]
    assert [row[:2] for row in rows[1:]] == [["01-one.ipynb", "1"], ["02-two.ipynb", "1"]]
    assert float(rows[1][3]) >= 0.3
    assert sorted(path.name for path in (tmp_path / "notebook_output").iterdir()) == ["01-one.ipynb", "02-two.ipynb"]
    assert "01-one: 100%" in said.stderr


def test_a_failing_notebook_does_not_stop_the_others(tmp_path, monkeypatch):
    notebook(tmp_path, "1", "raise ValueError('too few dogs')", name="01-bad.ipynb")
    notebook(tmp_path, "2", name="02-good.ipynb")
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(main)
    assert said.exit_code == 1
    assert "01-bad.ipynb, code cell 2 of 2: ValueError: too few dogs" in said.output
    assert os.listdir(tmp_path / "notebook_output") == ["02-good.ipynb"]


def test_an_unknown_notebook_is_answered_with_those_there_are(tmp_path, monkeypatch):
    notebook(tmp_path, "1")
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(main, ["07"])
    assert said.exit_code == 1 and "'07'" in said.output and "01-try" in said.output
