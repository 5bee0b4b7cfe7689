"""Whatever takes a client refuses one that is closed or asynchronous, with one sentence that says the cure."""

import asyncio
import os

import pytest
from distributed import Client

import daskrun
from daskrun import SchedulerLost
from workshop_utils.classify import classify, classify_stream
from workshop_utils.cluster import describe_workers
from workshop_utils.exercises.gym import case
from workshop_utils.results import ResultsHandler
from workshop_utils.shared import on_all_workers

TAKE_A_CLIENT = {
    "daskrun.launch": lambda client: daskrun.launch(client, os.getpid),
    "daskrun.run": lambda client: daskrun.run(client, os.getpid),
    "classify": lambda client: classify(client, ["a.jpg"]),
    "classify_stream": lambda client: classify_stream(client, ["a.jpg"]),
    "describe_workers": describe_workers,
    "ResultsHandler": lambda client: ResultsHandler(client=client),
    "a case of the gym": lambda client: case.start(client, seed=0),
}


@pytest.mark.parametrize("name", TAKE_A_CLIENT)
def test_a_client_that_cannot_be_used_is_refused_at_once(client, name):
    with Client(client.scheduler.address) as closed:
        pass
    with pytest.raises(SchedulerLost, match="client is closed: .*use its client"):
        TAKE_A_CLIENT[name](closed)

    async def call():
        async with Client(client.scheduler.address, asynchronous=True) as waiting:
            TAKE_A_CLIENT[name](waiting)

    with pytest.raises(TypeError, match="asynchronous=False"):
        asyncio.run(call())


def test_an_asynchronous_client_that_is_the_current_one_is_refused_where_workers_have_to_be_asked(client, tmp_path):
    async def ask():
        async with Client(client.scheduler.address, asynchronous=True, set_as_default=True):
            on_all_workers(str(tmp_path))

    with pytest.raises(TypeError, match="asynchronous=False"):
        asyncio.run(ask())
