"""A launched function runs as ranks, fails as itself, and leaves free workers behind, whatever ended it."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from distributed import CancelledError, Client, LocalCluster, wait

from workshop_utils import ddp
from workshop_utils import job as job_module
from workshop_utils.cluster import LOOPBACK, n_gpus, start_cluster
from workshop_utils.job import JobError, WorkerDied, WorkersBusy
from workshop_utils.results import log_metrics

pytestmark = pytest.mark.filterwarnings("ignore:Port 8787 is busy", "ignore:Sending large graph")


def ranks_and_pids(client):
    def who():
        return dist.get_rank(), os.getpid()

    return ddp.run(client, who, timeout=60)


@pytest.fixture(autouse=True)
def launches_work_before_and_after(request):
    client = request.getfixturevalue("client") if "client" in request.fixturenames else None
    for turn in range(2):
        if client:
            ranks, pids = zip(*ranks_and_pids(client), strict=True)  # the first of a worker imports PyTorch: seconds
            assert ranks == (0, 1) and len(set(pids)) == 2
        if turn == 0:
            yield


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
    names = {address: info["name"] for address, info in client.scheduler_info(n_workers=-1)["workers"].items()}

    def address():
        from distributed import get_worker

        return get_worker().address

    assert [names[address] for address in ddp.run(client, address)] == sorted(names.values())


def test_some_workers_can_do_a_job_while_others_do_another(client, sleeper):
    first, second = (ddp.launch(client, sleeper, 2, n_workers=1) for _ in range(2))
    assert first.workers != second.workers
    with pytest.raises(WorkersBusy, match=f"needs 1 idle.*{first.workers[0]}.*sleep.*job.cancel"):
        ddp.launch(client, sleeper, n_workers=1)
    with ThreadPoolExecutor(2) as pool:  # two threads may wait for one job
        assert list(pool.map(lambda job: job.result(), [first, second, second])) == [[0], [0], [0]]
    assert first.done() and "1 ranks, finished" in repr(first)


def test_launches_from_two_threads_do_not_take_the_same_worker(client, sleeper):
    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(lambda _: ddp.launch(client, sleeper, 1, n_workers=1), range(2)))
    assert [job.result() for job in jobs] == [[0], [0]] and jobs[0].workers != jobs[1].workers


def test_two_clusters_work_at_once_whichever_client_is_the_latest(client, tmp_path):
    def meet(folder):
        Path(folder, f"{os.getpid()}").touch()
        while len(list(Path(folder).iterdir())) < 4:
            time.sleep(0.02)
        total = __import__("torch").ones(1)
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
                worker.terminate()
                worker.wait(30)
    assert first == {LOOPBACK} and second <= {LOOPBACK, "127.0.0.2"}


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
            dist.all_reduce(__import__("torch").ones(1))
        if other == "sleeps":
            time.sleep(1000)

    elapsed()
    with pytest.raises(KeyError, match="no such breed") as caught:
        ddp.run(client, fail_on, rank, other)
    assert elapsed() < 5
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
        dist.all_reduce(__import__("torch").ones(1))

    with pytest.raises(Demanding, match="rank 7") as caught:
        ddp.run(client, fail, lambda: Demanding("rank", 7))
    assert caught.value.number == 7
    with pytest.raises(Exception, match="Unpicklable.*it has a lock") as caught:
        ddp.run(client, fail, Unpicklable)
    assert "fail" in frames(caught.value)
    with pytest.raises(Slow):
        ddp.run(client, fail, Slow)


def test_the_end_of_a_process_is_refused_and_the_end_of_its_group_is_not(client):
    def leave(how):
        how()
        return "left"

    assert ddp.run(client, leave, dist.destroy_process_group) == ["left", "left"]  # as scripts for torchrun do
    with pytest.raises(JobError, match=r"Rank \d called for the end of its process: SystemExit\(3\)"):
        ddp.run(client, leave, lambda: sys.exit(3))


def test_a_rank_left_alone_in_a_collective_is_told_who_returned(client):
    def uneven():
        if dist.get_rank() == 1:
            dist.all_reduce(__import__("torch").ones(1))

    with pytest.raises(RuntimeError) as caught:
        ddp.run(client, uneven)
    assert "Raised by rank 1 of 2" in caught.value.__notes__[0]
    assert "Rank 0 had returned by then" in caught.value.__notes__[0]


def test_a_group_that_cannot_be_made_is_reported_as_that(client):
    def unreached():
        raise AssertionError("it ran")

    with pytest.raises(JobError, match="backend='nccl' needs a GPU of its own for each rank.*'auto' or 'gloo'"):
        ddp.run(client, unreached, backend="nccl")
    with pytest.raises(Exception, match="nonsense"):
        ddp.run(client, unreached, backend="nonsense")


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


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"n_workers": 3}, JobError, "needs 3 workers, one for each rank, but the cluster has 2: ask for fewer"),
        ({"n_workers": 0}, JobError, "n_workers is 0: give a whole number"),
        ({"n_workers": 1.5}, JobError, "n_workers is 1.5"),
        ({"n_workers": "2"}, JobError, "n_workers is '2'"),
        ({"timeout": 0}, ValueError, "timeout is 0: give seconds"),
        ({"timeout": "1 min"}, ValueError, "timeout is '1 min'"),
        ({"timeout": float("nan")}, ValueError, "timeout is nan"),
        ({"max_restarts": -1}, ValueError, "max_restarts is -1: give a whole number"),
        ({"max_restarts": None}, ValueError, "max_restarts is None"),
    ],
)
def test_wrong_settings_are_refused(client, settings, error, message):
    with pytest.raises(error, match=message):
        ddp.launch(client, print, **settings)


# What ends a job from outside


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("other", ["waits in all_reduce", "sleeps"])
def test_a_killed_rank_is_named(client, elapsed, rank, other):
    def die(rank, other):
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if other == "waits in all_reduce":
            dist.all_reduce(__import__("torch").ones(1))
        time.sleep(1000)

    job = ddp.launch(client, die, rank, other)
    elapsed()
    with pytest.raises(WorkerDied, match=f"Rank {rank} died: worker {job.workers[rank]} was killed.*max_restarts"):
        job.result()
    assert elapsed() < 10


def test_a_rank_that_hangs_meets_the_timeout(client, elapsed):
    def hang():
        if dist.get_rank() == 1:
            time.sleep(1000)

    elapsed()
    with pytest.raises(TimeoutError, match="Rank 1 had not returned after 2 s: look at client.call_stack()"):
        ddp.run(client, hang, timeout=2)
    assert 2 < elapsed() < 10


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
    until(lambda: not any(tasks for _, tasks in client.run(job_module._at_work).values()))


def test_a_waiting_thread_that_is_interrupted_frees_the_workers(client, sleeper, monkeypatch):
    job = started(ddp.launch(client, sleeper))

    def interrupted(condition):
        raise KeyboardInterrupt

    monkeypatch.setattr(job._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.result()
    monkeypatch.undo()
    with pytest.raises(CancelledError):
        job.result()


def test_ctrl_c_in_a_script_frees_the_workers(client, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from distributed import Client
        from workshop_utils import ddp

        def sleep(started):
            Path(started).touch()
            time.sleep(1000)

        with Client(sys.argv[1]) as client:
            ddp.run(client, sleep, sys.argv[2])
    """)
    )
    running = tmp_path / "running"
    process = subprocess.Popen(
        [sys.executable, script, client.scheduler.address, running],
        cwd=Path(__file__).parents[1],
        stderr=subprocess.PIPE,
    )
    try:
        until(running.exists)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0 and b"KeyboardInterrupt" in errors.splitlines()[-1]


def test_busy_workers_are_left_alone(client, sleeper):
    task = client.submit(time.sleep, 4, pure=False)
    until(lambda: any(client.processing().values()))
    with pytest.raises(WorkersBusy, match="needs 2 idle workers, but tcp://.* with .*sleep.* is busy: wait"):
        ddp.launch(client, sleeper)
    assert ddp.run(client, sleeper, 0, n_workers=1) == [0]
    wait(task)
    job = ddp.launch(client, sleeper, 3)
    with pytest.raises(WorkersBusy, match=f"with \\['{job.name}'\\]"):
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


# Many launches


def test_a_hundred_launches_leave_nothing_behind(client):
    def total():
        log_metrics(step=1)
        total = __import__("torch").ones(1)
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
    assert job_module._jobs == []
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
def test_ranks_that_share_a_gpu_are_refused_nccl_and_get_gloo():
    with LocalCluster(2, threads_per_worker=1, dashboard_address=f"{LOOPBACK}:0") as cluster, Client(cluster) as client:
        assert ddp.run(client, dist.get_backend, timeout=120) == ["gloo"] * 2
        with pytest.raises(JobError, match="needs a GPU of its own"):
            ddp.run(client, dist.get_backend, backend="nccl", timeout=120)
