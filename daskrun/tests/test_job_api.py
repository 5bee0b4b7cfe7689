"""What a job hands its caller: warnings, rows, types, and errors with all that belongs to them."""

import inspect
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from waiting import until

import daskrun
from daskrun.errors import warn


def raise_a_group():
    raise BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("no")])


def test_a_group_of_ends_is_told_as_it_is(client):
    with pytest.raises(daskrun.JobError, match=r"BaseExceptionGroup.*KeyboardInterrupt.*ValueError\('no'\)"):
        daskrun.run(client, raise_a_group)


def take(timeout=3):
    threading.Event().wait(timeout)


def test_a_warning_points_at_the_users_line(client):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        daskrun.run(client, take, 3, stall_after=1)
        list(daskrun.launch(client, take, 3, stall_after=1).rows())
    said = [(str(warning.message).partition(" for ")[0], warning.filename) for warning in caught]
    assert [file for _, file in said] == [__file__] * 2, said
    with pytest.warns(UserWarning, match="^said$") as caught:
        exec(compile("\nwarn('said')", "/tmp/ipykernel_1/2.py", "exec"), {"warn": warn})
    assert (caught[0].filename, caught[0].lineno) == ("cell", 2)  # of a notebook


def test_the_rows_of_a_job_need_not_be_kept(client):
    with daskrun.launch(client, daskrun.log_metrics, kwargs={"loss": 1}) as job:
        assert len(list(job.rows(keep=False))) == 2
        assert len(job.metrics()) == 0


def test_a_tooltip_of_run_shows_the_settings_of_launch():
    assert list(inspect.signature(daskrun.run).parameters) == list(inspect.signature(daskrun.launch).parameters)


def test_types_reach_the_user(tmp_path):
    (tmp_path / "user.py").write_text(
        "import daskrun\n"
        "from distributed import Client\n"
        "def rank() -> int: return 1\n"
        "def use(client: Client) -> None:\n"
        "    reveal_type(daskrun.run(client, rank))\n"
        "    reveal_type(daskrun.launch(client, rank).result())\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-site-packages", "--ignore-missing-imports", "user.py"]
    environment = {"MYPYPATH": str(Path(daskrun.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert len(re.findall(r'Revealed type is "(builtins.)?list\[(builtins.)?int\]"', done.stdout)) == 2, done.stdout


def test_windows_is_refused_with_a_sentence():
    code = "import sys; sys.platform = 'win32'; import daskrun"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "on Windows, install it in WSL" in done.stderr


def raise_from_itself():
    try:
        int("x")
    except ValueError as error:
        raise error from error


class Locked(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def raise_from_what_cannot_be_sent():
    try:
        raise Locked("the cause")
    except Locked as error:
        raise ValueError("above") from error


def exit_after_an_error():
    try:
        raise KeyError("the reason")
    except KeyError:
        sys.exit(3)


def test_an_errors_chain_arrives_as_far_as_it_can(client):
    with pytest.raises(ValueError, match="invalid literal"):
        daskrun.run(client, raise_from_itself, time_limit=60)
    with pytest.raises(ValueError, match="above") as caught:
        daskrun.run(client, raise_from_what_cannot_be_sent, time_limit=60)
    assert any("Locked('the cause')" in note for note in caught.value.__notes__)
    with pytest.raises(daskrun.JobError, match=r"sys.exit\(3\)") as caught:
        daskrun.run(client, exit_after_an_error, time_limit=60)
    assert isinstance(caught.value.__cause__, KeyError)


def log_many():
    for number in range(50):
        daskrun.log_metrics(number=number)


def test_rows_are_read_by_several_and_none_is_lost_or_awaited_for_good(client):
    with daskrun.launch(client, log_many) as job:
        job.result()
        until(lambda: len(job.metrics()) == 100)
        kept = job.rows()
        assert next(kept)["number"] == 0
        first = next(job.rows(keep=False))  # and leave the others
        read = [first, *job.rows(keep=False)]
        assert [[row["number"] for row in read if row["rank"] == rank] for rank in (0, 1)] == [list(range(50))] * 2
        assert list(kept) == []


def test_a_rank_that_has_nothing_next_is_told(client):
    with pytest.raises(daskrun.JobError, match="StopIteration"):
        list(daskrun.launch(client, next, iter([])).rows())
