"""Rows of metrics come from ranks to the client, and what would not arrive is refused where it is logged."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch

import daskrun
from daskrun import log_metrics


@pytest.mark.smoke
def test_values_become_numbers_strings_and_booleans(client):
    def log():
        log_metrics(tensor=torch.tensor([0.5], requires_grad=True), half=torch.tensor(2, dtype=torch.bfloat16))
        log_metrics(numpy=np.float32(0.25), integer=np.int64(7), truth=np.bool_(True), array=np.array([3]))
        log_metrics(flag=False, text="dög", odd="\ud800", nothing=None, not_a_number=float("nan"), many=2**63)

    job = daskrun.launch(client, log, n_workers=1)
    first, second, third = job.rows()
    assert (first["tensor"], first["half"]) == (0.5, 2.0)
    assert [second[name] for name in ("numpy", "integer", "truth", "array")] == [0.25, 7, True, 3]
    assert [third[name] for name in ("flag", "text", "odd", "nothing")] == [False, "dög", "\\ud800", None]
    assert third["not_a_number"] != third["not_a_number"] and third["many"] == 2**63
    assert {type(value) for row in (first, second) for value in row.values()} <= {int, float, bool, str}


class Logs(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        log_metrics(step=index)
        return index


def from_a_dataloader():
    list(torch.utils.data.DataLoader(Logs(), num_workers=1))


def from_a_process():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(log_metrics, step=1).result()


@pytest.mark.parametrize("log", [from_a_dataloader, from_a_process])
def test_a_child_of_a_rank_is_told_that_its_rows_would_not_arrive(client, log):
    with pytest.raises(ValueError, match="log_metrics was called in process"):
        daskrun.run(client, log, n_workers=1)
    (row,) = daskrun.launch(client, log_metrics, n_workers=1, step=1).rows()  # the rank itself may log
    assert row["step"] == 1


def test_the_threads_of_a_rank_log(client):
    def log():
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda step: log_metrics(step=step), range(8)))

    assert sorted(row["step"] for row in daskrun.launch(client, log).rows()) == sorted(2 * list(range(8)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": torch.ones(2)}, "loss has 2 values"),
        ({"loss": np.ones((2, 2))}, "loss has 4 values"),
        ({"losses": [1, 2]}, "losses is a list"),
        ({"z": 1j}, "z is a complex"),
        ({"big": 2**70}, "big .*64 bits"),
        ({"rank": 1, "worker": 2}, r"\['rank', 'worker'\]"),
    ],
)
def test_other_values_are_refused(client, values, message):
    with pytest.raises(ValueError, match=message):
        daskrun.run(client, lambda: log_metrics(**values), n_workers=1)


def test_outside_a_job_nothing_is_logged(client):
    assert log_metrics(loss=1) is None
    assert client.submit(log_metrics, loss=1, pure=False).result() is None
