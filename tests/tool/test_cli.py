"""The command `workshop`, as a user types it."""

import os
import string
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_render import notebook

from workshop_utils.tool.cli import main

WORKSHOP = Path(sys.executable).parent / "workshop"


def workshop(*args, cwd=None, **env):
    """Run the installed command and return its CompletedProcess."""
    command = [WORKSHOP, *map(str, args)]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


def test_help_names_every_command_and_loads_nothing_heavy():
    code = "import sys; from workshop_utils.tool import cli; print({'torch', 'dask', 'nbclient'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
    said = workshop("--help")
    assert said.returncode == 0
    for command in ("lab", "run", "check", "data", "bench"):
        assert f"\n  {command} " in said.stdout


def test_run_renders_the_chosen_notebooks_and_prints_a_table(tmp_path):
    notebook(tmp_path, "import time; time.sleep(0.3)", name="01-one.ipynb")
    notebook(tmp_path, "2", name="02-two.ipynb")
    notebook(tmp_path, "3", name="03-three.ipynb")
    said = workshop("run", "02", "notebooks/01-one.ipynb", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    rows = [line.split() for line in said.stdout.strip().splitlines()]
    assert rows[0] == ["notebook", "cells", "minutes", "slowest,", "s"]
    assert [row[:2] for row in rows[1:]] == [["01-one.ipynb", "1"], ["02-two.ipynb", "1"]]
    assert float(rows[1][3]) >= 0.3
    assert sorted(path.name for path in (tmp_path / "notebook_output").iterdir()) == ["01-one.ipynb", "02-two.ipynb"]
    assert "01-one: 100%" in said.stderr


def test_run_goes_on_after_a_failure_and_ends_with_exit_code_1(tmp_path):
    notebook(tmp_path, "1", "raise ValueError('too few dogs')", name="01-bad.ipynb")
    notebook(tmp_path, "2", name="02-good.ipynb")
    said = workshop("run", "--output", tmp_path / "out", cwd=tmp_path)
    assert said.returncode == 1
    assert "01-bad.ipynb, code cell 2 of 2: ValueError: too few dogs" in said.stderr
    assert "Traceback" not in said.stderr
    assert os.listdir(tmp_path / "out") == ["02-good.ipynb"]


def test_an_unknown_notebook_is_answered_with_those_there_are(tmp_path, monkeypatch):
    notebook(tmp_path, "1")
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(main, ["run", "07"])
    assert said.exit_code == 1
    assert "Nothing in notebooks begins with '07'; it holds 01-try." in said.output


def test_lab_without_the_first_notebook_says_where_to_run_it(tmp_path):
    (tmp_path / "notebooks").mkdir()
    said = workshop("lab", "--no-browser", cwd=tmp_path)
    assert said.returncode == 1
    assert "There is no notebooks/01-getting-started.ipynb" in said.stderr and "Traceback" not in said.stderr


def test_sketches_are_written_once(tmp_path):
    first, second = (workshop("data", "sketches", "--per-breed", 1, WORKSHOP_CACHE=str(tmp_path)) for _ in range(2))
    assert first.stdout == f"120 new sketches in {tmp_path / 'sketches-1'}\n"
    assert second.stdout.startswith("0 new sketches")
    assert len(list(tmp_path.glob("sketches-1/*/*.jpg"))) == 120


def test_photos_out_of_reach_are_one_message(tmp_path):
    said = workshop("data", "photos", "--source", "http://127.0.0.1:9/images.tar", "--folder", tmp_path)
    assert said.returncode == 1
    assert "http://127.0.0.1:9/images.tar" in said.stderr and "workshop data sketches" in said.stderr
    assert "Traceback" not in said.stderr


def test_names_are_fetched_from_a_given_source(tmp_path):
    pets = [f"{first} {second}" for first in ("Max", "Zoë", "Bo", "Lu") for second in string.ascii_lowercase]
    (tmp_path / "pets.csv").write_text("Species,Animal's Name\n" + "".join(f"Cat,{pet}\n" for pet in pets))
    said = workshop("data", "names", "--source", tmp_path / "pets.csv", WORKSHOP_CACHE=str(tmp_path), WORKSHOP_NAMES="")
    path = tmp_path / "names.json"
    assert said.stdout == f"The names are in {path}; the lesson takes its 104 from {path}.\n", said.stderr


def test_names_out_of_reach_are_one_message(tmp_path):
    said = workshop("data", "names", "--source", "http://127.0.0.1:9/pets.csv", WORKSHOP_CACHE=str(tmp_path))
    assert said.returncode == 1
    assert "http://127.0.0.1:9/pets.csv" in said.stderr and "project's own list" in said.stderr
    assert "Traceback" not in said.stderr and not os.listdir(tmp_path)


def test_bench_lists_and_runs_scripts(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "inference.py").write_text("print('images/s')")
    (tmp_path / "benchmarks" / "broken.py").write_text("raise SystemExit(3)")
    assert workshop("bench", cwd=tmp_path).stdout == "broken\ninference\n"
    assert workshop("bench", "inf", cwd=tmp_path).stdout == "images/s\n"
    assert workshop("bench", "broken", cwd=tmp_path).returncode == 3
    assert "holds broken, inference" in workshop("bench", "none", cwd=tmp_path).stderr


@pytest.mark.parametrize("options", [["data", "sketches", "--per-breed", "0"], ["run", "--bogus"], ["nonsense"]])
def test_wrong_options_are_usage_errors(options):
    assert CliRunner().invoke(main, options).exit_code == 2
