"""What the benchmarks do on a GPU runs to its end on the CPU, too, before a GPU's time is spent on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def ran(script, folder, **env):
    """Run Python in benchmarks/ as a process of its own, with results in `folder`; return what it printed."""
    script = f"from pathlib import Path\nimport record\nrecord.RESULTS = Path({str(folder)!r})\n{script}"
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **env},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


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


@pytest.mark.long
def test_one_rank_and_two_that_share_a_gpu_are_compared_with_the_plain_loop(tmp_path):
    script = "import ddp, json\nif __name__ == '__main__':\n    print(json.dumps(ddp.on_one_gpu(1, 4, batches=(2,))))"
    seconds = json.loads(ran(script, tmp_path).splitlines()[-1])
    assert list(seconds) == ["2"] and all(step > 0 for step in seconds["2"].values())
    assert list(seconds["2"]) == ["plain loop", "DDP, one rank", "DDP, two ranks over gloo"]
