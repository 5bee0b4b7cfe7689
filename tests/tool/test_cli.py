"""The command `workshop`, as a user types it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

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
    for command in ("lab", "check", "room", "join", "data", "bench"):
        assert f"\n  {command} " in said.stdout


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


def test_bench_lists_and_runs_scripts(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "inference.py").write_text("print('images/s')")
    (tmp_path / "benchmarks" / "broken.py").write_text("raise SystemExit(3)")
    assert workshop("bench", cwd=tmp_path).stdout == "broken\ninference\n"
    assert workshop("bench", "inference", cwd=tmp_path).stdout == "images/s\n"
    assert workshop("bench", "broken", cwd=tmp_path).returncode == 3
    assert "there are broken, inference" in workshop("bench", "none", cwd=tmp_path).stderr


@pytest.mark.parametrize("options", [["data", "sketches", "--per-breed", "0"], ["join", "--bogus"], ["nonsense"]])
def test_wrong_options_are_usage_errors(options):
    assert CliRunner().invoke(main, options).exit_code == 2
