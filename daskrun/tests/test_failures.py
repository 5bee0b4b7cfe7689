"""Real hangs and deaths: the job says which rank, which collective, which process state, and of what it died."""

import ctypes
import os
import re
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from processes import dask_cluster, has_ended
from waiting import awake, until, wait_for

import daskrun
from daskrun import WorkerDied, log_metrics
from daskrun.protocol import AttemptId
from daskrun.scheduler import known
from daskrun.why.looks import looks

pytestmark = pytest.mark.filterwarnings("ignore:Sending large graph")


def test_a_rank_that_holds_the_gil_is_looked_at_from_outside(client):
    def holds_the_gil():
        if dist.get_rank() == 1:
            re.match("(a+)+$", "a" * 60 + "b")  # takes years
        dist.all_reduce(torch.ones(10))

    said = r"Rank 1 does not answer: .* uses .*, at .*in holds_the_gil.* Rank 0 waits in all_reduce"
    with daskrun.launch(client, holds_the_gil, wait_for_workers=60) as job:
        until(lambda: re.search(said, job.explain()))


def test_a_rank_whose_worker_answers_that_it_is_not_there_has_ended(client):
    async def look(dask_scheduler):
        worker = known(list(dask_scheduler.workers), dask_scheduler)[0]
        return await looks(AttemptId("over-1", 0), {0: worker}, [0], dask_scheduler)

    assert client.run_on_scheduler(look) == ([], [0])


def quiet(*gates):
    """Log a row, and then nothing until there is the next gate."""
    for gate in gates:
        log_metrics(step=1)
        wait_for(gate)
    return "done"


def test_a_job_that_logs_nothing_says_so_once_each_time_and_goes_on(client, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    job = daskrun.launch(client, quiet, first, second, stall_after=0.5, wait_for_workers=60)
    said = []

    def hear(message, *_):
        if "in wait_for" in str(message):  # not that of a rank which takes long to begin
            said.append(str(message))

    def open_when_told():
        until(lambda: said)
        time.sleep(2)  # long enough for another warning, which must not come
        first.touch()
        until(lambda: len(said) > 1)
        second.touch()

    with warnings.catch_warnings(), ThreadPoolExecutor(1) as pool:
        warnings.simplefilter("always")
        warnings.showwarning = hear
        opened = pool.submit(open_when_told)
        assert job.result() == ["done", "done"]
        opened.result()
    assert len(said) == 2
    assert all("quiet" in one and re.search(r"logged anything for \d+ s\.", one) for one in said)


def test_the_warning_of_a_stall_never_ends_the_job(client, tmp_path, monkeypatch):
    gate = tmp_path / "open"

    def heard(text, **_):
        if "logged anything" in text:
            gate.touch()

    monkeypatch.setattr("builtins.print", heard)  # what is printed where warnings are errors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert daskrun.run(client, quiet, gate, stall_after=0.5, wait_for_workers=60) == ["done", "done"]


def crashes():
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(3))


def exits(code):
    if dist.get_rank() == 1:
        os._exit(code)
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("fn", "args", "said"),
    [
        (crashes, (), r"signal 11 .SIGSEGV., at test_failures.py:\d+ in "),
        (exits, (3,), "exit code 3"),
    ],
)
def test_a_death_is_told_with_its_signal_or_exit_code(client, fn, args, said):
    with pytest.raises(WorkerDied, match=f"worker tcp://.*{said}") as caught:
        daskrun.run(client, fn, *args)
    assert list(caught.value.deaths) == [1]


@pytest.mark.weekly
def test_a_worker_that_a_signal_to_its_nanny_closes_is_told_with_the_signal(tmp_path):
    def works():
        log_metrics(step=1)
        time.sleep(1000)

    with dask_cluster(tmp_path, 2) as (client, _):
        job = awake(daskrun.launch(client, works))
        nanny = client.run(os.getppid, workers=job.workers[1:])[job.workers[1]]
        os.kill(nanny, signal.SIGTERM)
        with pytest.raises(WorkerDied, match="SIGTERM") as caught:
            job.result()
        assert caught.value.deaths == {1: None}


def test_a_worker_that_dies_takes_its_rank_with_it_and_the_job_goes_on(client):
    def works():
        log_metrics(pid=os.getpid())
        while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(0.05)

    job = awake(daskrun.launch(client, works, max_restarts=1))
    rank = int(job.metrics().query("rank == 1").pid.iloc[0])
    os.kill(client.run(os.getpid)[job.workers[1]], signal.SIGKILL)
    job.result()
    assert job.failures[0].deaths == {1: None}
    until(lambda: has_ended(rank))


def test_a_rank_that_comes_to_its_workers_memory_limit_is_ended_and_the_worker_stays():
    def leaks():
        kept = []
        while True:
            kept.append(torch.ones(2_000_000))
            time.sleep(0.01)

    with daskrun.start_local(1, memory_limit="1 GiB") as client, client.cluster:
        before = client.run(os.getpid)
        with pytest.raises(WorkerDied, match="memory limit") as caught:
            daskrun.run(client, leaks)
        assert caught.value.deaths[0].limit_bytes == int(0.95 * 2**30)
        assert client.run(os.getpid) == before
