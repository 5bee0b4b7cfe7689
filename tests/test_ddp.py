"""A launched function runs as ranks, fails as itself, and leaves free workers behind, whatever ended it."""

import errno
import gc
import importlib
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import distributed
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import CancelledError, Client, LocalCluster, wait

from workshop_utils import ddp
from workshop_utils.cluster import LOOPBACK, known_workers, n_gpus, start_cluster
from workshop_utils.job import JobError, SchedulerLost, WorkerDied, WorkersBusy, on_scheduler
from workshop_utils.job import rank as rank_module
from workshop_utils.job.rank import at_work
from workshop_utils.job.travel import packed
from workshop_utils.results import log_metrics

pytestmark = pytest.mark.filterwarnings("ignore:Port 8787 is busy", "ignore:Sending large graph")


def ranks_and_pids(client):
    def who():
        return dist.get_rank(), os.getpid()

    return ddp.run(client, who, timeout=60)


@pytest.fixture(autouse=True)
def launches_work_before_and_after(request):
    nothing_starts = request.node.get_closest_marker("refused")
    client = request.getfixturevalue("client") if "client" in request.fixturenames and not nothing_starts else None
    for turn in range(2):
        if client:
            ranks, pids = zip(*ranks_and_pids(client), strict=True)  # the first of a worker imports PyTorch: seconds
            assert ranks == (0, 1) and len(set(pids)) == 2
        if turn == 0:
            yield


SOON_S = 25  # less than any time limit of the launcher's, PyTorch's or Dask's that a job could wait for in vain


@pytest.fixture
def elapsed():
    """Seconds since the test asked for the first time."""
    started = []

    def seconds():
        started.append(time.monotonic())
        return started[-1] - started[0]

    return seconds


def until(condition, timeout_s=60):
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "it took too long"
        time.sleep(0.05)


def started(job, n_ranks=2):
    """Return once so many ranks have logged a row."""
    until(lambda: len(job.metrics()) >= n_ranks)
    return job


@pytest.fixture(scope="module")
def sleeper():
    def sleep(seconds=1000):
        log_metrics(awake=False)
        time.sleep(seconds)
        return dist.get_rank()

    return sleep


def frames(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# What a launch does


def test_arguments_arrive_and_results_are_in_rank_order(client):
    def told(*args, **kwargs):
        return dist.get_rank(), dist.get_world_size(), dist.get_backend(), args, kwargs

    results = ddp.run(client, told, 1, "two", n_workers=2, three=[3], rank="mine", fn=None, client=1)
    about = (1, "two"), {"three": [3], "rank": "mine", "fn": None, "client": 1}
    assert results == [(0, 2, "gloo", *about), (1, 2, "gloo", *about)]
    assert ddp.run(client, len, bytes(50_000_000)) == [50_000_000] * 2


def test_a_second_run_with_equal_arguments_runs_again(client, tmp_path):
    def append(path):
        with open(path, "a") as file:
            file.write("x")
        return time.time_ns()

    first, second = (ddp.run(client, append, str(tmp_path / "runs")) for _ in range(2))
    assert not set(first) & set(second)
    assert (tmp_path / "runs").read_text() == "xxxx"


def test_ranks_go_by_host_and_then_by_the_names_of_workers(client):
    names = {address: info["name"] for address, info in known_workers(client).items()}

    def address():
        from distributed import get_worker

        return get_worker().address

    assert [names[address] for address in ddp.run(client, address)] == sorted(names.values())


def test_some_workers_can_do_a_job_while_others_do_another(client, sleeper):
    first, second = (ddp.launch(client, sleeper, 2, n_workers=1) for _ in range(2))
    assert first.workers != second.workers
    with pytest.raises(WorkersBusy, match=f"{first.workers[0]}.*sleep.*job.cancel"):
        ddp.launch(client, sleeper, n_workers=1)
    with ThreadPoolExecutor(2) as pool:  # two threads may wait for one job
        assert list(pool.map(lambda job: job.result(), [first, second, second])) == [[0], [0], [0]]
    assert first.done() and "1 rank, finished" in repr(first)


def test_launches_from_two_threads_do_not_take_the_same_worker(client, sleeper):
    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(lambda _: ddp.launch(client, sleeper, 1, n_workers=1), range(2)))
    assert [job.result() for job in jobs] == [[0], [0]] and jobs[0].workers != jobs[1].workers


@pytest.mark.long
def test_two_clusters_work_at_once_whichever_client_is_the_latest(client, tmp_path):
    def meet(folder):
        Path(folder, f"{os.getpid()}").touch()
        while len(list(Path(folder).iterdir())) < 4:
            time.sleep(0.02)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    with LocalCluster(n_workers=2, threads_per_worker=1, host=LOOPBACK, dashboard_address=f"{LOOPBACK}:0") as cluster:
        with Client(cluster) as other:
            jobs = [ddp.launch(which, meet, str(tmp_path), timeout=60) for which in (client, other)]
            assert [job.result() for job in jobs] == [[2.0, 2.0]] * 2
        assert ddp.run(client, os.getppid)  # `other` is closed now


def test_everything_listens_on_the_workers_own_address_and_the_environment_stays(client):
    def environment():
        return dict(os.environ)

    def listening():
        dist.barrier()
        addresses = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        os.environ |= {"MINE": "1", "OMP_NUM_THREADS": "77"}
        return addresses, os.environ["MASTER_ADDR"], os.environ["RANK"]

    before = client.run(environment)
    assert ddp.run(client, listening) == [({LOOPBACK}, LOOPBACK, "0"), ({LOOPBACK}, LOOPBACK, "1")]
    assert client.run(environment) == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on all of 127.0.0.0/8")
def test_workers_on_two_addresses_meet_and_stay_on_them(tmp_path):
    def listening(barrier=lambda: None):
        barrier()
        connections = psutil.Process().net_connections()
        return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}

    workers = []
    with (
        LocalCluster(n_workers=0, host=LOOPBACK, dashboard_address=f"{LOOPBACK}:0") as cluster,
        Client(cluster) as client,
    ):
        try:
            for host in ("127.0.0.1", "127.0.0.2"):
                command = [sys.executable, "-m", "distributed.cli.dask_worker", cluster.scheduler_address]
                flags = ["--host", host, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
                workers.append(subprocess.Popen(command + flags, cwd=tmp_path, stderr=subprocess.DEVNULL))
            client.wait_for_workers(2, timeout=120)
            before = set().union(*client.run(listening).values())  # Dask's own, of which one is on all addresses
            first, second = ({ip for ip, _ in new - before} for new in ddp.run(client, listening, dist.barrier))
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(30)
    assert first == {LOOPBACK} and second <= {LOOPBACK, "127.0.0.2"}


def test_metrics_may_have_any_name(client):
    def log():
        log_metrics(failed=True, exception="none", attempts=1)

    job = ddp.launch(client, log, n_workers=1)
    assert job.result() == [None] and job.metrics().failed.tolist() == [True]


def test_rows_are_seen_while_the_job_runs_and_after_its_end(client, tmp_path):
    def step(path):
        log_metrics(step=1)
        while not os.path.exists(path):
            time.sleep(0.02)
        log_metrics(step=2)

    job = ddp.launch(client, step, str(tmp_path / "go"), n_workers=1)
    rows = job.rows()
    assert next(rows)["step"] == 1 and not job.done()
    (tmp_path / "go").touch()
    assert [row["step"] for row in rows] == [2]
    assert [row["step"] for row in job.rows()] == [1, 2]
    assert job.result() == job.result() == [None]
    assert list(job.metrics()) == ["rank", "attempt", "time", "step", "worker"]
    assert set(job.metrics().worker) == set(job.workers)


# What a failing function gives


@pytest.mark.parametrize("other", ["waits in all_reduce", "sleeps", "returns"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_ends_the_job_with_its_own_error(client, elapsed, rank, other):
    def fail():
        raise KeyError("no such breed")

    def fail_on(rank, other):
        if dist.get_rank() == rank:
            return fail()
        if other == "waits in all_reduce":
            dist.all_reduce(torch.ones(1))
        if other == "sleeps":
            time.sleep(1000)

    elapsed()
    with pytest.raises(KeyError, match="no such breed") as caught:
        ddp.run(client, fail_on, rank, other)
    assert elapsed() < SOON_S
    assert frames(caught.value)[-2:] == ["fail_on", "fail"]
    assert f"Raised by rank {rank} of 2, on worker tcp://" in caught.value.__notes__[0]


def test_odd_exceptions_arrive_too(client):
    class Demanding(Exception):
        def __init__(self, name, number):
            super().__init__(f"{name} {number}")
            self.number = number

    class Unpicklable(Exception):
        def __init__(self):
            super().__init__("it has a lock")
            self.lock = threading.Lock()

    class Slow(Exception):
        def __reduce__(self):  # pickled twice: the other rank's error overtakes this one
            time.sleep(1.5)
            return Slow, ()

    def fail(error_of):
        if dist.get_rank() == 0:
            raise error_of()
        dist.all_reduce(torch.ones(1))

    with pytest.raises(Demanding, match="rank 7") as caught:
        ddp.run(client, fail, lambda: Demanding("rank", 7))
    assert caught.value.number == 7
    with pytest.raises(Exception, match="Unpicklable.*it has a lock") as caught:
        ddp.run(client, fail, Unpicklable)
    assert "fail" in frames(caught.value)
    with pytest.raises(Slow):
        ddp.run(client, fail, Slow)


def test_a_recursion_without_end_arrives_as_that(client, elapsed):
    def dig():
        return dig()

    elapsed()
    with pytest.raises(RecursionError) as caught:
        ddp.run(client, dig)
    assert elapsed() < SOON_S
    assert frames(caught.value)[-9:] == ["dig"] * 9 and "Raised by rank" in caught.value.__notes__[0]


def test_the_end_of_a_process_is_refused_and_the_end_of_its_group_is_not(client):
    def leave(how):
        how()
        return "left"

    assert ddp.run(client, leave, dist.destroy_process_group) == ["left", "left"]  # as scripts for torchrun do
    with pytest.raises(JobError, match=r"Rank \d called sys.exit\(3\): let the function return, or raise"):
        ddp.run(client, leave, lambda: sys.exit(3))

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(JobError, match=r"Rank \d was interrupted"):
        ddp.run(client, leave, interrupted)


def test_a_rank_left_alone_in_a_collective_is_told_who_returned(client):
    def uneven():
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError) as caught:
        ddp.run(client, uneven)
    assert "Raised by rank 1 of 2" in caught.value.__notes__[0]
    assert "Rank 0 had returned by then" in caught.value.__notes__[0]


def test_a_group_that_cannot_be_made_is_reported_as_that(client):
    def unreached():
        raise AssertionError("it ran")

    with pytest.raises(JobError, match="backend='nccl' needs a GPU of its own for each rank.*'auto' or 'gloo'"):
        ddp.run(client, unreached, backend="nccl")


def test_what_cannot_be_sent_is_refused(client):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="'<lambda>' or one of its arguments cannot be sent to workers.*inside the"):
        ddp.launch(client, lambda: lock)
    with pytest.raises(TypeError, match="cannot be sent to workers"):
        ddp.launch(client, print, lock)
    with pytest.raises(TypeError, match="returned cannot be sent back: return numbers"):
        ddp.run(client, lambda: (n for n in range(3)))

    def lost_on_the_way():
        raise RuntimeError("cannot be read on the worker")

    class Trap:
        def __reduce__(self):
            return lost_on_the_way, ()

    with pytest.raises(RuntimeError, match="cannot be read on the worker"):
        ddp.run(client, id, Trap())


@pytest.mark.refused
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"n_workers": 3}, JobError, "needs 3 workers, one for each rank, but the cluster has 2: ask for fewer"),
        ({"n_workers": 0}, ValueError, "n_workers is 0: give a whole number"),
        ({"n_workers": 1.5}, ValueError, "n_workers is 1.5"),
        ({"n_workers": "2"}, ValueError, "n_workers is '2'"),
        ({"n_workers": (3, 2)}, ValueError, r"n_workers is \(3, 2\): give .* a pair \(fewest, most\)"),
        ({"n_workers": (0, 2)}, ValueError, r"n_workers is \(0, 2\)"),
        ({"n_workers": (1, 2, 3)}, ValueError, r"n_workers is \(1, 2, 3\)"),
        ({"n_workers": (3, 4)}, JobError, r"needs 3 workers.*adaptive.*cluster.adapt\(minimum=3\).*wait_for_workers"),
        ({"timeout": 0}, ValueError, "timeout is 0: give seconds"),
        ({"timeout": "1 min"}, ValueError, "timeout is '1 min'"),
        ({"timeout": float("nan")}, ValueError, "timeout is nan"),
        ({"max_restarts": -1}, ValueError, "max_restarts is -1: give a whole number"),
        ({"max_restarts": None}, ValueError, "max_restarts is None"),
        ({"wait_for_workers": -1}, ValueError, "wait_for_workers is -1: give seconds"),
        ({"wait_for_successors": "1 min"}, ValueError, "wait_for_successors is '1 min': give seconds"),
        ({"backend": "mpi"}, ValueError, "backend is 'mpi': write one of auto, gloo"),
    ],
)
def test_wrong_settings_are_refused(client, settings, error, message):
    with pytest.raises(error, match=message):
        ddp.launch(client, print, **settings)


# What ends a job from outside


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("other", ["waits in all_reduce", pytest.param("sleeps", marks=pytest.mark.long)])
def test_a_killed_rank_is_named(client, elapsed, rank, other):
    def die(rank, other):
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if other == "waits in all_reduce":
            dist.all_reduce(torch.ones(1))
        time.sleep(1000)

    job = ddp.launch(client, die, rank, other)
    elapsed()
    with pytest.raises(WorkerDied, match=f"Rank {rank} died: worker {job.workers[rank]} was killed.*max_restarts"):
        job.result()
    assert elapsed() < SOON_S


def test_a_rank_that_hangs_meets_the_timeout(client, elapsed):
    def hang():
        if dist.get_rank() == 1:
            time.sleep(1000)

    elapsed()
    with pytest.raises(TimeoutError, match=r"Rank 1 had not returned after 2 s. .*test_ddp.py:\d+ in hang"):
        ddp.run(client, hang, timeout=2)
    assert 2 < elapsed() < SOON_S


@pytest.mark.long
def test_a_job_can_be_cancelled_at_any_time(client, sleeper):
    before_the_ranks = ddp.launch(client, sleeper)
    before_the_ranks.cancel()
    running = ddp.launch(client, sleeper)
    started(running).cancel()
    for job in (before_the_ranks, running):
        with pytest.raises(CancelledError, match="sleep-.* was cancelled"):
            job.result()
    finished = ddp.launch(client, sleeper, 0)
    assert finished.result() == [0, 1]
    finished.cancel()
    assert finished.result() == [0, 1]


def test_cancelled_futures_end_the_job_and_free_its_workers(client, sleeper):
    job = started(ddp.launch(client, sleeper, max_restarts=3))
    client.cancel(job.futures)
    with pytest.raises(CancelledError, match="lost its tasks to client.cancel()"):
        job.result()


def test_a_restart_of_the_cluster_ends_the_job_and_does_not_restart_it(client, sleeper):
    job = started(ddp.launch(client, sleeper, max_restarts=3))
    client.restart()
    with pytest.raises(CancelledError, match="client.restart()"):
        job.result()
    assert job.failures == []


def test_a_closed_client_ends_the_job(client, sleeper):
    other = Client(client.scheduler.address)
    job = started(ddp.launch(other, sleeper, 5))
    other.close()
    with pytest.raises(CancelledError, match="client.close()"):
        job.result()
    until(lambda: not any(tasks for _, tasks in client.run(at_work, on_error="ignore").values()))


@contextmanager
def interrupt_after(condition):
    """Send this process Ctrl-C, or the notebook's stop button, once the condition holds."""

    def interrupt():
        until(condition)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    yield


def test_an_interrupt_while_waiting_frees_the_workers(client, sleeper):
    job = started(ddp.launch(client, sleeper))
    with pytest.raises(KeyboardInterrupt), interrupt_after(lambda: time.sleep(0.5) or True):
        job.result()
    with pytest.raises(CancelledError):
        job.result()


def test_an_interrupt_in_the_body_of_a_loop_over_rows_frees_the_workers(client, sleeper):
    looping = threading.Event()
    with pytest.raises(KeyboardInterrupt), interrupt_after(looping.is_set), ddp.launch(client, sleeper) as job:
        for _ in job.rows():
            looping.set()
            time.sleep(1000)
    with pytest.raises(CancelledError):
        job.result()


def test_leaving_the_block_early_frees_the_workers_and_leaving_it_late_keeps_the_result(client, sleeper):
    with ddp.launch(client, sleeper) as job:
        started(job)
    with pytest.raises(CancelledError):
        job.result()
    with ddp.launch(client, sleeper, 0) as job:
        assert job.result() == [0, 1]
    assert job.result() == [0, 1]


def test_an_interrupt_during_the_launch_frees_the_workers(client, sleeper):
    task = client.submit(time.sleep, 1000, pure=False)  # so that the launch waits
    until(lambda: any(client.processing().values()))
    with pytest.raises(KeyboardInterrupt), interrupt_after(lambda: time.sleep(0.5) or True):
        ddp.launch(client, sleeper, wait_for_workers=1000)
    assert client.run_on_scheduler(on_scheduler.owned) == {}
    task.cancel()
    client.restart()


SCRIPT = """
    import sys, time
    from pathlib import Path
    from distributed import Client
    from workshop_utils import ddp

    def work(folder, seconds):
        Path(folder, "running").touch()
        time.sleep(seconds)

    with Client(sys.argv[1]) as client:
        Path(sys.argv[2], sys.argv[4]).touch()
        while not Path(sys.argv[2], "go").exists():
            time.sleep(0.01)
        ddp.run(client, work, sys.argv[2], float(sys.argv[3]))
"""


def kernel(client, folder, seconds, name):
    """Start another process with a client of its own, which launches a job once there is a file `go`."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, script, client.scheduler.address, folder, str(seconds), name]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True)
    until((folder / name).exists)
    return process


@pytest.mark.long
def test_ctrl_c_in_a_script_frees_the_workers(client, tmp_path):
    (tmp_path / "go").touch()
    process = kernel(client, tmp_path, 1000, "one")
    try:
        until((tmp_path / "running").exists)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0 and "KeyboardInterrupt" in errors.splitlines()[-1]


@pytest.mark.long
def test_of_two_kernels_that_launch_at_once_one_runs_and_the_other_is_told_who_is_busy(client, tmp_path):
    kernels = [kernel(client, tmp_path, 3, name) for name in ("one", "two")]
    try:
        (tmp_path / "go").touch()
        errors = sorted((process.communicate(timeout=100)[1] for process in kernels), key=len)
    finally:
        for process in kernels:
            process.kill()
    assert sorted(process.returncode for process in kernels) == [0, 1]
    assert "WorkersBusy" in errors[1] and re.search(r"tcp://\S+ belongs to the job work-", errors[1])


def test_a_job_of_a_kernel_that_was_killed_does_not_keep_its_workers(client, tmp_path):
    (tmp_path / "go").touch()
    process = kernel(client, tmp_path, 2, "one")
    until((tmp_path / "running").exists)
    process.kill()
    process.communicate()
    assert len(ddp.run(client, os.getpid, wait_for_workers=30)) == 2


def test_a_launch_can_wait_for_busy_workers(client, sleeper):
    first = ddp.launch(client, sleeper, 2)
    assert ddp.launch(client, sleeper, 0, wait_for_workers=60).result() == [0, 1]
    assert first.done()
    with pytest.raises(JobError, match="needs 3 workers"):
        ddp.launch(client, sleeper, n_workers=3, wait_for_workers=0.3)


def test_busy_workers_are_left_alone(client, sleeper):
    task = client.submit(time.sleep, 4, pure=False)
    until(lambda: any(client.processing().values()))
    with pytest.raises(WorkersBusy, match="needs 2 idle workers.*busy with .*sleep"):
        ddp.launch(client, sleeper)
    assert ddp.run(client, sleeper, 0, n_workers=1) == [0]
    wait(task)
    task.release()  # or Dask would run it again after the death of the worker that holds its result
    job = ddp.launch(client, sleeper, 3)
    with pytest.raises(WorkersBusy, match=job.name):
        ddp.launch(client, sleeper)
    assert job.result() == [0, 1]


def test_workers_that_cannot_be_restarted_are_told_of():
    def sleep():
        time.sleep(6)

    settings = {"protocol": "tcp", "host": LOOPBACK, "dashboard_address": f"{LOOPBACK}:0", "threads_per_worker": 1}
    with LocalCluster(n_workers=2, processes=False, **settings) as cluster, Client(cluster) as client:
        with pytest.raises(JobError, match="share a process.*processes=True"):
            ddp.launch(client, sleep)
        job = ddp.launch(client, sleep, n_workers=1, timeout=1)
        with pytest.warns(UserWarning, match="has no nanny to restart it, and stays busy"):
            with pytest.raises(TimeoutError):
                job.result()
            job.cancel()
        with pytest.raises(WorkersBusy, match="sleep"):
            ddp.launch(client, sleep, n_workers=2)


def test_a_worker_that_dies_while_it_sends_its_result_is_named(client, elapsed):
    class Deadly:
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGKILL)

    def deadly():
        return Deadly() if dist.get_rank() == 1 else None

    job = ddp.launch(client, deadly)
    elapsed()
    with pytest.raises(WorkerDied, match="Rank 1 died"):
        job.result()
    assert elapsed() < SOON_S


def test_a_worker_that_dies_after_its_rank_has_returned_is_named(client):
    def leave_behind(path):
        def die():
            while not os.path.exists(path):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die).start()
        return bytes(10)

    class Folder:  # a rank 0 that takes long, while rank 1 has returned and dies
        def __init__(self, path):
            self.path = path

        def __call__(self):
            if dist.get_rank() == 1:
                return leave_behind(self.path)
            time.sleep(1)
            Path(self.path).touch()
            time.sleep(1000)

    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.raises(WorkerDied, match="Rank 1 died"):
        ddp.run(client, Folder(f"{folder}/go"))


def test_the_first_failure_is_reported_though_its_process_group_cannot_be_left(client, elapsed, monkeypatch):
    def fail():
        if dist.get_rank() == 1:
            dist.destroy_process_group = lambda: time.sleep(1000)  # as NCCL's may, where its peers wait
            raise KeyError("the cause")
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)  # as NCCL's watchdog would, later

    elapsed()
    with pytest.raises(KeyError, match="the cause"):
        ddp.run(client, fail, max_restarts=3)
    assert elapsed() < SOON_S


def test_a_lost_scheduler_is_named_at_once(tmp_path, elapsed):
    def die(started):
        Path(started).touch()
        time.sleep(1000)

    flags = ["--host", LOOPBACK, "--port", "0", "--no-dashboard", "--scheduler-file", tmp_path / "scheduler.json"]
    scheduler = subprocess.Popen([sys.executable, "-m", "distributed.cli.dask_scheduler", *flags], cwd=tmp_path)
    workers = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", tmp_path / "scheduler.json"]
    workers = subprocess.Popen([*workers, "--nthreads", "1", "--no-dashboard", "--death-timeout", "5"], cwd=tmp_path)
    try:
        with Client(scheduler_file=str(tmp_path / "scheduler.json"), timeout="60s") as client:
            client.wait_for_workers(1, timeout=60)
            job = ddp.launch(client, die, str(tmp_path / "started"), max_restarts=3)
            until((tmp_path / "started").exists)
            scheduler.kill()
            elapsed()
            with pytest.raises(SchedulerLost, match="connection to the scheduler is lost.*Start or join a cluster"):
                job.result()
            job.cancel()
            assert elapsed() < SOON_S
            with pytest.raises(SchedulerLost, match="Start or join a cluster"):
                ddp.launch(client, os.getpid)
            assert elapsed() < SOON_S
    finally:
        for process in (workers, scheduler):
            process.kill()
            process.wait(30)


def test_a_hang_says_where_each_rank_stands(client):
    def wait_alone():
        log_metrics(here=True)
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(1))

    def save():
        time.sleep(1000)

    def mismatched():
        if dist.get_rank() == 0:
            save()
        wait_alone()

    job = ddp.launch(client, mismatched, timeout=4)
    until(lambda: len(job.metrics()) == 1)
    until(lambda: "all_reduce" in job.stacks())
    first, second = job.stacks().split("Rank 1")
    assert first.startswith("Rank 0") and "in mismatched" in first and "in save" in first and "dask" not in first
    assert "in wait_alone" in second and "dist.all_reduce(torch.ones(1))" in second
    waits = r"Rank 1 waits in all_reduce \d+ of \[1\], at test_ddp.py:\d+ in wait_alone, in all_reduce"
    others = r"Rank 0 has not called it: it is at test_ddp.py:\d+ in save"
    with pytest.raises(TimeoutError, match=rf"Ranks 0 and 1 had not returned after 4 s. {waits}. {others}") as caught:
        job.result()
    assert "dist.all_reduce(torch.ones(1))" in caught.value.__notes__[0]
    until(lambda: job.stacks() == "")


def test_models_that_differ_are_named_with_the_first_tensor_and_its_rank(client):
    def compare(what):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        for tensor in (*model.parameters(), *model.buffers()):
            torch.nn.init.zeros_(tensor) if tensor.is_floating_point() else tensor.zero_()
        if dist.get_rank() == 1 and what == "weight":
            model[1].weight.data[1] = torch.nan
        if dist.get_rank() == 1 and what in ("buffer", "buffer left out"):
            model[1].running_mean[0] = 1
        if dist.get_rank() == 1 and what == "another model":
            model.append(torch.nn.Linear(1, 1))
        try:
            ddp.assert_equal_on_all_ranks(model, buffers=what != "buffer left out")
        except AssertionError as error:
            return str(error)

    names = ("", "weight", "buffer", "buffer left out", "another model")
    said = {what: ddp.run(client, compare, what) for what in names}
    assert said[""] == said["buffer left out"] == [None, None]
    assert all(first == second for first, second in said.values()), "the ranks come to the same"
    assert "1.weight: rank 1 has other values than rank 0. 1 of 7 tensors" in said["weight"][0]
    assert ".module" in said["weight"][0] and "Only buffers" not in said["weight"][0]
    assert "1.running_mean: rank 1 has other values" in said["buffer"][0] and "1 of 7 tensors" in said["buffer"][0]
    assert "Only buffers differ" in said["buffer"][0] and ".module" not in said["buffer"][0]
    assert "2.weight: rank 0 has no such tensor. 2 of 9 tensors" in said["another model"][0]


def test_a_ddp_model_whose_batchnorm_sees_other_images_on_each_rank_is_equal_after_any_step(client):
    def train():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(3):
            parallel(torch.randn(8, 3, 8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ddp.assert_equal_on_all_ranks(parallel)
        with pytest.raises(AssertionError, match="running_mean.*Only buffers differ.*buffers=False"):
            ddp.assert_equal_on_all_ranks(parallel, buffers=True)

    ddp.run(client, train)


def test_models_of_equal_numbers_in_other_shapes_or_types_differ(client):
    def compare(first, second):
        model = torch.nn.Module()
        model.register_buffer("kept", second if dist.get_rank() else first)
        try:
            ddp.assert_equal_on_all_ranks(model, buffers=True)
        except (AssertionError, TypeError) as error:
            return re.search("rank 1 has .*? than rank 0|kept of rank 1 .* (quantized|meta device)", str(error))[0]

    zeros = torch.zeros
    different = [(zeros(3, 2), zeros(2, 3)), (zeros(0, 2), zeros(0, 3)), (zeros(4), zeros(2, dtype=torch.float64))]
    alike = [(zeros(()), zeros(())), (zeros(2, 3).T, zeros(3, 2)), (zeros(2, dtype=torch.cfloat).conj(),) * 2]
    on_meta = [(zeros(2), torch.empty(2, device="meta"))]
    quantized = [(zeros(2), torch.quantize_per_tensor(zeros(2), 0.1, 0, torch.qint8))]
    cases = {
        "rank 1 has another shape or type than rank 0": different,
        None: alike,
        "kept of rank 1 cannot be compared, as it is on the meta device": on_meta,
        "kept of rank 1 cannot be compared, as it is quantized": quantized,
    }
    for expected, pairs in cases.items():
        for pair in pairs:
            assert ddp.run(client, compare, *pair) == [expected, expected], pair


def test_a_model_in_shards_has_nothing_to_compare(client):
    def sharded():
        from torch.distributed.fsdp import fully_shard

        ddp.assert_equal_on_all_ranks(fully_shard(torch.nn.Linear(4, 4)))

    with pytest.raises(TypeError, match="weight of ranks 0 and 1 cannot be compared, as it is in shards"):
        ddp.run(client, sharded)


def test_one_process_without_a_group_is_equal_to_itself():
    ddp.assert_equal_on_all_ranks(torch.nn.Linear(2, 2))


def test_what_ranks_return_keeps_its_type(client):
    def tensors():
        half = torch.full((2,), 1.5, dtype=torch.bfloat16)
        weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        return {"half": half, "weight": weight, "layer": torch.nn.Linear(2, 1).bfloat16()}

    for found in ddp.run(client, tensors):
        assert found["half"].dtype == torch.bfloat16 and found["half"].tolist() == [1.5, 1.5]
        assert isinstance(found["weight"], torch.nn.Parameter) and found["weight"].requires_grad
        assert found["layer"](torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_tensors_leave_their_device_before_they_travel():
    class Elsewhere(torch.Tensor):  # of what a client cannot have
        device = torch.device("cuda")

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    there = torch.ones(2, dtype=torch.bfloat16).as_subclass(Elsewhere)
    found = pickle.loads(packed([there, {"again": there}]))
    assert type(found[0]) is torch.Tensor and found[0].tolist() == [1, 1] and found[0].dtype == torch.bfloat16


# What code written for torchrun finds


def test_ranks_find_the_environment_of_torchrun(client):
    def environment():
        names = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "RANK", "WORLD_SIZE")
        return {name: value for name, value in os.environ.items() if name.startswith(names)}

    first, second = ddp.run(client, environment, max_restarts=2)
    assert (
        first.items()
        >= {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "2",
            "ROLE_RANK": "0",
            "ROLE_WORLD_SIZE": "2",
            "ROLE_NAME": "default",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "2",
            "MASTER_ADDR": LOOPBACK,
        }.items()
    )
    differ = {name for name in first if first[name] != second[name]}
    assert differ == {"RANK", "GROUP_RANK", "ROLE_RANK"}
    assert first["TORCHELASTIC_RUN_ID"].startswith("environment-")


def test_a_script_for_torchrun_runs_as_it_is(client):
    def main():
        dist.init_process_group("gloo")
        total = torch.tensor([float(os.environ["RANK"]) + 1])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    assert ddp.run(client, main) == [3.0, 3.0]

    def twice():
        from torch.distributed import init_process_group

        for _ in range(10):  # each of these must not meet at the addresses of the one before
            init_process_group("gloo", init_method="env://")
            total = torch.ones(1)
            dist.all_reduce(total)
            dist.destroy_process_group()
        return total.item()

    assert ddp.run(client, twice) == [2.0, 2.0]


BY_NAME = """
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import init_process_group as make_group


def main():
    make_group("gloo", "env://", timedelta(minutes=5))
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    make_group("gloo", "env://", timedelta(minutes=5))
    dist.all_reduce(total)
    return total.item(), dist.get_rank()
"""


def test_a_module_that_has_imported_init_process_group_by_name_runs_in_each_job(client, tmp_path):
    (tmp_path / "script_by_name.py").write_text(BY_NAME)
    client.upload_file(str(tmp_path / "script_by_name.py"))  # which imports it on the workers, outside any job

    def main():
        import script_by_name

        return script_by_name.main()

    for _ in range(2):
        assert ddp.run(client, main, timeout=120) == [(4.0, 0), (4.0, 1)]


def test_settings_of_pytorch_that_a_function_changed_are_restored(client):
    def change():
        cudnn = importlib.import_module("torch.backends.cudnn")  # cloudpickle cannot send it
        cudnn.benchmark, cudnn.deterministic = not cudnn.benchmark, not cudnn.deterministic
        torch.set_default_device("meta")
        torch.set_warn_always(True)
        torch.set_autocast_enabled("cpu", True)
        os.chdir("/")

    def settings():
        cudnn = importlib.import_module("torch.backends.cudnn")
        switches = cudnn.benchmark, cudnn.deterministic, torch.is_warn_always_enabled()
        return str(torch.empty(1).device), os.getcwd(), torch.is_autocast_enabled("cpu"), *switches

    before = ddp.run(client, settings)
    ddp.run(client, change)
    assert ddp.run(client, settings) == before


def test_a_seed_that_all_ranks_set_does_not_let_the_next_job_draw_the_same_on_all(client):
    def seed():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    ddp.run(client, seed)
    drawn = ddp.run(client, lambda: [torch.rand(1).item(), random.random(), float(np.random.random())])
    assert len({number for rank in drawn for number in rank}) == 6


def test_a_group_that_could_not_be_made_does_not_break_the_next_job(client):
    def alone():  # rank 1 never comes, and the failed group is counted on rank 0 only
        dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            dist.init_process_group("gloo", timeout=timedelta(seconds=2))

    with pytest.raises(RuntimeError, match="wait timeout"):
        ddp.run(client, alone, timeout=60)
    assert ddp.run(client, dist.get_rank, timeout=20) == [0, 1]


def test_interfaces_that_an_administrator_has_set_are_kept(client):
    def interfaces():
        return {name: value for name, value in os.environ.items() if name.endswith("SOCKET_IFNAME")}

    def set_interface(value):
        os.environ.update(GLOO_SOCKET_IFNAME=value) if value else os.environ.pop("GLOO_SOCKET_IFNAME")

    assert ddp.run(client, interfaces) == [{"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}] * 2
    client.run(set_interface, "lo,eth0")
    try:
        assert ddp.run(client, interfaces) == [{"GLOO_SOCKET_IFNAME": "lo,eth0", "NCCL_SOCKET_IFNAME": "=lo"}] * 2
    finally:
        client.run(set_interface, None)


@pytest.mark.refused
@pytest.mark.parametrize(
    ("gpus", "backend", "expected"),
    [
        (["", ""], "auto", "gloo"),
        (["a [0, 1, 0]", "a [0, 2, 0]"], "auto", "cpu:gloo,cuda:nccl"),
        (["a [0, 1, 0]", "a [0, 1, 0]"], "auto", "gloo"),  # two slices of one GPU, or two ranks that share it
        (["a [0, 1, 0]", "b [0, 1, 0]"], "nccl", "nccl"),
        (["a [0, 1, 0]", ""], "gloo", "gloo"),
        (["a [0, 1, 0]", ""], "auto", "Rank 1 of 2 has no GPU, and the others have: take workers of one kind"),
        (["a [0, 1, 0]", "a [0, 1, 0]"], "nccl", "needs a GPU of its own for each rank"),
    ],
)
def test_the_backend_suits_the_gpus_of_all_ranks(gpus, backend, expected):
    if " " in expected:
        with pytest.raises(JobError, match=expected):
            ddp.backend_for(backend, gpus)
    else:
        assert ddp.backend_for(backend, gpus) == expected


@pytest.mark.refused
def test_a_store_listens_wider_only_where_its_address_is_not_this_hosts(monkeypatch):
    asked = []

    def create_server(address, error, **settings):
        asked.append(address[0])
        raise OSError(error, "no")

    for error, expected in ((errno.EADDRINUSE, [LOOPBACK]), (errno.EADDRNOTAVAIL, [LOOPBACK, ""])):
        monkeypatch.setattr(rank_module.socket, "create_server", partial(create_server, error=error))
        asked.clear()
        with pytest.raises(OSError, match="no"):
            rank_module.serve_store(LOOPBACK)
        assert asked == expected


@pytest.mark.refused
def test_the_interface_is_found_by_name_and_behind_translation(monkeypatch):
    class Worker:
        address = ""

    def get_ip(host, to=distributed.utils.get_ip):
        return LOOPBACK if host == "192.0.2.1" else to(host)

    monkeypatch.setattr(rank_module, "get_worker", lambda: Worker)
    monkeypatch.setattr(distributed.utils, "get_ip", get_ip)
    for host in (LOOPBACK, "127.0.0.7", "localhost", "[::1]", "192.0.2.1"):  # the last as if a route led there
        Worker.address = f"tcp://{host}:1"
        assert rank_module.network_interface() == "lo"


def made_data():
    torch.manual_seed(1)
    x = torch.randn(16, 3)
    return x, x.sum(1, keepdim=True)


def loss_of_the_plain_loop():
    """What one process reaches in five steps that each see all images, as two ranks with 8 each do."""
    torch.manual_seed(0)
    model, (x, y) = torch.nn.Linear(3, 1), made_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return ((model(x) - y) ** 2).mean().item()


def test_accelerate_trains_on_all_ranks_to_the_loss_of_the_plain_loop(client):
    pytest.importorskip("accelerate")
    data = made_data()

    def train(x, y):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _ in range(5):
            for xs, ys in loader:
                loss = ((model(xs) - ys) ** 2).mean()
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
        model = accelerator.unwrap_model(model)
        return accelerator.num_processes, accelerator.process_index, ((model(x) - y) ** 2).mean().item()

    expected = loss_of_the_plain_loop()
    for rank, (n_processes, index, loss) in enumerate(ddp.run(client, train, *data, timeout=120)):
        assert (n_processes, index) == (2, rank)
        assert loss == pytest.approx(expected, rel=1e-5)


def test_lightning_trains_on_all_ranks_to_the_loss_of_the_plain_loop(client, tmp_path):
    pytest.importorskip("lightning")
    data = made_data()

    def train(x, y, folder):
        import lightning
        import torchmetrics

        class Line(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = torch.nn.Linear(3, 1)
                self.mean = torchmetrics.MeanMetric()

            def training_step(self, batch, _):
                xs, ys = batch
                self.mean.update(ys)
                return ((self.layer(xs) - ys) ** 2).mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            num_nodes=2,
            strategy="ddp",
            max_epochs=5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
        model = Line()
        trainer.fit(model, loader)
        loss = ((model.layer(x) - y) ** 2).mean().item()
        return trainer.world_size, trainer.global_rank, loss, model.mean.compute().item()

    expected = loss_of_the_plain_loop()
    for rank, answer in enumerate(ddp.run(client, train, *data, str(tmp_path), timeout=180)):
        assert answer[:2] == (2, rank)
        assert answer[2] == pytest.approx(expected, rel=1e-5)
        assert answer[3] == pytest.approx(data[1].mean().item(), abs=1e-6)  # torchmetrics' over all ranks


def test_transformers_trains_on_all_ranks_to_the_loss_of_the_plain_loop(client, tmp_path):
    pytest.importorskip("transformers")
    data = made_data()

    def train(x, y, folder):
        from transformers import Trainer, TrainingArguments

        class Line(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = torch.nn.Linear(3, 1)

            def forward(self, x, labels):
                logits = self.layer(x)
                return {"loss": ((logits - labels) ** 2).mean(), "logits": logits}

        settings = TrainingArguments(
            folder,
            max_steps=5,
            per_device_train_batch_size=8,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        model = Line()
        samples = [{"x": one, "labels": its} for one, its in zip(x, y, strict=True)]
        Trainer(model, settings, train_dataset=samples).train()
        return settings.world_size, settings.process_index, ((model.layer(x) - y) ** 2).mean().item()

    expected = loss_of_the_plain_loop()
    for rank, answer in enumerate(ddp.run(client, train, *data, str(tmp_path), timeout=180)):
        assert answer == (2, rank, pytest.approx(expected, rel=1e-5))


# Restarts


def test_a_job_goes_on_from_its_checkpoint_after_a_death(client, tmp_path):
    def count(checkpoint, die_at):
        at = int(checkpoint.read_text()) if checkpoint.exists() else 0
        dist.barrier()  # all have read before rank 0 writes
        for step in range(at, 6):
            if (step, dist.get_rank(), at) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            log_metrics(step=step)
            dist.barrier()
            if dist.get_rank() == 0:
                checkpoint.write_text(str(step + 1))
        return at

    job = ddp.launch(client, count, tmp_path / "step", (3, 1, 0), max_restarts=1)
    assert job.result() == [3, 3]
    assert [type(death) for death in job.failures] == [WorkerDied] and "Rank 1 died" in str(job.failures[0])
    rows = job.metrics()
    assert set(rows[rows.attempt == 0].step) <= {0, 1, 2, 3}
    assert sorted(rows[rows.attempt == 1].step) == [3, 3, 4, 4, 5, 5]


def test_restarts_are_for_deaths_alone_and_run_out(client, tmp_path):
    def fail(counter):
        with open(counter, "a") as file:
            file.write("x")
        raise ValueError("every time")

    with pytest.raises(ValueError, match="every time"):
        ddp.run(client, fail, tmp_path / "raised", n_workers=1, max_restarts=3)
    assert (tmp_path / "raised").read_text() == "x"

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    job = ddp.launch(client, die, n_workers=1, max_restarts=1)
    with pytest.raises(WorkerDied, match="Rank 0 died"):
        job.result()
    assert len(job.failures) == 1


def test_what_a_job_left_set_in_pytorch_is_not_set_for_the_next_in_the_same_process(client):
    def settings():
        found = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
        found += torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        return os.getpid(), found

    first, second = (ddp.run(client, settings, n_workers=1) for _ in range(2))
    assert first == second
    assert first[0][1] == (torch.float32, True, 1, "highest", False)


# Many launches


@pytest.mark.long
def test_a_hundred_launches_leave_nothing_behind(client):
    def total():
        log_metrics(step=1)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    def open_things(process=None):
        process = psutil.Process()
        sockets = [c for c in process.net_connections() if c.status != psutil.CONN_NONE]
        return {"sockets": len(sockets), "fds": process.num_fds(), "threads": process.num_threads()}

    def everywhere():
        return {"client": open_things(), **client.run(open_things)}

    for _ in range(5):
        ddp.run(client, total)
    gc.collect()
    before = everywhere()
    for _ in range(100):
        assert ddp.run(client, total, timeout=60) == [2.0, 2.0]
    gc.collect()

    def leaked():
        return [
            (where, what, count - before[where][what])
            for where, things in everywhere().items()
            for what, count in things.items()
            if count > before[where][what] + 2  # of a hundred; pools breathe
        ]

    until(lambda: not leaked(), 20)
    assert client.run_on_scheduler(on_scheduler.owned) == {}
    until(lambda: not client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks)), 10)


@pytest.mark.gpu
def test_ranks_with_a_gpu_each_talk_over_nccl():
    def totals():
        import torch

        totals = [torch.ones(1, device=device) for device in ("cuda", "cpu")]
        for total in totals:
            dist.all_reduce(total)
        return [total.item() for total in totals], str(torch.cuda.get_device_properties(0).uuid)

    client = start_cluster()
    try:
        answers = ddp.run(client, totals, timeout=120)
        assert [total for total, _ in answers] == [[n_gpus(), n_gpus()]] * n_gpus()
        assert len({gpu for _, gpu in answers}) == n_gpus()
        assert ddp.run(client, dist.get_backend, backend="nccl", timeout=120) == ["nccl"] * n_gpus()
    finally:
        client.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_failure_under_nccl_reaches_the_client_and_frees_the_gpus(n_ranks, elapsed):
    if n_gpus() < n_ranks:
        pytest.skip(f"needs {n_ranks} GPUs, and this machine has {n_gpus()}")

    def fail_on_the_last():
        total = torch.ones(1 << 20, device="cuda")
        for number in range(2):
            if number and dist.get_rank() == dist.get_world_size() - 1:
                raise ZeroDivisionError("the last rank's own mistake")
            dist.all_reduce(total)  # the second time, the others wait for it on their GPUs
            total.sum().item()

    client = start_cluster(n_ranks)
    try:
        assert ddp.run(client, dist.get_backend, backend="nccl", timeout=120) == ["nccl"] * n_ranks  # warms up
        elapsed()
        with pytest.raises(ZeroDivisionError, match="the last rank's own mistake"):
            ddp.run(client, fail_on_the_last, backend="nccl", timeout=120)
        assert elapsed() < SOON_S
        assert ddp.run(client, dist.get_world_size, backend="nccl", timeout=120) == [n_ranks] * n_ranks
    finally:
        client.shutdown()


@pytest.mark.gpu
def test_a_rank_killed_under_nccl_is_started_anew(tmp_path):
    def die_once(marker):
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        if not os.path.exists(marker):
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return total.item()

    client = start_cluster(1)
    try:
        job = ddp.launch(client, die_once, str(tmp_path / "marker"), backend="nccl", max_restarts=1, timeout=120)
        assert job.result() == [1] and len(job.failures) == 1
    finally:
        client.shutdown()


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_are_refused_nccl_and_get_gloo():
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": f"{LOOPBACK}:0"}
    with LocalCluster(**settings) as cluster, Client(cluster) as client:
        assert ddp.run(client, dist.get_backend, timeout=120) == ["gloo"] * 2
        with pytest.raises(JobError, match="needs a GPU of its own"):
            ddp.run(client, dist.get_backend, backend="nccl", timeout=120)
