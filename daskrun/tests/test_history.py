"""What is kept of jobs, and shown of them, from what a scheduler is told."""

import math
import time

import pytest
from distributed import Client
from test_command import command, write
from waiting import until

import daskrun
from daskrun.claims import Request, Worker
from daskrun.history import ATTEMPTS, ENDED, LONGEST, NAMES, POINTS, History
from daskrun.protocol import Event, JobState, RankState
from daskrun.scheduler import history_of


def workers(n):
    return [
        Worker(f"tcp://{number}", f"process {number}", f"slot {number}", "host", str(number)) for number in range(n)
    ]


def begun(n=2, attempts=1):
    """Return the history of one job whose ranks have begun, and the job."""
    history = History()
    history.asks(Request("train-1", "kernel", attempts=attempts))
    history.begins("train-1", workers(n))
    for rank in range(n):
        history.hears(Event.BEGAN, "train-1", [0, rank, f"tcp://{rank}"], 2)
    return history, history.jobs["train-1"]


def again(history, attempt):
    history.asks(Request("train-1", "kernel", attempt=attempt, attempts=99))
    history.begins("train-1", workers(2))


def log(history, now, rank=0, attempt=0, **row):
    row |= {"rank": rank, "attempt": attempt, "time": now, "worker": "w"}
    history.hears(Event.ROW, "train-1", [row], now)


def states(job):
    return [str(rank.state) for rank in job.ranks]


def steps(job, metric="loss"):
    return {whose: [point.step for point in line.points] for whose, line in job.lines[metric].items()}


def test_a_job_waits_runs_and_is_finished():
    history = History()
    history.asks(Request("train-x-1", "kernel", attempts=3))
    (job,) = history.jobs.values()
    assert (job.name, job.state, job.attempt, job.attempts) == ("train-x", JobState.WAITING, 0, 3)
    history.begins("train-x-1", workers(2))
    assert states(job) == ["starting", "starting"]
    for rank in (0, 1):
        history.hears(Event.BEGAN, "train-x-1", [0, rank, "w"], 8)
    assert (job.state, states(job)) == (JobState.RUNNING, ["running", "running"])
    history.returns("train-x-1", 0, 0)
    assert states(job) == ["finished", "running"] and not job.is_over
    history.ends("train-x-1", JobState.FINISHED)
    assert (states(job), job.error, job.is_over) == (["finished", "finished"], "", True)


def test_after_a_death_the_next_attempt_has_lines_of_its_own_and_the_death_is_marked():
    history, job = begun(attempts=2)
    for rank in (0, 1):
        log(history, 3, rank, step=1, loss=1.0)
    history.hears(Event.GONE, "train-1", ["process 1"], 4)
    history.ends("train-1", JobState.ENDING, "WorkerDied: Rank 1 died")
    assert states(job) == ["stopped", "dead"] and not job.is_over
    again(history, 1)
    log(history, 7, 0, attempt=0, step=2, loss=9.0)  # of the attempt that is over
    log(history, 8, 0, attempt=1, pid="123")  # which is no metric, and no step 1
    log(history, 8, 0, attempt=1, step=2, loss=0.5)
    assert job.attempt == 1 and job.deaths == {(0, 1): 1} and job.starts == {0: 1, 1: 2}
    assert steps(job) == {(0, 0): [1], (0, 1): [1], (1, 0): [2]}
    history.ends("train-1", JobState.FINISHED)
    assert job.error == "WorkerDied: Rank 1 died"


def test_a_failed_rank_and_its_error_are_kept_and_nothing_after_the_end():
    history, job = begun(3)
    history.returns("train-1", 0, 2)
    history.hears(Event.FAILED, "train-1", [0, 1, b"", "", False, "", []], 3)
    assert job.state is JobState.ENDING
    history.ends("train-1", JobState.FAILED, f"ValueError: {'x' * 2 * LONGEST}")
    assert states(job) == ["stopped", "failed", "finished"] and job.state is JobState.FAILED
    assert len(job.error) <= LONGEST + 2
    log(history, 9, loss=1.0)
    history.ends("train-1", JobState.CANCELLED)
    assert job.state is JobState.FAILED and not job.lines


def test_a_client_that_is_gone_ends_its_jobs_alone():
    history, job = begun()
    history.asks(Request("other-1", "another kernel"))
    history.loses("kernel")
    assert job.state is JobState.FAILED and not history.jobs["other-1"].is_over


def test_what_is_kept_is_bounded():
    history, job = begun()
    for step in range(10 * POINTS):
        log(history, step, step=step, loss=1.0)
    for number in range(2 * NAMES):
        log(history, 0, **{f"metric {number}": 1.0, "y" * 2 * LONGEST: 1.0})
    history.hears(Event.OUTPUT, "train-1", [0, 0, [(False, b"z" * 2 * LONGEST)] * 1000], 5)
    found = steps(job)[0, 0]
    assert len(found) <= POINTS + 1 and (found[:3], found[-1]) == ([0, 16, 32], 10 * POINTS - 1)
    assert len(job.lines) == NAMES and max(map(len, job.lines)) <= LONGEST
    assert len(job.ranks[0].last_line) <= LONGEST + 2
    for attempt in range(1, 3 * ATTEMPTS):
        history.hears(Event.GONE, "train-1", ["process 1"], attempt)
        history.ends("train-1", JobState.ENDING, "WorkerDied")
        again(history, attempt)
        log(history, attempt, attempt=attempt, step=1, loss=1.0)
    assert len(job.lines["loss"]) == len(job.starts) == ATTEMPTS == len(job.deaths) + 1
    for number in range(2 * ENDED):
        history.asks(Request(f"job-{number}", "kernel"))
        history.ends(f"job-{number}", JobState.FINISHED)
    assert len(history.jobs) == ENDED + 1


def test_only_numbers_are_shown():
    history, job = begun()
    log(history, 3, step=1, loss=float("nan"), phase="train", nothing=None, ok=True, output=0.5, huge=10**400)
    assert list(job.lines) == ["loss", "ok", "output"] and math.isnan(job.ranks[0].values["loss"])


def test_rows_are_counted_where_no_step_is_logged():
    history, job = begun()
    for now in (3, 4):
        log(history, now, loss=1.0)
        log(history, now, 1, step=10 * now, loss=1.0)
    log(history, 5, 1, loss=1.0)
    assert steps(job) == {(0, 0): [1, 2], (0, 1): [30, 40, 40]}


def test_a_rank_is_late_once_it_is_silent_for_much_longer_than_ever():
    history, job = begun()
    for now in (3, 33):  # the first row is late, as it loads what it needs
        log(history, now, 0, loss=1.0)
    for now in (3, 4, 5):
        log(history, now, 1, loss=1.0)
    assert [rank.is_late(40) for rank in job.ranks] == [False, True]
    assert [rank.is_late(200) for rank in job.ranks] == [True, True]
    history.returns("train-1", 0, 0)
    assert job.ranks[0].silent_s(200) is None


def test_ranks_that_their_user_stops_have_not_failed():
    history, job = begun()
    history.stops("train-1", "SIGINT")
    history.hears(Event.FAILED, "train-1", [0, 1, b"", "", False, "", []], 3)
    assert job.ranks[1].state is RankState.STOPPED
    history.ends("train-1", JobState.STOPPED, "train.py ended with SIGINT.")
    assert (job.state, states(job)) == (JobState.STOPPED, ["stopped", "stopped"])


def test_what_comes_late_changes_nothing():
    history, job = begun(attempts=2)
    history.ends("train-1", JobState.ENDING, "WorkerDied")
    history.hears(Event.BEGAN, "train-1", [0, 0, "w"], 3)
    assert states(job) == ["stopped", "stopped"]
    history.ends("train-1", JobState.FAILED, "Its client is gone.")
    again(history, 1)
    history.begins("unknown", workers(2))
    assert job.state is JobState.FAILED and list(history.jobs) == ["train-1"]


@pytest.mark.parametrize("message", [("row",), ("began", 0), "text", ()])
def test_a_stranger_who_writes_to_a_topic_ends_nothing(client, message):
    client.log_event("daskrun-stranger", message)
    assert daskrun.run(client, int, backend=None) == [0, 0]


def jobs(client):
    return client.run_on_scheduler(lambda dask_scheduler: history_of(dask_scheduler).jobs)


def newest(client):
    return list(jobs(client).values())[-1]


def test_the_scheduler_keeps_what_a_job_of_functions_has_done(client):
    def train():
        daskrun.log_metrics(step=3, loss=0.25)

    daskrun.run(client, train, max_restarts=1)
    job = newest(client)
    assert (job.name, job.state, job.attempts, states(job)) == ("train", "finished", 2, ["finished", "finished"])
    assert steps(job) == {(0, 0): [3], (0, 1): [3]}


def test_the_scheduler_keeps_how_a_job_has_failed(client):
    def train():
        raise ValueError("first\nsecond")

    with pytest.raises(ValueError, match="first"):
        daskrun.run(client, train, backend=None)
    job = newest(client)
    assert job.state == "failed" and job.error.endswith("ValueError: first") and "failed" in states(job)
    with pytest.raises(daskrun.JobError):
        daskrun.run(client, train, n_workers=99)
    found = [(job.name, job.state, job.error) for job in jobs(client).values()]
    assert any(state == "failed" and "99" in error for _, state, error in found), found


class WorkerDiedInMyPool(Exception):
    """Of a library, and no death of a rank."""


def test_types_are_not_read_from_names(client):
    from concurrent.futures import CancelledError

    for error in (WorkerDiedInMyPool("mine"), CancelledError("mine")):

        def train(error=error):
            raise error

        with pytest.raises(type(error)):
            daskrun.run(client, train, backend=None)
        assert newest(client).state is JobState.FAILED and "failed" in states(newest(client))


def test_a_script_that_logs_metrics_shows_them(client, tmp_path):
    write(
        tmp_path,
        "import daskrun",
        "for step in (1, 2):",
        "    daskrun.log_metrics(step=step, loss=1 / step, phase='train one', **{'acc@1': 0.5})",
        "    print('Epoch', 7)",
    )
    with command(client, tmp_path, "script.py") as process:
        assert process.wait(60) == 0
    job = newest(client)
    assert (job.name, job.state, list(job.lines)) == ("script", "finished", ["loss", "acc@1"])
    assert steps(job) == {(0, 0): [1, 2], (0, 1): [1, 2]} and job.ranks[0].last_line == "Epoch 7"
    assert (tmp_path / ".out").read_text().count("step 2  loss 0.5  phase train one  acc@1 0.5\n") == 2


def test_a_script_that_is_killed_is_dead(client, tmp_path):
    write(tmp_path, "import os, signal", "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)")
    with command(client, tmp_path, "script.py") as process:
        assert process.wait(60) == 1
    job = newest(client)
    assert job.state == "failed" and job.ranks[1].state is RankState.DEAD and list(job.deaths) == [(0, 1)]


def test_a_job_whose_client_is_closed_is_shown_as_failed(client):
    def chat():
        while True:
            daskrun.log_metrics(step=1)
            time.sleep(0.05)

    other = Client(client.scheduler.address, set_as_default=False)
    job = daskrun.launch(other, chat, backend=None)
    until(lambda: job.metrics().size)
    other.close()
    until(lambda: newest(client).is_over)
    assert newest(client).state is JobState.FAILED
