"""The file of docs/take-home.md, as a reader runs it: from a shell, with a kill in the middle."""

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image

SCRIPT = Path(__file__).parents[1] / "deploy/train.py"


def epochs(lines):
    return [(int(attempt), int(epoch)) for attempt, epoch in re.findall(r"attempt (\d+)  epoch (\d+)", "".join(lines))]


def refused(*arguments):
    """Return what the script says as it fails."""
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr


def test_it_goes_on_after_a_kill_and_a_second_run_does_what_is_left(tmp_path):
    command, lines = [sys.executable, SCRIPT, tmp_path / "model.pt"], []
    with subprocess.Popen([*command, "5"], stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout:
            lines.append(line)
            if killed := re.search(r"process (\d+)  attempt 0  epoch 1 ", line):
                os.kill(int(killed[1]), signal.SIGKILL)
    assert running.returncode == 0
    attempts = dict(epochs(lines))
    assert set(attempts) == {0, 1}, "the kill came too late, or the job did not go on"
    assert [epoch for _, epoch in epochs(lines)] == [*range(attempts[0] + 1), *range(attempts[0] + 1, 5)]
    again = subprocess.run([*command, "6"], capture_output=True, text=True, check=True)
    assert epochs(again.stdout) == [(0, 5)]


def test_what_is_no_checkpoint_of_it_is_named_before_the_training(tmp_path):
    other = tmp_path / "other.pt"
    torch.save({"model": {}, "optimizer": {}, "epoch": 3}, other)
    assert f"{other} is no checkpoint of this training" in refused(other, "5")


def test_a_checkpoint_has_one_job_at_a_time_and_a_killed_one_blocks_nobody(tmp_path):
    path = str(tmp_path / "model.pt")
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['lock'](sys.argv[2]); print(flush=True); input()"
    command = [sys.executable, "-c", code, SCRIPT, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        first.stdout.readline()
        assert path in subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stderr
        first.kill()
    assert subprocess.run(command, input=b"\n").returncode == 0


def test_a_folder_that_is_not_there_is_named_before_the_training(tmp_path):
    lock = runpy.run_path(str(SCRIPT))["lock"]
    with pytest.raises(RuntimeError, match=f"no folder {str(tmp_path / 'none')!r} on this worker"):
        lock(str(tmp_path / "none" / "model.pt"))


@pytest.mark.weekly  # it waits a minute
def test_an_address_at_which_something_else_listens_is_named(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address)
        assert f"No Dask scheduler answered at '{address}'" in refused(tmp_path / "model.pt", "5")


def test_images_are_classified_into_parquet(tmp_path):
    colors = {"red": (250, 9, 9), "green": (9, 250, 9), "blue": (9, 9, 250)}
    for number in range(90):
        name = list(colors)[number % 3]
        (tmp_path / f"images/{number % 7}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), colors[name]).save(tmp_path / f"images/{number % 7}/{number:04}-{name}.png")
    (tmp_path / "images/broken.jpg").write_bytes(b"no image")
    command = [sys.executable, SCRIPT.with_name("predict.py"), tmp_path / "images", tmp_path / "out"]
    subprocess.run(command, check=True, capture_output=True)
    frame = pd.read_parquet(tmp_path / "out")
    assert len(frame) == 91 and frame.error.notna().sum() == 1
    right = frame[frame.error.isna()]
    assert (right.path.map(lambda path: Path(path).stem.rpartition("-")[2]) == right.label).all()
