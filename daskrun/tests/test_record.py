"""What is kept of jobs, and shown of them, from what a scheduler is told."""

import math
import time

import pytest
from distributed import Client
from test_command import command, write
from waiting import until

import daskrun
from daskrun.claims import Request, Worker
from daskrun.record import ATTEMPTS, ENDED, ERROR, LONGEST, NAMES, POINTS, Record
from daskrun.scheduler import record_of


def workers(n):
    return [
        Worker(f"tcp://{number}", f"process {number}", f"slot {number}", "host", str(number)) for number in range(n)
    ]


def begun(n=2, attempts=1):
    """Return a record of one job whose ranks have begun, and the job."""
    record = Record()
    record.wants(Request("train-1", "kernel", attempts=attempts), 0)
    record.begins("train-1", workers(n))
    for rank in range(n):
        record.hear("began", "train-1", [0, rank, f"tcp://{rank}"], 2)
    return record, record.jobs["train-1"]


def log(record, now, rank=0, attempt=0, output=(), **row):
    if isinstance(output, list):
        record.hear("output", "train-1", [attempt, rank, output], now)
        return
    row |= {"output": output} if output else {}
    record.hear("row", "train-1", [{"rank": rank, "attempt": attempt, "time": now, "worker": "w"} | row], now)


def states(job):
    return [rank.state for rank in job.ranks]


def test_a_job_waits_runs_brings_results_and_is_finished():
    record = Record()
    record.wants(Request("train-x-1", "kernel", attempts=3), 5)
    (job,) = record.jobs.values()
    assert (job.name, job.state, job.attempt, job.attempts, job.since) == ("train-x", "waiting for workers", 0, 3, 5)
    record.wants(Request("train-x-1", "kernel", attempts=3), 6)  # it asks again
    record.begins("train-x-1", workers(2))
    assert states(job) == ["starting", "starting"]
    for rank in (0, 1):
        record.hear("began", "train-x-1", [0, rank, "w"], 8)
    assert (job.state, states(job)) == ("running", ["running", "running"])
    record.hear("row", "train-x-1", [{"rank": 1, "attempt": 0, "loss": 2.0}], 9)
    record.returns("train-x-1", 0, 0)
    assert states(job) == ["finished", "running"]
    record.returns("train-x-1", 0, 1)
    assert job.state == "fetching its results"
    record.ends("train-x-1", "")
    assert (job.state, job.error, job.is_over, job.since) == ("finished", "", True, 5)


def test_after_a_death_the_next_attempt_has_lines_of_its_own_and_the_death_is_marked():
    record, job = begun(attempts=2)
    for rank in (0, 1):
        log(record, 3, rank, step=1, loss=1.0)
    record.hear("gone", "train-1", ["process 1"], 4)
    record.ends("train-1", "WorkerDied: Rank 1 died", again=True)
    assert states(job) == ["stopped", "dead"] and not job.is_over
    record.wants(Request("train-1", "kernel", attempt=1, attempts=2), 5)
    record.hear("gone", "train-1", ["process 0"], 5)  # which the job itself has killed
    record.begins("train-1", workers(2))
    log(record, 7, 0, attempt=0, step=2, loss=9.0)  # of the attempt that is over
    log(record, 8, 0, attempt=1, step=2, loss=0.5)
    assert job.attempt == 1 and job.deaths == {(0, 1): (1, 4)}
    assert job.starts == {0: (1, 2), 1: (2, 8)}
    assert job.lines("loss", by_step=True) == [(0, 0, [1], [1.0]), (0, 1, [1], [1.0]), (1, 0, [2], [0.5])]
    assert job.lines("loss", by_step=False)[-1] == (1, 0, [8], [0.5])


def test_a_failed_rank_and_the_first_line_of_the_error_are_kept_and_nothing_after_the_end():
    record, job = begun(3)
    record.returns("train-1", 0, 2)
    record.hear("failed", "train-1", [0, 1, b"", b"", "", False], 3)
    record.ends("train-1", f"ValueError: {'x' * 2 * ERROR}\nmore")
    assert states(job) == ["stopped", "failed", "finished"] and job.state == "failed"
    begin = "rank 1: ValueError: xx"
    assert len(job.error) == len("rank 1: ") + ERROR and job.error.startswith(begin)
    version = record.version
    log(record, 9, loss=1.0)
    record.ends("train-1", "again")
    assert record.version == version and not job.curves and job.error.startswith(begin)


def test_a_rank_that_fails_because_another_has_died_is_stopped():
    record, job = begun()
    record.hear("failed", "train-1", [0, 0, b"", b"", "", False], 3)  # in a collective, before the death is known
    record.hear("gone", "train-1", ["process 1"], 4)
    assert [line.state for line in job.table("", 4)] == ["stopped", "dead"]
    assert job.doing == "rank 1 has died; ending its ranks"
    record.ends("train-1", "WorkerDied: Rank 1 died")
    assert states(job) == ["stopped", "dead"]


def test_a_client_that_is_gone_ends_its_jobs_alone():
    record, job = begun()
    record.wants(Request("other-1", "another kernel"), 3)
    record.loses("kernel")
    assert job.state == "failed" and "client is gone" in job.error and not record.jobs["other-1"].is_over


def test_jobs_that_run_come_first_and_then_the_newest_of_those_that_are_over():
    record = Record()
    for number in range(ENDED + 5):
        record.wants(Request(f"job-{number}", "kernel"), number)
        if number != 3:
            record.ends(f"job-{number}", "")
    record.wants(Request("trains", "kernel"), 99)
    record.begins("trains", workers(2))
    record.wants(Request("waits for workers", "kernel"), 100)
    in_order = [name for name, _ in record.in_order()]
    over = [f"job-{number}" for number in range(ENDED + 4, 4, -1)]
    assert in_order == ["trains", "waits for workers", "job-3", *over] and record.newest() == "trains"
    record.ends("trains", "ValueError: seen by who looks at it")
    assert record.newest() == "trains"  # although older ones still run


def test_what_is_kept_is_bounded():
    record, job = begun()
    for step in range(10 * POINTS):
        log(record, step, step=step, loss=math.nan if step == 777 else 1.0)
    for number in range(2 * NAMES):
        log(record, 0, **{f"metric {number}": 1.0, "y" * 2 * LONGEST: 1.0})
    log(record, 0, output=[(False, "z" * 2 * LONGEST)] * 1000)
    [(_, _, steps, losses)] = job.lines("loss", by_step=True)
    assert len(steps) <= POINTS + 1 and (steps[0], steps[-1]) == (0, 10 * POINTS - 1)
    assert steps[:3] == [0, 16, 32] and sum(map(math.isnan, losses)) == 1  # evenly, and what is odd stays
    assert job.stride("loss") == 16 and len(job.names) == NAMES == len(job.ranks[0].values)
    assert len(job.ranks[0].last_line) == LONGEST and max(map(len, job.names)) <= LONGEST
    for attempt in range(1, 3 * ATTEMPTS):
        record.hear("gone", "train-1", ["process 1"], attempt)
        record.ends("train-1", "WorkerDied", again=True)
        record.wants(Request("train-1", "kernel", attempt=attempt), attempt)
        record.begins("train-1", workers(2))
        log(record, attempt, attempt=attempt, step=1, loss=1.0)
    assert len(job.curves["loss"]) == len(job.starts) == ATTEMPTS == len(job.deaths) + 1


def test_only_numbers_are_shown_and_one_that_is_none_does_not_hide():
    record, job = begun()
    log(record, 3, step=1, loss=float("nan"), phase="train", nothing=None, ok=True, output=0.5)
    assert list(job.names) == ["loss", "ok", "output"]
    assert math.isnan(job.table("loss", 4)[0].value)
    log(record, 5, step=2, loss=float("inf"))
    [(_, _, steps, losses)] = job.lines("loss", by_step=True)
    assert steps == [1, 2] and math.isnan(losses[0]) and losses[1] == math.inf
    assert job.table("loss", 5)[0].value == math.inf


def test_an_int_that_is_too_large_for_a_float_is_infinite():
    record, job = begun()
    log(record, 3, step=10**400, loss=-(10**400))
    assert job.lines("loss", by_step=True) == [(0, 0, [1], [-math.inf])]


def test_where_steps_begin_again_the_line_has_a_gap():
    record, job = begun()
    for now, step in enumerate((1, 2, 1, 2), 3):
        log(record, now, step=step, loss=1.0)
    for by_step, expected in ((True, [1, 2, 1, 1, 2]), (False, [3, 4, 5, 5, 6])):
        [(_, _, xs, losses)] = job.lines("loss", by_step)
        assert xs == expected and losses == [1.0, 1.0, None, 1.0, 1.0]


@pytest.mark.parametrize("steps", [[9, 8, 7, 6], [1, 0, 3, 2, 5, 4], [1, 1, 2]])
def test_steps_that_fall_or_come_out_of_order_are_one_line(steps):
    record, job = begun()
    for step in steps:
        log(record, 3, step=step, loss=1.0)
    assert [(xs, ys) for _, _, xs, ys in job.lines("loss", by_step=True)] == [(steps, [1.0] * len(steps))]


def test_a_restart_counts_once_there_are_workers():
    record, job = begun(attempts=2)
    record.ends("train-1", "WorkerDied", again=True)
    record.wants(Request("train-1", "kernel", attempt=1, attempts=2), 4)
    assert (job.attempt, job.state) == (0, "waiting for workers")
    record.begins("train-1", workers(2))
    assert (job.attempt, job.state) == (1, "starting")


def test_where_all_hang_each_is_late_once_it_is_silent_for_longer_than_ever():
    record, job = begun(2)
    for second in (30, 31, 34):  # the first row is late, as it loads what it needs
        for rank in range(2):
            log(record, second, rank, step=second, loss=1.0)
    assert [line.is_late for line in job.table("loss", 43)] == [False, False]
    assert [line.is_late for line in job.table("loss", 45)] == [True, True]


def test_a_job_that_its_user_cancelled_has_not_failed():
    record, job = begun()
    record.ends(next(iter(record.jobs)), "CancelledError: train-1 was cancelled.")
    assert (job.state, job.error) == ("cancelled", "")
    record, job = begun(attempts=2)
    record.ends("train-1", "WorkerDied: Rank 1 died.", again=True)
    record.ends("train-1", "CancelledError: train-1 was cancelled.")
    assert job.error == "WorkerDied: Rank 1 died." and job.error_is_old


def test_a_rank_that_lags_has_a_shorter_bar_and_one_that_is_silent_for_long_is_late():
    record, job = begun(3)
    for rank, steps in enumerate((40, 40, 10)):
        log(record, 3, rank, step=1, loss=rank)
        log(record, 10 if rank < 2 else 4, rank, step=steps, loss=rank)
    lines = job.table("loss", 10.5)
    assert [line.share for line in lines] == [1, 1, 0.25]
    assert [line.silent_s for line in lines] == [0.5, 0.5, 6.5] and [line.is_late for line in lines] == [
        False,
        False,
        True,
    ]
    assert [line.value for line in lines] == [0, 1, 2]
    record.returns("train-1", 0, 2)
    assert job.table("loss", 500)[2].silent_s is None


def test_the_first_row_has_an_age_and_makes_nobody_late():
    record, job = begun(2)
    assert [line.ago_s for line in job.table("loss", 32)] == [30, 30]  # a hang before the first row is seen
    log(record, 3, loss=1.0)
    line, other = job.table("loss", 500)
    assert (line.ago_s, line.silent_s, line.is_late, other.ago_s) == (497, None, False, None)


def test_one_of_two_ranks_can_be_late():
    record, job = begun(2)
    for now, rank in ((2, 0), (2, 1), (3, 0), (9, 1)):
        log(record, now, rank, loss=1.0)
    assert [line.is_late for line in job.table("loss", 9)] == [True, False]


@pytest.mark.parametrize("n_lines", [0, 1, 2])
def test_where_rank_0_alone_logs_no_other_is_late_until_that_one_is_silent(n_lines):
    record, job = begun(2)
    for second in range(n_lines):
        log(record, 3 + second, 1, output=[(False, "Hello from rank 1")])
    for second in range(10, 100):
        log(record, second, 0, loss=1.0)
    assert [line.is_late for line in job.table("loss", 100)] == [False, False]
    lines = job.table("loss", 111)
    assert [line.is_late for line in lines if line.silent_s is not None] == [True] * (2 if n_lines == 2 else 1)


def test_lines_printed_once_are_no_measure_for_ranks_that_log():
    record, job = begun(5)
    for second in (3, 4):
        for rank in (2, 3, 4):
            log(record, second, rank, output=[(False, "Hello")])
    for second in range(10, 31):
        log(record, second, 0, step=second, loss=1.0)
        if second <= 20:
            log(record, second, 1, step=second, loss=1.0)
    assert [line.is_late for line in job.table("loss", 30)] == [False, True, False, False, False]


def test_who_logs_once_a_minute_makes_no_other_rank_late():
    record, job = begun(2)
    for second in (3, 4):
        log(record, second, 1, output=[(False, "Hello")])
    for second in (60, 120):
        log(record, second, 0, loss=1.0)
    assert not any(line.is_late for line in job.table("loss", 170))


def test_rows_are_counted_where_no_step_is_logged():
    record, job = begun()
    for now in (3, 4):
        log(record, now, loss=1.0 / now)
    assert job.unit == "row"
    log(record, 5, 1, step=100, loss=0.5, **{f"grad/{number}": 1.0 for number in range(2 * NAMES)})
    log(record, 6, 1, loss=0.4)
    assert job.unit == "step"
    assert job.lines("loss", by_step=True) == [(0, 0, [1, 2], [1 / 3, 1 / 4]), (0, 1, [100, 100], [0.5, 0.4])]


def test_a_rank_that_is_over_before_another_begins_keeps_no_job_from_running():
    record = Record()
    record.wants(Request("train-1", "kernel"), 0)
    record.begins("train-1", workers(2))
    record.hear("began", "train-1", [0, 0, "w"], 2)
    record.returns("train-1", 0, 0)
    record.hear("began", "train-1", [0, 1, "w"], 3)
    job = record.jobs["train-1"]
    assert job.state == "running" and states(job) == ["finished", "running"]


def test_a_job_is_ending_from_the_first_failure_on():
    for kind, about, state in (
        ("failed", [0, 1, b"", b"", "", False], "failed"),
        ("gone", ["process 1"], "dead"),
        ("died", [0, 1], "dead"),
    ):
        record, job = begun()
        record.hear(kind, "train-1", about, 3)
        assert job.state == "ending its ranks" and states(job) == ["running", state]
        assert list(job.deaths) == [(0, 1)] * (state == "dead")


def test_ranks_that_their_user_stops_have_not_failed():
    record, job = begun()
    record.stops("train-1", "SIGINT")
    record.hear("failed", "train-1", [0, 1, b"", b"", "", False], 3)
    assert states(job) == ["running", "stopped"]
    record.ends("train-1", "JobError: train.py ended with SIGINT.")
    assert (job.state, job.error, states(job)) == (
        "stopped by SIGINT",
        "JobError: train.py ended with SIGINT.",
        ["stopped", "stopped"],
    )


def test_who_saves_after_a_signal_has_not_just_finished():
    record, job = begun()
    record.stops("train-1", "SIGTERM")
    record.ends("train-1", "")
    assert job.state == "finished after SIGTERM" and job.is_finished


def test_a_job_that_has_finished_tells_of_the_death_before():
    record, job = begun(attempts=2)
    record.ends("train-1", "WorkerDied: Rank 1 died.", again=True)
    record.ends("train-1", "")
    assert (job.state, job.error, job.is_finished) == ("finished", "WorkerDied: Rank 1 died.", True)


def test_step_0_is_a_step():
    record, job = begun()
    log(record, 3, step=0, loss=1.0)
    assert [line.step for line in job.table("loss", 4)] == [0, None]


def test_what_comes_late_changes_nothing():
    record, job = begun(attempts=2)
    record.ends("train-1", "WorkerDied", again=True)
    record.hear("began", "train-1", [0, 0, "w"], 3)
    assert states(job) == ["stopped", "stopped"]
    record.ends("train-1", "Its client is gone.")
    record.wants(Request("train-1", "kernel", attempt=1, attempts=2), 4)
    record.begins("train-1", workers(2))
    record.begins("unknown", workers(2))
    assert job.state == "failed" and job.is_over and list(record.jobs) == ["train-1"]


def test_who_was_seen_to_wait_does_so_until_one_of_them_logs():
    record, job = begun()
    record.waits("train-1", 1, frozenset({1}), frozenset(), since=2)  # of another attempt
    record.waits("train-1", 0, frozenset({0}), frozenset(), since=2)
    assert [line.state for line in job.table("loss", 3)] == ["waits", "does not wait"]
    log(record, 3, 1, retries=1.0)  # the one for which it waits says something
    assert [line.state for line in job.table("loss", 3)] == ["waits", "does not wait"]
    assert job.gone_on(frozenset({0}), since=2) == [] and job.gone_on(frozenset(), since=2) == [1]
    log(record, 4, 0, loss=1.0)
    assert [line.state for line in job.table("loss", 4)] == ["running", "running"]
    assert job.gone_on(frozenset({0}), since=3) == [0]


def test_a_rank_that_does_not_answer_is_told_from_one_that_does_not_wait_until_it_logs():
    record, job = begun()
    record.waits("train-1", 0, frozenset({0}), frozenset({1}), since=2)
    assert [line.state for line in job.table("loss", 3)] == ["waits", "does not answer"]
    log(record, 3, 1, loss=1.0)
    assert [line.state for line in job.table("loss", 3)] == ["running", "running"]
    record.waits("train-1", 0, frozenset(), frozenset({0, 1}), since=3)
    assert [line.state for line in job.table("loss", 3)] == ["does not answer", "does not answer"]
    record.waits("train-1", 0, frozenset(), frozenset({1}), since=3)
    log(record, 4, 0, loss=1.0)  # of a rank that does not wait for it
    assert [line.state for line in job.table("loss", 4)] == ["running", "running"]
    log(record, 5, 1, loss=1.0)
    record.waits("train-1", 0, frozenset({0}), frozenset({1}), since=4)  # it has gone on while it was looked at
    assert [line.state for line in job.table("loss", 5)] == ["running", "running"]


def test_an_answer_about_an_attempt_that_is_over_says_nothing_of_the_next():
    record, job = begun(attempts=2)
    record.ends("train-1", "WorkerDied", again=True)
    record.waits("train-1", 0, frozenset({0}), frozenset({1}), since=2)
    record.wants(Request("train-1", "kernel", attempt=1, attempts=2), 4)
    record.begins("train-1", workers(2))
    for rank in (0, 1):
        record.hear("began", "train-1", [1, rank, "w"], 5)
    assert [line.state for line in job.table("loss", 6)] == ["running", "running"]


def test_an_attempt_starts_at_the_first_step_of_its_ranks_and_a_row_without_one_is_none():
    record, job = begun(attempts=2)
    log(record, 3, step=200, loss=1.0)
    record.ends("train-1", "WorkerDied", again=True)
    record.wants(Request("train-1", "kernel", attempt=1, attempts=2), 4)
    record.begins("train-1", workers(2))
    log(record, 5, 0, 1, lr=0.1)
    for rank, step in ((0, 109), (1, 105), (0, 110), (1, 0)):  # then another training of the job
        log(record, 6, rank, 1, step=step, loss=1.0)
    assert {attempt: start.step for attempt, start in job.starts.items()} == {0: 200, 1: 105}


def test_a_point_is_drawn_when_its_row_was_logged_though_it_came_late_and_clocks_differ():
    record, job = begun()
    for at, own in ((3, 1003), (4.5, 1004), (9, 1005), (9, 1006), (9, "text"), (10, math.inf)):
        log(record, at, time=own, loss=1.0)
    assert job.lines("loss", by_step=False) == [(0, 0, [3, 4, 5, 6, 9, 10], [1.0] * 6)]
    for at, own in ((11, -2000), (12, -1999), (13, 1.7e308), (14, -1.7e308), (15, True), (16, 3)):  # it is put back
        log(record, at, time=own, loss=1.0)
    assert job.lines("loss", by_step=False)[0][2][6:] == [11, 12, 13, 14, 15, 16]


def test_a_scripts_last_line_stands_beside_its_steps():
    record, job = begun()
    log(record, 3, step=4, loss=0.5)
    log(record, 3, output=[(False, "Epoch 1"), (True, "see <b>")])
    (line, _) = job.table("loss", 4)
    assert line.printed == "see <b>" and line.value == 0.5 and line.step == 4 and job.has_output


@pytest.mark.parametrize("message", [("row",), ("row", "train-1"), ("began", "train-1"), ("gone", "train-1"), "text"])
def test_a_stranger_who_writes_to_the_topic_ends_nothing(client, message):
    client.log_event("daskrun-stranger", message)
    assert daskrun.run(client, int, backend=None) == [0, 0]


def jobs(client):
    return client.run_on_scheduler(lambda dask_scheduler: record_of(dask_scheduler).jobs)


def newest(client):
    return list(jobs(client).values())[-1]


def test_the_scheduler_keeps_what_a_job_of_functions_has_done(client):
    def train():
        daskrun.log_metrics(step=3, loss=0.25)

    daskrun.run(client, train, max_restarts=1)
    job = newest(client)
    assert (job.name, job.state, job.attempts, states(job)) == ("train", "finished", 2, ["finished", "finished"])
    assert job.lines("loss", by_step=True) == [(0, 0, [3], [0.25]), (0, 1, [3], [0.25])]


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
    assert (job.name, job.state, job.has_output, list(job.names)) == ("script", "finished", True, ["loss", "acc@1"])
    assert [line[2:] for line in job.lines("loss", by_step=True)] == [([1, 2], [1.0, 0.5])] * 2
    assert (tmp_path / ".out").read_text().count("step 2  loss 0.5  phase train one  acc@1 0.5\n") == 2


def test_a_script_that_is_killed_is_dead(client, tmp_path):
    write(tmp_path, "import os, signal", "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)")
    with command(client, tmp_path, "script.py") as process:
        assert process.wait(60) == 1
    job = newest(client)
    assert job.state == "failed" and "WorkerDied" in job.error and job.ranks[1].state == "dead"
    assert list(job.deaths) == [(0, 1)]


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
    assert (newest(client).state, newest(client).error) == ("failed", "Its client is gone.")
