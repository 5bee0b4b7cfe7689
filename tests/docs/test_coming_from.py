"""The page for those who come from another launcher: its code runs, and every launcher comes to the same loss."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
INTRODUCTION = PAGE.partition("\n## ")[0]
SECTIONS = re.findall(r"^## From (.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROBLEM, START = BLOCK.findall(INTRODUCTION)
PRINTED = re.compile(r"^\[?(\d[\d.e-]+)(?:, \d[\d.e-]+\])?$", re.MULTILINE)  # a loss, or the list of both ranks' losses
BIN = Path(sys.executable).parent


def code(name, whose):
    (section,) = [section for section in SECTIONS if section.startswith(f"{name}\n")]
    ours, theirs = BLOCK.findall(section)
    return {"ours": ours, "theirs": theirs}[whose]


NAMES = [section.split("\n")[0] for section in SECTIONS]


def loss_in(printed):
    (loss,) = PRINTED.findall(printed)
    return float(loss)


@pytest.fixture(scope="module")
def expected():
    """The loss of the plain loop in one process, on the batches of both ranks together."""
    names = {}
    exec(PROBLEM, names)
    torch = names["torch"]
    model, dataset = names["problem"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for x, y in torch.utils.data.DataLoader(dataset, batch_size=16):
            optimizer.zero_grad()
            names["mse_loss"](model(x), y).backward()
            optimizer.step()
    return names["mse_loss"](model(dataset.tensors[0]), dataset.tensors[1]).item()


@pytest.fixture(scope="module")
def names():
    """What the page's first two examples define, in a notebook: functions go by value to the workers."""
    names = {"__name__": "__main__"}
    exec(PROBLEM + START, names)
    yield names
    names["client"].shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_our_side_comes_to_the_loss_of_the_plain_loop(name, names, expected, capsys):
    exec(code(name, "ours"), dict(names))
    assert loss_in(capsys.readouterr().out) == pytest.approx(expected, rel=1e-5)


@pytest.mark.weekly
def test_a_script_for_torchrun_comes_to_that_loss_under_our_command(expected, tmp_path):
    (tmp_path / "train.py").write_text(PROBLEM + code("torchrun", "theirs"), encoding="utf-8")
    command = [BIN / "daskrun", "-n", "2", "train.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert loss_in(result.stdout.removeprefix("[rank0]: ")) == pytest.approx(expected, rel=1e-5)


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["dask-pytorch-ddp", "torchrun", "Accelerate"])
def test_their_side_comes_to_the_same_loss(name, expected, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROBLEM + code(name, "theirs"), encoding="utf-8")
    ranks = [BIN / "torchrun", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, script] if name == "dask-pytorch-ddp" else [*ranks, script]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert loss_in(result.stdout) == pytest.approx(expected, rel=1e-5)
