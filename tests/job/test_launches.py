"""What a job does to a real cluster and to the jobs of others: it hangs nobody, hurts nobody, and leaves nothing."""

import asyncio
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import CancelledError, Client, LocalCluster
from distributed.comm import CommClosedError

from workshop_utils import ddp
from workshop_utils.cluster import known_workers
from workshop_utils.job import JobError, SchedulerLost, WorkersBusy, on_scheduler
from workshop_utils.job.ask import ask_scheduler
from workshop_utils.job.owners import Denied, Request
from workshop_utils.results import ResultsHandler, log_metrics

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it


def until(condition, timeout_s=60):
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "it took too long"
        time.sleep(0.05)


def pause_above(fraction, dask_worker=None):
    dask_worker.memory_manager.memory_pause_fraction = fraction


def by_name(client):
    """Return the workers' addresses in rank order."""
    workers = known_workers(client)
    return sorted(workers, key=lambda address: str(workers[address]["name"]))


def status_of(client, address):
    return known_workers(client)[address]["status"]


@pytest.fixture
def paused(client):
    """A worker that uses more than its pause limit of memory; it goes on after the test."""
    address = min(client.nthreads())
    client.run(pause_above, 1e-6, workers=[address])
    until(lambda: status_of(client, address) == "paused")
    yield address
    client.run(pause_above, 0.8, workers=[address])
    until(lambda: status_of(client, address) == "running")


def test_a_paused_worker_is_named_and_keeps_nobody_else_from_the_cluster(client, paused):
    start = time.monotonic()
    with pytest.raises(WorkersBusy, match=f"{paused} is paused.* of memory.*restart_workers"):
        ddp.run(client, os.getpid)
    with Client(client.scheduler.address, set_as_default=False) as other:
        assert len(ddp.run(other, os.getpid, n_workers=1)) == 1
    assert time.monotonic() < start + 30


def test_a_rank_whose_worker_pauses_before_it_begins_is_named(client):
    def take_long(dask_worker):
        make = dist.TCPStore

        def slowly(*args, **kwargs):
            dist.TCPStore = make  # for this launch alone
            time.sleep(3)
            return make(*args, **kwargs)

        dist.TCPStore = slowly

    first, second = by_name(client)
    client.run(take_long, workers=[first])
    job = ddp.launch(client, os.getpid, timeout=60)
    client.run(pause_above, 1e-6, workers=[second])
    try:
        with pytest.raises(JobError, match=f"Rank 1 cannot begin: worker {second} is paused"):
            job.result()
    finally:
        client.restart_workers([second])


def test_a_death_in_one_job_does_not_reach_the_job_of_another_kernel(client):
    def die_soon():
        log_metrics(running=True)
        if dist.get_rank() == 1:
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    def work():
        time.sleep(5)
        return "done"

    job = ddp.launch(client, die_soon)
    until(lambda: len(job.metrics()) == 2)
    with Client(client.scheduler.address, set_as_default=False) as other, ThreadPoolExecutor(1) as pool:
        second = pool.submit(ddp.run, other, work, n_workers=1, wait_for_workers=60)
        with pytest.raises(JobError, match="Rank 1 died"):
            job.result()
        assert second.result(90) == ["done"]


def test_a_rank_that_cannot_reach_the_store_ends_the_job_and_is_named(client):
    def cut_off(dask_worker):
        connect = dist.TCPStore

        def unreachable(host, port, *args, is_master=True, **kwargs):
            dist.TCPStore = connect  # for this launch alone
            if is_master:
                return connect(host, port, *args, is_master=is_master, **kwargs)
            raise dist.DistNetworkError("The client socket has timed out")  # as behind a firewall, after REACH_S

        dist.TCPStore = unreachable

    client.run(cut_off, workers=by_name(client)[1:])
    start = time.monotonic()
    with pytest.raises(JobError, match=r"Rank 1, on worker tcp://.* could not connect to rank 0 at \S+:\d+.*firewall"):
        ddp.run(client, dist.barrier)
    assert time.monotonic() < start + 20


def test_nothing_of_a_job_stays_on_the_scheduler(client, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_SHARED", str(tmp_path / "shared"))

    def send(handler):
        for number in range(100):
            log_metrics(step=number)
        handler.submit_result(f"{dist.get_rank()}.bin", bytes(16 * 2**20))

    def kept(dask_scheduler):
        events = dask_scheduler.get_events()
        mine = {topic: kept for topic, kept in events.items() if topic.startswith(("send-", "results-"))}
        return sum(len(str(event)) for kept in mine.values() for event in kept), len(dask_scheduler.tasks)

    for _ in range(3):
        handler = ResultsHandler(client=client)
        job = ddp.launch(client, send, handler)
        assert len(handler.process_results(tmp_path / "results", job.futures)) == 2
    assert (tmp_path / "results" / "1.bin").stat().st_size == 16 * 2**20
    assert len(job.metrics()) == 200
    del job
    gc.collect()  # a job that failed is in its own error's traceback
    until(lambda: client.run_on_scheduler(kept) == (0, 0), 20)
    assert client.run_on_scheduler(on_scheduler.owned) == {}
    assert not [path for path in (tmp_path / "shared").rglob("*") if path.is_file()]


def test_a_function_with_large_arguments_passes_the_scheduler_once(client):
    with pytest.warns(UserWarning, match="large graph") as warned:
        assert ddp.run(client, len, os.urandom(12_000_000)) == [12_000_000] * 2
    assert len([one for one in warned if "large graph" in str(one.message)]) == 1


def test_a_plain_accelerator_trains_on_all_ranks_without_a_setting(client):
    pytest.importorskip("accelerate")

    def world():
        from accelerate import Accelerator

        accelerator = Accelerator()
        return accelerator.num_processes, accelerator.process_index

    assert ddp.run(client, world, timeout=120) == [(2, 0), (2, 1)]


def test_the_environment_of_other_threads_never_changes_but_for_the_jobs_own_variables(client):
    def watch(seconds):
        home, missing, end = os.environ["HOME"], 0, time.monotonic() + seconds
        while time.monotonic() < end:
            missing += os.environ.get("HOME") != home
        return missing

    def busy(dask_worker):
        dask_worker.watcher = ThreadPoolExecutor(1).submit(watch, 4)

    client.run(busy)
    for _ in range(20):
        ddp.run(client, int)
    assert set(client.run(lambda dask_worker: dask_worker.watcher.result()).values()) == {0}


def test_a_client_that_is_closed_leaves_no_rank_no_claim_and_no_message(client):
    def chat():
        while True:
            log_metrics(step=1)
            time.sleep(0.05)

    def topics(dask_scheduler):
        return [topic for topic in dask_scheduler.get_events() if topic.startswith("chat-")]

    before = set(client.run(os.getpid).values())
    other = Client(client.scheduler.address, set_as_default=False)
    job = ddp.launch(other, chat)
    until(lambda: len(job.metrics()) > 4)
    other.close()
    with pytest.raises(CancelledError):
        job.result()
    assert set(ddp.run(client, os.getpid, wait_for_workers=60)).isdisjoint(before)
    until(lambda: client.run_on_scheduler(topics) == [], 20)


def test_a_client_that_is_gone_gets_no_workers_any_more(client):
    denied = client.run_on_scheduler(on_scheduler.claim, Request("late", "no such client"))
    assert isinstance(denied, Denied) and client.run_on_scheduler(on_scheduler.owned) == {}


def test_a_restart_of_the_cluster_frees_what_a_job_has_left_behind(client):
    client.run_on_scheduler(on_scheduler.claim, Request("left", client.id))
    assert len(client.run_on_scheduler(on_scheduler.owned)) == 2
    client.restart()
    assert client.run_on_scheduler(on_scheduler.owned) == {}


def test_a_scheduler_that_is_lost_while_it_is_asked_is_called_lost(client):
    def end(dask_scheduler):
        raise CommClosedError("the connection ended")

    with pytest.raises(SchedulerLost, match="is lost.*Start or join"):
        client.sync(ask_scheduler, client, end)


def test_a_client_need_not_import_pytorch(client):
    program = (
        "import os, sys; from distributed import Client; from workshop_utils import ddp\n"
        f"with Client({client.scheduler.address!r}) as client: ddp.run(client, os.getpid)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


def test_a_client_that_cannot_launch_is_refused_at_once(client):
    with Client(client.scheduler.address) as closed:
        pass
    with pytest.raises(SchedulerLost, match="client is closed"):
        ddp.launch(closed, os.getpid)

    async def launch():
        async with Client(client.scheduler.address, asynchronous=True) as waiting:
            ddp.launch(waiting, os.getpid)

    with pytest.raises(TypeError, match="asynchronous=False"):
        asyncio.run(launch())


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception that takes no note, and cannot be sent as it is."""

    code: int = 0


def test_an_exception_that_takes_no_note_is_reported_with_its_rank_all_the_same(client):
    def fail():
        raise Frozen(7)

    with pytest.raises(Exception, match=r"Frozen\(code=7\)") as caught:
        ddp.run(client, fail)
    assert "Raised by rank" in caught.value.__notes__[0]


def test_a_nanny_that_hears_late_of_the_end_of_a_job_does_not_kill_the_next(tmp_path):
    python = [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1", "--no-dashboard"]
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster, Client(cluster) as client:
        started = subprocess.Popen([*python, cluster.scheduler_address], cwd=tmp_path, start_new_session=True)
        try:
            client.wait_for_workers(1, timeout=60)
            ddp.run(client, os.getpid)
            job = ddp.launch(client, time.sleep, 8)
            until(lambda: "running" in repr(job))
            nanny = psutil.Process(started.pid)
            nanny.suspend()
            job.cancel()
            with pytest.raises(WorkersBusy, match="belongs to the job"):
                ddp.launch(client, os.getpid)
            nanny.resume()
            assert ddp.run(client, os.getpid, wait_for_workers=60)
        finally:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def test_a_process_that_outlives_a_death_holds_nothing_of_the_attempt_before(client):
    def work():
        begun_with = psutil.Process().memory_info().rss
        held = torch.ones(100_000_000)  # 400 MB
        dist.barrier()
        if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        log_metrics(begun_with=begun_with, pid=os.getpid())
        dist.barrier()
        return held.sum().item()

    with ddp.launch(client, work, n_workers=2, max_restarts=1) as job:
        assert job.result() == [1e8, 1e8]
        first, second = job.metrics().query("rank == 0").sort_values("attempt").itertuples()
    assert first.pid == second.pid
    assert second.begun_with < first.begun_with + 200e6
