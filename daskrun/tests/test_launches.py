"""What a job does to a real cluster and to the jobs of others: it hangs nobody, hurts nobody, and leaves nothing."""

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import CancelledError, Client, LocalCluster
from distributed.comm import CommClosedError
from waiting import awake, settled, until, wait_for, waits

import daskrun
from daskrun import JobError, SchedulerLost, WorkersBusy, log_metrics, scheduler, watch
from daskrun.claims import Claimed, Denied, Request
from daskrun.cluster import Cluster
from daskrun.rank import AttemptId, Meeting, deliver, leave
from daskrun.settings import known_workers
from daskrun.why.look import may_follow_a_death
from workshop_utils.results import ResultsHandler

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it


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


@pytest.mark.weekly
def test_a_death_in_one_job_does_not_reach_the_job_of_another_kernel(client, tmp_path):
    def die(gate):
        log_metrics(running=True)
        if dist.get_rank() == 1:
            wait_for(gate)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    job = awake(daskrun.launch(client, die, tmp_path / "die"))
    with Client(client.scheduler.address, set_as_default=False) as other, ThreadPoolExecutor(1) as pool:
        second = pool.submit(daskrun.launch, other, waits, tmp_path / "end", n_workers=1, wait_for_workers=60)
        (tmp_path / "die").touch()
        with pytest.raises(JobError, match="Rank 1 died"):
            job.result()
        (tmp_path / "end").touch()
        assert second.result().result() == [0]


def test_a_rank_that_cannot_reach_the_store_ends_the_job_and_is_named(client):
    def cut_off():  # in a process that is replaced after the job
        def unreachable(*args, **kwargs):
            raise dist.DistNetworkError("The client socket has timed out")  # as behind a firewall, after REACH_S

        dist.TCPStore = unreachable

    client = settled(client)
    client.run(cut_off, workers=by_name(client)[1:])
    with pytest.raises(JobError, match=r"Rank 1, on worker tcp://.* could not connect to rank 0 at \S+:\d+.*firewall"):
        daskrun.run(client, dist.barrier)


@pytest.mark.smoke
def test_nothing_of_a_job_stays_on_the_scheduler(client, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_SHARED", str(tmp_path / "shared"))

    def send(handler):
        for number in range(100):
            log_metrics(step=number)
        handler.submit_result(f"{dist.get_rank()}.bin", bytes(16 * 2**20))

    def kept(dask_scheduler):
        """Return the topics of jobs and results that have events, and the tasks."""
        topics = {topic for topic, events in dask_scheduler.get_events().items() if events}
        return {topic for topic in topics if topic.startswith(("send-", "results-"))} | set(dask_scheduler.tasks)

    before = client.run_on_scheduler(kept)  # by other tests
    handler = ResultsHandler(client=client)
    job = daskrun.launch(client, send, handler)
    assert len(handler.process_results(tmp_path / "results", job.futures)) == 2
    assert (tmp_path / "results" / "1.bin").stat().st_size == 16 * 2**20
    assert len(job.metrics()) == 200
    del job
    gc.collect()  # a job that failed is in its own error's traceback
    until(lambda: client.run_on_scheduler(kept) <= before)
    assert client.run_on_scheduler(scheduler.owned) == {}
    assert not [path for path in (tmp_path / "shared").rglob("*") if path.is_file()]


def test_large_arguments_are_sent_to_the_scheduler_once_for_all_ranks(client, monkeypatch):
    sent, run = [], client.run

    def count(function, *args, **kwargs):
        sent.append(len(pickle.dumps(args)))
        return run(function, *args, **kwargs)

    monkeypatch.setattr(client, "run", count)
    assert daskrun.run(client, len, os.urandom(12_000_000)) == [12_000_000] * 2
    assert sum(size > 1_000_000 for size in sent) == 1


@pytest.mark.weekly
def test_the_environment_of_other_threads_never_changes_but_for_the_jobs_own_variables(client):
    def watch(dask_worker):
        def look():
            while not dask_worker.ended:
                dask_worker.n_missing += "HOME" not in os.environ

        dask_worker.ended, dask_worker.n_missing = False, 0
        dask_worker.watcher = threading.Thread(target=look)
        dask_worker.watcher.start()

    def n_missing(dask_worker):
        dask_worker.ended = True
        dask_worker.watcher.join()
        return dask_worker.n_missing

    settled(client).run(watch)
    for _ in range(20):
        daskrun.run(client, int)
    assert set(client.run(n_missing).values()) == {0}


@pytest.mark.smoke
def test_a_client_that_is_closed_leaves_no_rank_no_claim_and_no_message(client):
    def chat():
        while True:
            log_metrics(step=1)
            time.sleep(0.05)

    def topics(dask_scheduler):
        return [topic for topic in dask_scheduler.get_events() if topic.startswith("chat-")]

    before = set(settled(client).run(os.getpid).values())
    other = Client(client.scheduler.address, set_as_default=False)
    job = awake(daskrun.launch(other, chat), n_ranks=5)
    other.close()
    with pytest.raises(CancelledError, match="client.close()"):
        job.result()
    assert set(daskrun.run(client, os.getpid, wait_for_workers=120)).isdisjoint(before)
    until(lambda: client.run_on_scheduler(topics) == [])


def test_a_client_that_is_gone_gets_no_workers_any_more(client):
    denied = client.run_on_scheduler(scheduler.claim, Request("late", "no such client"))
    assert isinstance(denied, Denied) and client.run_on_scheduler(scheduler.owned) == {}


def test_a_scheduler_that_is_lost_while_it_is_asked_is_called_lost(client):
    def end(dask_scheduler):
        raise CommClosedError("the connection ended")

    with pytest.raises(SchedulerLost, match="is lost.*Start or join"):
        client.sync(Cluster(client, "job")._ask_scheduler, end)


@pytest.mark.weekly
def test_a_client_need_not_import_pytorch(client):
    program = (
        "import os, sys; from distributed import Client; import daskrun\n"
        f"with Client({client.scheduler.address!r}) as client: daskrun.run(client, os.getpid)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.weekly
def test_a_nanny_that_hears_late_of_the_end_of_a_job_does_not_kill_the_next(tmp_path):
    python = [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1", "--no-dashboard"]
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster, Client(cluster) as client:
        started = subprocess.Popen([*python, cluster.scheduler_address], cwd=tmp_path, start_new_session=True)
        try:
            client.wait_for_workers(1, timeout=120)
            daskrun.run(client, os.getpid)
            job = awake(daskrun.launch(client, waits, tmp_path / "end"), n_ranks=1)
            nanny = psutil.Process(started.pid)
            nanny.suspend()
            job.cancel()
            with pytest.raises(WorkersBusy, match="belongs to the job"):
                daskrun.launch(client, os.getpid)
            (tmp_path / "end").touch()  # the rank ends by itself, before its nanny hears that it has to
            nanny.resume()
            assert daskrun.run(client, os.getpid, wait_for_workers=120)
        finally:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def n_held():
    """Return how many tensors of a job's size this process holds."""
    gc.collect()
    return sum(type(one) is torch.Tensor and one.numel() == 1_234_567 for one in gc.get_objects())


def test_nothing_that_a_failed_job_held_is_in_the_process_of_the_next(client):
    def fail():
        error = ValueError("with a tensor")
        error.held = torch.ones(1_234_567)
        raise error

    with pytest.raises(ValueError, match="with a tensor"):
        daskrun.run(client, fail)
    assert daskrun.run(client, n_held, wait_for_workers=60) == [0, 0]


@pytest.mark.weekly
def test_nothing_that_an_attempt_held_is_in_the_process_of_the_next(client):
    def work():
        held, n_before = torch.ones(1_234_567), n_held()
        dist.barrier()
        if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return n_before + held.numel() - held.numel()

    assert daskrun.launch(client, work, n_workers=2, max_restarts=1).result() == [1, 1]  # its own


@pytest.mark.smoke
def test_a_plain_task_beside_a_launch_waits_for_the_ranks(client):
    def work():
        time.sleep(0.5)
        return os.getpid(), time.time()

    def plain(number):
        return os.getpid(), time.time()

    job = daskrun.launch(client, work)
    tasks = client.map(plain, range(2), pure=False)  # in the next line
    ranks, plain_ones = dict(job.result()), client.gather(tasks)
    assert all(ranks[process] < began for process, began in plain_ones)


class ThereFirst:
    """A plain task that is on rank 1's worker before the rank, as one of another client may be."""

    def __init__(self, client, folder, monkeypatch):
        self.client, self.folder, self.task = client, folder, None
        self.key = f"plain-{folder.name}"
        claim = Cluster.claim
        monkeypatch.setattr(Cluster, "claim", lambda cluster, request: self.claim(claim, cluster, request))

    async def claim(self, claim, cluster, request):
        answer = await claim(cluster, request)
        if self.task is None and isinstance(answer, Claimed):
            self.worker = answer.workers[1].address
            self.task = self.client.submit(self.work, self.folder, workers=[self.worker], key=self.key)
            while not self.processes():
                await asyncio.sleep(0.05)
        return answer

    @staticmethod
    def work(folder):
        (folder / str(os.getpid())).touch()
        while not (folder / "end").exists():
            time.sleep(0.05)
        return os.getpid()

    def processes(self):
        """Return those that have begun the task, which is begun anew where its worker is killed."""
        return [int(file.name) for file in self.folder.iterdir() if file.name != "end"]

    def ends(self):
        """Let it end; return whether it had been left alone."""
        (self.folder / "end").touch()
        return [self.task.result(timeout=60)] == self.processes()


@pytest.fixture
def there_first(client, tmp_path, monkeypatch):
    return ThereFirst(client, tmp_path, monkeypatch)


def test_a_plain_task_on_a_ranks_worker_is_named_and_the_rank_begins_once_it_has_ended(client, there_first):
    job = daskrun.launch(client, os.getpid)
    until(lambda: client.run(os.getpid, workers=job.workers[:1]))
    named = f"Rank 1 has not begun: worker {there_first.worker} is busy with ['{there_first.key}']."
    until(lambda: named in job.explain())
    assert there_first.ends()
    assert there_first.processes() == job.result()[1:]


@pytest.mark.weekly
def test_a_rank_whose_worker_pauses_before_it_begins_is_named(client, there_first):
    job = daskrun.launch(client, os.getpid)
    client.run(pause_above, 1e-6, workers=[there_first.worker])
    try:
        with pytest.raises(JobError, match=f"Rank 1 cannot begin: worker {there_first.worker} is paused"):
            job.result()
    finally:
        client.run(pause_above, 0.8, workers=[there_first.worker])
    assert there_first.ends()


@pytest.mark.weekly
def test_a_plain_task_that_keeps_a_rank_from_its_worker_ends_the_job_and_is_not_killed(
    client, there_first, monkeypatch
):
    monkeypatch.setattr(watch, "START_S", 1)
    with pytest.raises(JobError, match=rf"Rank 1 has not begun within 1 s: .* is busy with \['{there_first.key}'\]"):
        daskrun.run(client, os.getpid)
    assert there_first.ends()
    assert daskrun.run(client, os.getpid, wait_for_workers=60)[1:] == there_first.processes()


@pytest.mark.weekly
def test_a_client_that_is_closed_leaves_the_plain_task_on_a_ranks_worker_alone(client, there_first):
    with Client(client.scheduler.address, set_as_default=False) as other:
        job = daskrun.launch(other, time.sleep, 60)
        keeps = client.submit(there_first.work, there_first.folder, workers=[there_first.worker], key=there_first.key)
        until(lambda: "has not begun" in job.explain())
    there_first.task = keeps
    assert there_first.ends()
    assert len(daskrun.run(client, os.getpid, wait_for_workers=60)) == 2


@pytest.mark.weekly
@pytest.mark.parametrize("after_s", [0, 0.02, 0.1])
def test_a_client_that_is_closed_while_its_ranks_begin_leaves_none_behind(client, after_s):
    with Client(client.scheduler.address, set_as_default=False) as other:
        daskrun.launch(other, time.sleep, 600, wait_for_workers=60)
        time.sleep(after_s)
    assert len(daskrun.run(client, os.getpid, wait_for_workers=120)) == 2


def test_a_call_that_arrives_after_its_job_is_over_is_kept_nowhere():
    attempt, call = AttemptId("job", 0), {"large"}
    kept = weakref.ref(call)
    assert leave(attempt) is False
    deliver(attempt, Meeting("host", 1, call))
    del call
    assert kept() is None


class WithoutText(RuntimeError):
    def __str__(self):
        return str(1 / 0)


GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer")


@pytest.mark.parametrize(
    "error, may_follow",
    [
        (GLOO, True),
        (dist.DistNetworkError("lost"), True),
        (ExceptionGroup("of a TaskGroup", [GLOO]), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("the loss is NaN"), False),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("mine"), False),
        (WithoutText(), False),
    ],
)
def test_only_an_error_of_the_ranks_communication_may_come_of_a_death(error, may_follow):
    assert may_follow_a_death(error) is may_follow
    wrapped = ValueError("wrapped")
    wrapped.__cause__, wrapped.__context__ = KeyError("another"), error
    assert may_follow_a_death(wrapped) is may_follow


def backward():
    torch.ones(2).sum().backward()


def raises():
    raise ValueError("mine")


@pytest.mark.parametrize(("fails", "message", "restarts"), [(raises, "mine", 0), (backward, "require grad", 1)])
def test_what_a_rank_raised_is_the_cause_also_where_another_process_ends_because_of_it(
    client, fails, message, restarts
):
    def work():
        if dist.get_rank() == 0:
            fails()
        try:
            dist.barrier()
        except RuntimeError:
            os._exit(1)  # as NCCL's watchdog does

    job = daskrun.launch(client, work, max_restarts=restarts)
    with pytest.raises((ValueError, RuntimeError), match=message):
        job.result()
    assert job.failures == []
