"""What one job leaves in a warm worker does not reach the next."""

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

LEFT: list = []  # in each worker: the errors of threads that a job has left


def log_for_good():
    def log():
        try:
            while True:
                daskrun.log_metrics(stray=1)
                threading.Event().wait(0.05)
        except ValueError as error:
            LEFT.append(str(error))

    threading.Thread(target=log, daemon=True, name="stray").start()


def log_from_a_new_thread():
    until(lambda: LEFT)
    thread = threading.Thread(target=daskrun.log_metrics, kwargs={"mine": 1})
    thread.start()
    thread.join()
    daskrun.log_metrics(mine=2)
    return LEFT.pop()


def test_a_thread_that_a_job_has_left_logs_nothing_in_the_next(client):
    daskrun.run(client, log_for_good)
    with daskrun.launch(client, log_from_a_new_thread) as job:
        rows = list(job.rows())
        assert {row["mine"] for row in rows} == {1, 2} and len(rows) == 4
        assert all("Thread stray is older than this job" in said for said in job.result())


def test_warnings_are_no_errors_for_a_plain_task_after_a_job_that_made_them(client):
    daskrun.run(client, warnings.simplefilter, "error")
    assert client.submit(warnings.warn, "harmless", pure=False).result() is None


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
        daskrun.launch(client, take, timeout=100).result()
        daskrun.run(client, take, 3, stall_after=1)
        list(daskrun.launch(client, take, 3, stall_after=1).rows())
    said = [(str(warning.message).partition(" for ")[0], warning.filename) for warning in caught]
    assert [file for _, file in said] == [__file__] * 3, said
    with pytest.warns(UserWarning, match="^said$") as caught:
        exec(compile("\nwarn('said')", "/tmp/ipykernel_1/2.py", "exec"), {"warn": warn})
    assert (caught[0].filename, caught[0].lineno) == ("cell", 2)  # of a notebook


def test_the_rows_of_a_job_need_not_be_kept(client):
    with daskrun.launch(client, daskrun.log_metrics, loss=1) as job:
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
        daskrun.run(client, raise_from_itself, timeout=60)
    with pytest.raises(ValueError, match="above") as caught:
        daskrun.run(client, raise_from_what_cannot_be_sent, timeout=60)
    assert any("Locked('the cause')" in note for note in caught.value.__notes__)
    with pytest.raises(daskrun.JobError, match=r"sys.exit\(3\)") as caught:
        daskrun.run(client, exit_after_an_error, timeout=60)
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


def log_as_a_plain_task(gate):
    until(gate.exists)
    daskrun.log_metrics(plain=1)
    return "done"


def wait_for_a_plain_task(gate):
    gate.touch()
    until(lambda: gate.with_suffix(".done").exists())
    daskrun.log_metrics(mine=1)


def test_a_plain_task_beside_a_rank_logs_nothing(tmp_path):
    gate = tmp_path / "gate"
    with daskrun.start_local(1, threads_per_worker=2) as client, client.cluster:
        for _ in range(2):  # with a new thread, and with one older than the job
            with daskrun.launch(client, wait_for_a_plain_task, gate) as job:
                assert client.submit(log_as_a_plain_task, gate, pure=False).result() == "done"
                gate.with_suffix(".done").touch()
                assert [sorted(row) for row in job.rows()] == [["attempt", "mine", "rank", "time", "worker"]]
            gate.unlink()
            gate.with_suffix(".done").unlink()
