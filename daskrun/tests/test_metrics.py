"""Rows of metrics come from ranks to the client, and what would not arrive is refused where it is logged."""

import os
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum

import numpy as np
import pytest
import torch
from distributed import Client
from waiting import until

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


def test_a_child_of_a_rank_is_told_that_its_rows_would_not_arrive(client):
    with pytest.raises(ValueError, match="log_metrics was called in process"):
        daskrun.run(client, from_a_dataloader, n_workers=1)
    (row,) = daskrun.launch(client, log_metrics, kwargs={"step": 1}, n_workers=1).rows()  # the rank itself may log
    assert row["step"] == 1


def test_the_threads_of_a_rank_log(client):
    def log():
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda step: log_metrics(step=step), range(8)))

    assert sorted(row["step"] for row in daskrun.launch(client, log).rows()) == sorted(2 * list(range(8)))


class Level(IntEnum):
    HIGH = 3


class Ratio(float):
    pass


class Odd(float):
    def __float__(self):
        raise ZeroDivisionError


def test_names_with_letters_that_cannot_travel_are_escaped_and_kinds_of_numbers_are_numbers(client):
    def log():
        log_metrics(**{os.fsdecode(b"\xe9.jpg"): 1.5}, level=Level.HIGH, ratio=Ratio(0.5))

    (row,) = daskrun.launch(client, log, n_workers=1).rows()
    assert row["\\udce9.jpg"] == 1.5 and (row["level"], row["ratio"]) == (3, 0.5)
    assert daskrun.run(client, int) == [0, 0]  # both workers are still there


def test_other_values_are_refused(client):
    refused = {
        "loss has 2 values": {"loss": torch.ones(2)},
        "loss has 4 values": {"loss": np.ones((2, 2))},
        "losses is a list": {"losses": [1, 2]},
        "loss has no value": {"loss": torch.ones((), device="meta")},
        "weight has no value": {"weight": torch.nn.UninitializedParameter()},
        "odd has no value": {"odd": Ratio.__new__(Odd)},
        "'__Set__' begins with __": {"__Set__": 1},
        "64 bits": {"big": 2**70},
        "['rank', 'worker']": {"rank": 1, "worker": 2},
    }

    def log():
        for values in refused.values():
            with pytest.raises(ValueError) as caught:
                log_metrics(**values)
            yield str(caught.value)

    (said,) = daskrun.run(client, lambda: list(log()), n_workers=1)
    assert all(words in message for words, message in zip(refused, said, strict=True)), said


def test_outside_a_job_nothing_is_logged_and_a_task_is_told_once():
    def logs_twice():
        return log_metrics(loss=1), log_metrics(loss=2)

    assert logs_twice() == (None, None)  # no warning, or this would fail
    with Client(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0", set_as_default=False) as client:
        with pytest.warns(UserWarning, match="log_metrics") as warned:
            assert client.gather(client.map(lambda _: logs_twice(), range(3))) == [(None, None)] * 3
            assert daskrun.run(client, logs_twice) == [(None, None)]  # a rank's are no reason
            until(lambda: len(warned))
        assert len(warned) == 1
