"""`make` notices an environment that cannot work, and installs into its own whatever the shell says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def venv(tmp_path):
    """A virtual environment whose installers write down how they were called."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    for name in ("pip", "uv"):
        note_calls(folder, name)
    return folder


def note_calls(venv, name):
    script = venv / "bin" / name
    script.write_text(f'#!/bin/sh\n# {venv}/bin/python\n(echo "$0 $@"; env) >>"{venv.parent}/calls"\n')
    script.chmod(0o755)


def why(venv, *remove):
    command = [ROOT / "tools/why_broken.sh", venv, *remove]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def make(venv, *words, **environment):
    command = ["make", *words, f"VENV={venv}", f"PYTHON={sys.executable}"]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    ).stdout


def interrupt(venv):
    (venv / ".installing").touch()
    return venv


def move(venv):
    return venv.rename(venv.with_name("moved"))


def remove_python(venv):
    for path in (venv / "bin").glob("python*"):
        path.unlink()
    (venv / "bin" / "python").symlink_to(venv / "gone")
    return venv


def upgrade_python(venv):
    (library,) = (venv / "lib").glob("python*")
    library.rename(library.with_name("python3.1"))
    return venv


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (interrupt, "interrupted"),
        (move, "another folder"),
        (remove_python, "Python is gone"),
        (upgrade_python, "another one"),
    ],
)
def test_a_broken_environment_is_made_anew_but_not_one_that_is_linked(venv, happens, reason):
    assert why(venv) == ""
    (venv / ".ready").touch()
    broken = happens(venv)
    assert reason in why(broken)
    assert f"{broken} remove" in make(broken, "-n", "setup")
    link = venv.with_name("link")
    link.symlink_to(broken)
    assert why(link) == ""


@pytest.mark.parametrize("goal", ["setup", "remove"])
def test_a_folder_that_is_no_environment_keeps_what_it_holds(goal, venv, tmp_path):
    (folder := tmp_path / "work").mkdir()
    (folder / "thesis.tex").write_text("years of work")
    make_it = ["make", "--eval", "remove: ; $(REMOVE_VENV)", goal, f"VENV={folder}", f"PYTHON={sys.executable}"]
    done = subprocess.run(make_it, cwd=ROOT, capture_output=True, text=True)
    assert (folder / "thesis.tex").read_text() == "years of work"
    assert goal == "remove" or (done.returncode and "no virtual environment" in done.stderr)
    make_it[-2] = f"VENV={venv}"
    assert goal == "setup" or (subprocess.run(make_it, cwd=ROOT, check=True) and not venv.exists())


def test_a_second_make_leaves_the_first_alone(venv):
    first = subprocess.Popen(["sleep", "100"])
    (venv / ".installing").write_text(f"{first.pid}\n")
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        make(venv, "setup")
    assert f"process {first.pid}" in stopped.value.stderr and (venv / "bin/python").exists()
    first.kill()
    first.wait()
    assert "made anew" in why(venv, "remove") and not venv.exists()


def test_an_installation_leaves_its_mark_until_it_is_complete(venv):
    make(venv, "setup")
    assert (venv / ".ready").exists() and not (venv / ".installing").exists() and why(venv) == ""
    (venv / ".ready").unlink()
    (venv / "bin" / "uv").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        make(venv, "setup")
    assert "interrupted" in why(venv)


@pytest.mark.parametrize("code", [0, 1])
def test_the_set_up_draws_the_sketches_and_goes_on_without_them(venv, code):
    (venv / "bin/workshop").write_text(f'#!/bin/sh\necho "it ran $@"\nexit {code}\n')
    (venv / "bin/workshop").chmod(0o755)
    said = make(venv, "setup")
    assert "it ran data sketches\n" in said and (venv / ".ready").exists()
    assert ("No sketches were drawn" in said) == bool(code)


def test_settings_for_other_environments_do_not_reach_the_installation(venv, tmp_path):
    settings = {"PIP_USER": "1", "PIP_REQUIRE_HASHES": "1", "UV_SYSTEM_PYTHON": "1", "UV_PYTHON": "3.9"}
    settings |= {"PYTHONPATH": "/elsewhere", "PYTHONHOME": "/elsewhere"}
    make(venv, "setup", "CPU=1", **settings, PIP_INDEX_URL="https://pins.example/simple")
    said = (tmp_path / "calls").read_text()
    calls = [line for line in said.splitlines() if line.startswith(f"{venv}/bin/uv ")]
    assert len(calls) == 2 and all(f"--python {venv}/bin/python" in call for call in calls)
    assert not [name for name in settings if f"\n{name}=" in said]
    assert "\nPIP_INDEX_URL=https://pins.example/simple\n" in said, "a company's own index stays"


def test_the_lessons_outlive_test_packages_that_cannot_be_had(venv, tmp_path):
    (venv / "bin/uv").write_text("#!/bin/sh\nexit 2\n")
    (venv / ".ready").touch()
    with pytest.raises(subprocess.CalledProcessError) as refused:
        make(venv, "setup-test")
    assert "The lessons go on without it: make lab" in refused.value.output
    assert why(venv) == "" and "remove" not in make(venv, "-n", "setup")
    note_calls(venv, "uv")
    make(venv, "setup-test")
    assert "--reinstall --require-hashes" in (tmp_path / "calls").read_text()
    assert not list(venv.glob(".installing*"))
