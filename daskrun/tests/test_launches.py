"""What a job does to a real cluster and to the jobs of others: it hangs nobody, hurts nobody, and leaves nothing."""

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import time
import weakref

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from distributed import CancelledError, Client
from waiting import awake, owned, settled, until, wait_for

import daskrun
from daskrun import WorkersBusy, log_metrics
from daskrun.child.failure import may_follow
from daskrun.client.cluster import Cluster
from daskrun.protocol import TOPIC

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it


def pause_above(fraction, dask_worker=None):
    dask_worker.memory_manager.memory_pause_fraction = fraction


def status_of(client, address):
    return client.scheduler_info(n_workers=-1)["workers"][address]["status"]


@pytest.fixture
def paused(client):
    """A worker that uses more than its pause limit of memory; it goes on after the test."""
    address = min(settled(client).nthreads())
    client.run(pause_above, 1e-6, workers=[address])
    until(lambda: status_of(client, address) == "paused")
    yield address
    client.run(pause_above, 0.8, workers=[address])
    until(lambda: status_of(client, address) == "running")


def test_a_paused_worker_is_named_and_keeps_nobody_else_from_the_cluster(client, paused):
    with pytest.raises(WorkersBusy, match=f"{paused} is paused.* of memory.*restart_workers"):
        daskrun.run(client, os.getpid)
    with Client(client.scheduler.address, set_as_default=False) as other:
        assert len(daskrun.run(other, os.getpid, n_workers=1)) == 1


@pytest.mark.smoke
def test_nothing_of_a_job_stays_on_the_scheduler(client):
    def work():
        log_metrics(step=1)
        return torch.ones(4_000_000)

    def kept(dask_scheduler):
        """Return the jobs' topics that have events, and the tasks."""
        topics = {topic for topic, events in dask_scheduler.get_events().items() if events}
        return {topic for topic in topics if topic.startswith(TOPIC)} | set(dask_scheduler.tasks)

    before = client.run_on_scheduler(kept)  # by other tests
    job = daskrun.launch(client, work)
    assert len(job.result()) == len(job.metrics()) == 2
    assert owned(client) == {}
    del job
    gc.collect()  # a job that failed is in its own error's traceback
    until(lambda: client.run_on_scheduler(kept) <= before)


def test_large_arguments_are_sent_to_the_scheduler_once_for_all_ranks(client, monkeypatch):
    sent, run = [], client.run

    def count(function, *args, **kwargs):
        sent.append(len(pickle.dumps(args)))
        return run(function, *args, **kwargs)

    monkeypatch.setattr(client, "run", count)
    assert daskrun.run(client, len, os.urandom(12_000_000)) == [12_000_000] * 2
    assert sum(size > 1_000_000 for size in sent) == 1


@pytest.mark.smoke
def test_a_client_that_is_closed_leaves_no_rank_no_claim_and_no_message(client):
    def chat():
        while True:
            log_metrics(step=1)
            time.sleep(0.05)

    def topics(dask_scheduler):
        return [topic for topic in dask_scheduler.get_events() if topic.startswith("chat-")]

    other = Client(client.scheduler.address, set_as_default=False)
    job = awake(daskrun.launch(other, chat), n_ranks=5)
    other.close()
    with pytest.raises(CancelledError, match="client.close()"):
        job.result()
    assert len(daskrun.run(client, os.getpid, wait_for_workers=120)) == 2
    until(lambda: client.run_on_scheduler(topics) == [])


@pytest.mark.weekly
def test_a_client_need_not_import_pytorch(client):
    program = (
        "import os, sys; from distributed import Client; import daskrun\n"
        f"with Client({client.scheduler.address!r}) as client: daskrun.run(client, os.getpid)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.smoke
def test_a_plain_task_beside_a_launch_waits_for_the_ranks(client):
    def work():
        time.sleep(0.5)
        return os.environ["WORKER"], time.time()

    def plain(number):
        return os.environ["WORKER"], time.time()

    def name_it(dask_worker):
        os.environ["WORKER"] = dask_worker.address

    client.run(name_it)
    job = daskrun.launch(client, work)
    tasks = client.map(plain, range(2), pure=False)  # in the next line
    ranks, plain_ones = dict(job.result()), client.gather(tasks)
    assert all(ranks[process] < began for process, began in plain_ones)


def test_launch_returns_once_all_ranks_are_sent(client, monkeypatch):
    def send(*args, **kwargs):
        time.sleep(0.2)  # while the main thread looks whether there are futures
        return submit(*args, **kwargs)

    submit = client.submit
    monkeypatch.setattr(client, "submit", send)
    monkeypatch.setattr("daskrun.client.job.LOOK_S", 0.01)
    job = daskrun.launch(client, os.getpid)
    assert len(job._control.attempt.futures) == 2
    job.result()


def test_a_plain_task_on_a_ranks_worker_is_named_and_the_rank_begins_once_it_has_ended(client, tmp_path, monkeypatch):
    begun, end, plain, claim = tmp_path / "begun", tmp_path / "end", [], Cluster.claim

    def work():
        begun.touch()
        wait_for(end)
        return "done"

    async def claim_and_be_late(cluster, request):
        """Let a plain task be on rank 1's worker before the rank, as one of another client may be."""
        claimed = await claim(cluster, request)
        plain.append(client.submit(work, workers=[claimed.workers[1].address], key="plain"))
        while not begun.exists():
            await asyncio.sleep(0.05)
        return claimed

    settled(client)
    monkeypatch.setattr(Cluster, "claim", claim_and_be_late)
    job = daskrun.launch(client, os.getpid)
    until(lambda: f"Rank 1 has not begun: worker {job.workers[1]} is busy with ['plain']" in job.explain())
    end.touch()
    assert len(job.result()) == 2 and plain[0].result() == "done"


GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer")


@pytest.mark.parametrize(
    "error, follows",
    [
        (GLOO, True),
        (dist.DistNetworkError("lost"), True),
        (ExceptionGroup("of a TaskGroup", [GLOO]), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("the loss is NaN"), False),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("mine"), False),
    ],
)
def test_only_an_error_of_the_ranks_communication_may_come_of_a_death(error, follows):
    assert may_follow(error) is follows
    wrapped = ValueError("wrapped")
    wrapped.__cause__, wrapped.__context__ = KeyError("another"), error
    assert may_follow(wrapped) is follows


def test_the_client_keeps_nothing_of_a_job_that_is_over(client):
    job = daskrun.launch(client, int, backend=None)
    control = weakref.ref(job._control)
    job.result()
    del job
    gc.collect()
    assert control() is None
