"""The benchmarks' GPU modes run to their end, here on the CPU, and name their figures after the GPU."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def record(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("record")


def ran(script, folder, **env):
    """Run Python in benchmarks/ as a process of its own, with results in `folder`; return what it printed."""
    script = f"from pathlib import Path\nimport record\nrecord.RESULTS = Path({str(folder)!r})\n{script}"
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240,
                            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **env})  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("gpu", "file"),
    [
        ("NVIDIA H200", "h200-inference.json"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb-inference.json"),
        ("Tesla T4", "t4-inference.json"),
    ],
)
def test_figures_of_a_gpu_bear_its_name(record, monkeypatch, gpu, file):
    monkeypatch.setattr(record.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record.torch.cuda, "get_device_name", lambda: gpu)
    assert record.result_path("inference").name == file
    assert record.result_path("runs", ".jsonl").name.endswith("-runs.jsonl")


def test_the_gpus_use_is_logged_with_what_ran_at_the_time(record, monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "asked: $*"\nexec sleep 60\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(record.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    with record.gpu_watched("inference") as mark:
        mark("classify begins")
        log = tmp_path / "h200-inference.dmon.txt"
        while "asked" not in log.read_text():
            pass
    assert "classify begins" in log.read_text() and "asked: dmon -s u -o T" in log.read_text()


@pytest.mark.long
def test_classify_is_compared_with_what_a_user_would_choose_and_with_its_slower_stage(weights, tmp_path):
    printed = ran("import gpu_inference\ngpu_inference.compare(24, 1, 'cpu')", tmp_path, WORKSHOP_WEIGHTS=weights)
    figures = json.loads(next(tmp_path.glob("*-inference.json")).read_text())
    rate = figures["images_per_s"]
    stages = {name: rate[name] for name in ("read and decode alone", "forward alone")}
    loaders = [value for name, value in rate.items() if name.startswith("DataLoader")]
    assert len(loaders) == 2 and figures["photos"] == 24
    assert figures["ratios"]["classify / bound"] == pytest.approx(rate["classify"] / min(stages.values()))
    assert figures["ratios"]["classify / best DataLoader"] == pytest.approx(rate["classify"] / max(loaders))
    assert ("Ray Data" in " ".join(rate)) != ("not run: Ray is not installed" in printed)


def test_thousands_of_photos_are_links_to_a_few_drawn_ones(record, monkeypatch, tmp_path):
    gpu_inference = importlib.import_module("gpu_inference")
    monkeypatch.setattr(gpu_inference, "N_DISTINCT", 3)
    gpu_inference.write_links(tmp_path, 200)
    photos = gpu_inference.list_photos(tmp_path)
    assert len(photos) == 200 and len({os.stat(photo).st_ino for photo in photos}) == 3


@pytest.mark.long
def test_one_rank_and_two_that_share_a_gpu_are_compared_with_the_plain_loop(tmp_path):
    script = "import ddp, json\nif __name__ == '__main__':\n    print(json.dumps(ddp.on_one_gpu(1, 4, batches=(2,))))"
    seconds = json.loads(ran(script, tmp_path).splitlines()[-1])
    assert list(seconds) == ["2"] and all(step > 0 for step in seconds["2"].values())
    assert list(seconds["2"]) == ["plain loop", "DDP, one rank", "DDP, two ranks over gloo"]


@pytest.mark.long
def test_runs_on_one_gpu_compare_settings_on_one_worker_and_workers_that_share_it(tmp_path):
    script = """
import runs
runs.n_gpus, runs.PER_BREED = lambda: 1, 4
quick = {"epochs": 1, "batch_size": 8, "warmup_steps": 0}
runs.STUDIES = {"strong scaling": [quick, quick | {"workers": 2}], "settings": [quick | {"compression": "fp16"}]}
if __name__ == "__main__":
    runs.main(["--rounds", "1"], standalone_mode=False)
"""
    assert "2 runs" in ran(script, tmp_path, WORKSHOP_CACHE=str(tmp_path / "cache"))
    about = json.loads(next(tmp_path.glob("*-runs.json")).read_text())
    assert about["sharing_one_gpu"] and sorted(run["workers"] for run in about["runs"]) == [1, 2]
    rows = [json.loads(line) for line in next(tmp_path.glob("*-runs.jsonl")).read_text().splitlines()]
    assert {row["run"] for row in rows} == {0, 1} and any("val_accuracy" in row for row in rows)
