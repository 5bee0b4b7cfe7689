"""Files come from ranks to the client complete and in order, are kept, and cannot do harm there."""

import multiprocessing
import os
import pickle
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from waiting import until

import daskrun
from daskrun.child.context import current
from workshop_utils.results import ResultError, ResultsHandler, write_tensorboard

ROWS = [{"rank": 0, "step": 1, "loss": 0.5}, {"rank": 1, "step": 1, "loss": float("nan"), "note": "dög"}]


def test_a_child_of_a_rank_is_told_that_its_files_would_not_arrive(client):
    def sends(handler):
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            pool.submit(handler.submit_result, "a.txt", "a").result()

    with pytest.raises(ValueError, match="submit_result was called in process"):
        daskrun.run(client, sends, ResultsHandler(client=client), n_workers=1)


@pytest.mark.smoke
def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    without_step = [{"rank": 0, "loss": 9.0}, {"rank": 0, "step": float("nan"), "loss": 9.0}]
    write_tensorboard([*ROWS, *without_step, {"rank": 0, "step": 2, "loss": 0.25, "time": 1e9}], tmp_path)
    events = EventAccumulator(str(tmp_path / "rank-0")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert events.Scalars("loss")[1].wall_time == 1e9  # by the rank's clock, whenever it was written
    assert EventAccumulator(str(tmp_path / "rank-1")).Reload().Tags()["scalars"] == []  # NaN is not drawn


def test_tensorboard_reads_each_step_once_however_often_it_was_logged_or_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def row(attempt, step):
        return {"rank": 0, "attempt": attempt, "step": step, "loss": attempt + step / 100}

    begun = [*(row(0, step) for step in range(1, 9)), *(row(1, step) for step in (6, 7))]
    write_tensorboard(begun, tmp_path)
    read = EventAccumulator(str(tmp_path / "rank-0")).Reload()
    steps = [(event.step, round(event.value, 2)) for event in read.Scalars("loss")]
    assert steps == [(step, step / 100) for step in range(1, 6)] + [(6, 1.06), (7, 1.07), (8, 0.08)]
    rows = [*begun, *(row(1, step) for step in range(8, 13)), {"rank": 0, "loss": 9.0}]
    write_tensorboard(pd.DataFrame(rows), tmp_path)
    running, fresh = read.Reload(), EventAccumulator(str(tmp_path / "rank-0")).Reload()
    for steps in ([event.step for event in one.Scalars("loss")] for one in (running, fresh)):
        assert steps == list(range(1, 13))


def test_numpys_numbers_are_drawn_and_rows_without_a_step_are_told(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_tensorboard([{"step": np.int64(3), "loss": np.float32(0.5), "rank": np.int64(1)}], tmp_path)
    events = EventAccumulator(str(tmp_path / "rank-1")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5)]
    with pytest.raises(ResultError, match="None of 2 rows has a number 'step'"):
        write_tensorboard([{"epoch": 1, "loss": 0.5}] * 2, tmp_path)
    write_tensorboard([], tmp_path)
    odd = {"step": torch.tensor(4), "rank": np.float64(2), "loss": torch.tensor([0.25]), "time": "today", "far": np.inf}
    write_tensorboard([odd, {"step": np.inf, "loss": 1}], tmp_path)
    events = EventAccumulator(str(tmp_path / "rank-2")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(4, 0.25)]


@pytest.mark.smoke
def test_files_arrive_in_their_places(client, tmp_path):
    def send(handler):
        rank = dist.get_rank()
        handler.submit_result(f"runs/{rank}/log.txt", "dög")
        handler.submit_result(f"weights-{rank}.bin", b"\0\1")
        handler.submit_result(f"runs/{rank}/log.txt", "later")

    handler = pickle.loads(pickle.dumps(ResultsHandler("mine", client)))
    assert handler.pub_sub_key == "mine"
    handler = ResultsHandler(client=client)
    job = daskrun.launch(client, send, handler)
    job.result()  # what was sent before the client looks is not lost
    assert os.listdir(handler.folder)
    written = handler.process_results(str(tmp_path), job)
    assert len(written) == 6 and not list(tmp_path.rglob("*.part")) and not os.listdir(handler.folder)
    for rank in range(2):
        assert (tmp_path / f"runs/{rank}/log.txt").read_text() == "later"
        assert (tmp_path / f"weights-{rank}.bin").read_bytes() == b"\0\1"


def test_results_are_fetched_once_and_leave_the_workers(client, tmp_path):
    def state(dask_worker):
        return dask_worker.transfer_outgoing_count_total, list(dask_worker.data)

    def send(handler):
        handler.submit_result("a.txt", "a")
        return bytes(1000)

    before = client.run(state)
    handler = ResultsHandler(client=client)
    job = daskrun.launch(client, send, handler, n_workers=1)
    (worker,) = job.workers
    assert handler.process_results(tmp_path, job) == [tmp_path / "a.txt"]
    assert job.result() == [bytes(1000)]
    until(lambda: client.run(state, workers=[worker])[worker] == (before[worker][0] + 1, []))
    assert job.done() and job.result() == [bytes(1000)]


def test_handlers_without_a_name_do_not_get_each_others_files(client, tmp_path):
    def send(handler, text):
        handler.submit_result("mine.txt", text)

    handlers = {text: ResultsHandler(client=client) for text in ("one", "two")}
    jobs = {text: daskrun.launch(client, send, handler, text, n_workers=1) for text, handler in handlers.items()}
    for text, handler in handlers.items():
        written = handler.process_results(tmp_path / text, jobs[text])
        assert [file.read_text() for file in written] == [text]


def test_files_of_a_job_that_fails_are_kept(client, tmp_path):
    def send(handler):
        handler.submit_result("before.txt", "kept")
        if dist.get_rank() == 1:
            raise KeyError("then it failed")
        dist.all_reduce(torch.ones(1))

    handler = ResultsHandler(client=client)
    with pytest.raises(KeyError, match="then it failed"):  # and not the other rank's lost connection
        handler.process_results(tmp_path / "raised", daskrun.launch(client, send, handler))
    assert (tmp_path / "raised/before.txt").read_text() == "kept"
    handler.process_results(tmp_path / "quiet", daskrun.launch(client, send, handler), raise_errors=False)
    assert (tmp_path / "quiet/before.txt").read_text() == "kept"


@pytest.mark.parametrize("path", ["/etc/passwd", "a/../../up", "..\\up", "C:up", ".", "", "a\0b", "\ud800"])
def test_a_path_out_of_the_folder_is_refused_where_it_is_sent(path, client):
    with pytest.raises(ResultError, match="such as 'runs/loss.csv'"):
        ResultsHandler(client=client).submit_result(path, "data")


def test_a_path_out_of_the_folder_is_refused_where_it_arrives(client, tmp_path):
    def send_all_the_same(topic):
        current().send("event", topic, {"path": "a/../../up", "name": "name"})

    handler = ResultsHandler(client=client)
    job = daskrun.launch(client, send_all_the_same, handler.pub_sub_key, n_workers=1)
    with pytest.raises(ResultError, match="such as 'runs/loss.csv'"):
        handler.process_results(tmp_path / "prefix", job)
    assert list(tmp_path.iterdir()) == []


def test_a_link_out_of_the_folder_is_refused(client, tmp_path):
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix/link").symlink_to(tmp_path)

    def send(handler):
        handler.submit_result("link/up.txt", "data")

    handler = ResultsHandler(client=client)
    with pytest.raises(ResultError, match="symbolic link"):
        handler.process_results(tmp_path / "prefix", daskrun.launch(client, send, handler, n_workers=1))
    assert not (tmp_path / "up.txt").exists()


@pytest.mark.parametrize("data", [{"a": 1}, None])
def test_data_of_a_wrong_type_is_refused(client, data):
    with pytest.raises(ResultError, match=type(data).__name__):
        ResultsHandler(client=client).submit_result("a.json", data)


@pytest.mark.parametrize("waits_in", ["all_reduce", "sleep"])
def test_the_cause_comes_first_also_where_the_job_was_over_before(client, tmp_path, waits_in):
    def send(handler):
        if dist.get_rank() == 1:
            raise KeyError("then it failed")
        dist.all_reduce(torch.ones(1)) if waits_in == "all_reduce" else time.sleep(1000)

    handler = ResultsHandler(client=client)
    job = daskrun.launch(client, send, handler)
    until(job.done)
    with pytest.raises(KeyError, match="then it failed"):
        handler.process_results(tmp_path, job)
