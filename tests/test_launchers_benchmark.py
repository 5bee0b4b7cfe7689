"""The benchmark of launchers counts the same lines for all, and sees what happens to a job."""

import importlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
from processes import has_ended

from workshop_utils import ddp

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = '''"""What it is,

in three lines."""

import time  # now


def run():
    """Do it."""
    # how
    for _ in range(3):  # measuring
        time.sleep(1)
'''


@pytest.fixture
def launchers(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "launchers")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("launchers")


@pytest.fixture
def tool(launchers, monkeypatch, tmp_path):
    """A function that makes a tool of one script's text, and returns its name."""

    def make(script):
        (tmp_path / "script.py").write_text(script)
        monkeypatch.setattr(launchers, "FOLDER", tmp_path)
        monkeypatch.setattr(launchers, "TOOLS", {"some tool": ("script.py", "click", "pip install click", None)})
        return "some tool"

    return make


def rows(*steps):
    """The rows of (time, pid, rank, epoch) as ranks note them."""
    return [
        {"time": at, "pid": pid, "rank": rank, "epoch": epoch, "step": 0, "loss": 1.0} for at, pid, rank, epoch in steps
    ]


def test_blank_lines_comments_docstrings_and_measuring_are_no_lines_of_the_user(launchers):
    assert launchers.count_lines(SCRIPT) == 3


def test_the_job_comes_to_the_same_loss_alone_and_on_two_ranks(launchers, client, monkeypatch, tmp_path):
    shared, with_workshop = importlib.import_module("shared"), importlib.import_module("with_workshop")
    for module in (shared, with_workshop):
        monkeypatch.setattr(module, "EPOCHS", 1)
        monkeypatch.setattr(module, "BATCH_SIZE", 2)
        cloudpickle.register_pickle_by_value(module)  # the workers cannot import it
    losses = ddp.run(client, with_workshop.train, str(tmp_path), n_workers=2)
    assert sum(losses) / 2 == pytest.approx(shared.loss_alone(), rel=1e-5)
    noted = shared.rows_of(tmp_path)
    assert sorted((row["rank"], row["step"]) for row in noted) == [(rank, step) for rank in (0, 1) for step in range(3)]
    for module in (shared, with_workshop):
        cloudpickle.unregister_pickle_by_value(module)


def test_a_tool_that_fails_is_named_with_its_last_words(launchers, tool):
    name = tool("print('first')\nraise SystemExit('no such thing')")
    with pytest.raises(launchers.NotRun, match="exit code 1.*no such thing"):
        launchers.measure(name, expected=1.0, kill=False)
    with pytest.raises(launchers.NotRun, match="second epoch.*exit code 1"):
        launchers.observe(name, kill=True)


def test_processes_that_a_tool_leaves_are_found_and_ended(launchers, tool, monkeypatch, tmp_path):
    monkeypatch.setattr(launchers, "LEAVE_S", 0.2)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    name = tool(f"import subprocess\nprint(subprocess.Popen({sleeper}, start_new_session=True).pid)")
    run = launchers.observe(name)
    assert run.code == 0 and len(run.left) == 1
    assert is_gone_soon(int(run.output[0][1]))


def is_gone_soon(pid, timeout_s=10):
    """Say whether a process that was killed ends."""
    give_up = time.monotonic() + timeout_s
    while not has_ended(pid) and time.monotonic() < give_up:
        time.sleep(0.05)
    return has_ended(pid)


def test_a_job_that_begins_anew_is_not_taken_for_one_that_resumed(launchers):
    before = rows((1, 10, 0, 0), (2, 11, 1, 0), (3, 10, 0, 1), (4, 11, 1, 1))

    def reborn(*later):
        return launchers.rebirth(SimpleNamespace(killed=5, left=[], jobs=[before + rows(*later)]), expected=1.0)

    assert reborn((6, 10, 0, 1))["resumed"] == "no"  # the survivor, ending its step
    assert reborn(*[(8 + n, 12 + n % 2, n % 2, 0) for n in range(6)])["resumed"] == "from start"
    resumed = reborn((6, 10, 0, 1), *[(8 + n, 12 + n % 2, n % 2, 1) for n in range(6)])
    assert (resumed["resumed"], resumed["again_s"]) == ("from checkpoint", 4)
    kept = reborn(*[(8 + n, (10, 12)[n % 2], n % 2, 1) for n in range(6)])  # rank 0 keeps its process
    assert (kept["resumed"], kept["again_s"]) == ("from checkpoint", 4)
    healed = reborn((8, 10, 0, 1), (9, 12, 1, 1), (10, 10, 0, 2), (11, 12, 1, 2))
    assert (healed["resumed"], healed["again_s"]) == ("where it was", 4)
