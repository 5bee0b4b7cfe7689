"""`make gpu` refuses a machine without a GPU, and a failed step stops no other; wheels for it are the pinned ones."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import has_ended

ROOT = Path(__file__).parents[1]


@pytest.fixture
def prove(tmp_path):
    """A function that calls the tool with a Python that only says what it would run, and fails for `fails` in it."""

    def prove(*arguments, fails="nothing"):
        programs = {
            "nvidia-smi": "echo GPU 0",  # else the tool would end at once
            "python": f'case "$*" in *{fails}*) echo "went wrong"; exit 3;; *) echo "$@";; esac',
        }
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        command = [sys.executable, "tools/prove_gpu.py", "--python", tmp_path / "python", "--logs", tmp_path / "logs"]
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run([*command, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)

    return prove


def table(result):
    """Return {step: its result and seconds} as printed."""
    rows = result.stdout[result.stdout.index("step ") :].splitlines()[1:-1]
    return dict(row.split(maxsplit=1) for row in rows)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_a_machine_without_a_gpu_is_refused_at_once_in_one_sentence():
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode and not result.stdout
    assert "nvidia-smi finds no GPU" in result.stderr.splitlines()[0]


def test_a_failed_step_stops_no_other_but_fails_the_whole(prove):
    result = prove("tests", "notebook-06", "ddp", fails="06")
    assert result.returncode == 1 and "went wrong" in result.stdout
    assert [row.split("  ")[0] for row in table(result).values()] == ["passed", "failed, exit code 3", "passed"]


def test_an_unknown_step_is_named_with_the_known_ones(prove):
    result = prove("everything")
    assert result.returncode == 2 and "'everything'" in result.stderr and "environment" in result.stderr


def test_a_step_ends_at_its_limit_with_the_processes_it_started(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import prove_gpu

    monkeypatch.setattr(prove_gpu, "LIMIT_S", 1)
    log = tmp_path / "log"
    assert prove_gpu.outcome(("sh", "-c", "sleep 60 & echo $!; wait"), log, set()) == "not done after 1 s"
    give_up = time.monotonic() + 10
    while not has_ended(int(log.read_text().splitlines()[-1])):
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.mark.long
def test_what_a_gpu_run_depends_on_is_printed_though_a_part_fails(tmp_path):
    command = [sys.executable, "tools/gpu_environment.py", "--device", "cpu"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PATH": "/no/such"})
    assert result.returncode == 1 and "failed: driver" in result.stderr
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert list(lines) == ["software", "driver", "cores", "affinity", "torchcodec", "torchvision"]
    assert "nvidia-smi" in lines["driver"] and "dask==" in lines["software"]
    assert all(lines[name].startswith("256 JPEGs of 500x375 on cpu") for name in ("torchcodec", "torchvision"))


@pytest.mark.parametrize("python", ["3.12", "3.14"])
def test_each_wheel_is_carried_once_pinned_and_none_that_comes_with_pytorch(monkeypatch, python):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import fetch_wheels

    groups = fetch_wheels.packages(python)
    names = [name for group in groups.values() for name in group]
    assert len(names) == len(set(names)) and not {"torch", "torchvision", "numpy"} & set(names)
    assert {"tblib", "rapids-dask-dependency", "torchcodec"} <= set(groups["A"])  # two are needed by what it names
    lines = fetch_wheels.pinned(names, python)
    assert all(
        line.startswith(f"{name}==") and "--hash=" in line and ";" not in line
        for name, line in zip(names, lines, strict=True)
    )


def test_a_package_without_a_pin_is_named(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import fetch_wheels

    with pytest.raises(SystemExit, match="no-such-package"):
        fetch_wheels.pinned(["dask", "no-such-package"], "3.12")
