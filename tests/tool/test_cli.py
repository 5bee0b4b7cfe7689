"""The command `workshop`, as a user types it."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from jupyterlab.labapp import LabApp

from workshop_utils import photos
from workshop_utils.tool import FIRST, check, cli
from workshop_utils.tool.cli import main

ROOT = Path(__file__).parents[2]
WORKSHOP = Path(sys.executable).parent / "workshop"


def workshop(*args, cwd=None):
    """Run the installed command and return its CompletedProcess."""
    command = [WORKSHOP, *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_help_names_every_command_and_loads_nothing_heavy():
    code = "import sys; from workshop_utils.tool import cli; print({'torch', 'dask', 'nbclient'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
    said = workshop("--help")
    assert said.returncode == 0
    for command in ("lab", "check", "room", "join", "data", "bench"):
        assert f"\n  {command} " in said.stdout
    assert "..." not in said.stdout.partition("Commands:")[2], "a line is cut"


def test_lab_without_the_first_notebook_says_where_to_run_it(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "workshop_utils/tool/cli.py"))  # as where pip installs it
    said = CliRunner().invoke(main, ["lab", "--no-browser"])
    assert said.exit_code == 1 and "There is no notebooks/01-getting-started.ipynb" in said.output


def test_check_in_a_folder_with_notebooks_of_its_own_looks_at_the_workshops_pins(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / FIRST).touch()  # a copy, to play with
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(check, "run_checks", lambda *args: asked.append(args) or [("Python", True, "fine")])
    assert CliRunner().invoke(main, ["check"]).exit_code == 0
    assert asked == [(ROOT / "requirements.txt", None)]


@pytest.mark.smoke
def test_lab_gives_jupyterlab_what_the_user_wrote_and_sets_nothing_twice(monkeypatch):
    known = ["--debug", "--ip=0.0.0.0", "--port-retries", "-1", "--ServerApp.port=9", "--IdentityProvider.token=x", "a"]
    known += ["--S3ContentsManager.bucket=x", "--LanguageServerManager.autodetect=True"]  # of extensions
    given = []

    def initialize_server(argv):
        given[:] = argv
        raise SystemExit(7)

    monkeypatch.setattr(LabApp, "initialize_server", initialize_server)
    assert CliRunner().invoke(main, ["lab", "--no-browser", "--port", "8"]).exit_code == 7
    assert {"--ServerApp.ip=127.0.0.1", "--ServerApp.port=8", "--ServerApp.open_browser=False"} < set(given)
    assert CliRunner().invoke(main, ["lab", "--port", "8", *known]).exit_code == 7
    assert given[-len(known) :] == known
    names = {one.partition("=")[0] for one in given[: -len(known)]}
    assert not names & {"--ServerApp.ip", "--ServerApp.port", "--LanguageServerManager.autodetect"}


def test_a_folder_that_was_deleted_meanwhile_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    said = CliRunner().invoke(main, ["bench"])
    assert said.exit_code == 1 and "This folder is gone: cd" in said.output


def test_sketches_are_drawn_once_and_not_where_there_are_photos(tmp_path, monkeypatch, dogs):
    monkeypatch.setattr(photos, "find_data", partial(photos.find_data, 1))
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WORKSHOP_DATA", str(dogs))
    said = CliRunner().invoke(main, ["data", "sketches"])
    assert said.exit_code == 0 and "WORKSHOP_DATA is set" in said.output and not (tmp_path / "cache").exists()
    monkeypatch.delenv("WORKSHOP_DATA")
    drawn = []
    for _ in range(2):
        said = CliRunner().invoke(main, ["data", "sketches"])
        assert said.exit_code == 0 and "120 sketches are in" in said.output
        drawn.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jpg")})
    assert len(drawn[0]) == 120 and drawn[0] == drawn[1]
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "file"))
    said = CliRunner().invoke(main, ["data", "sketches"])
    assert said.exit_code == 1 and "export WORKSHOP_CACHE=" in said.output


@pytest.mark.parametrize(
    "options",
    [["data", "cats"], ["join", "--threads", "0"], ["lab", "--port", "99999"], ["bench", "--all", "ddp"]],
)
def test_wrong_options_are_usage_errors(options):
    assert CliRunner().invoke(main, options).exit_code == 2
