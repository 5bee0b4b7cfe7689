"""Jobs on workers that come and go: of two kinds, adaptive, killed with their nannies, and left by an interrupt."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch.distributed as dist
from distributed import Client, LocalCluster
from hosts import PYTHONPATH, until

import daskrun
from daskrun import JobError, WorkerDied, log_metrics
from daskrun.settings import known_workers, worker_settings
from workshop_utils.cluster import LOOPBACK

ROOT = Path(__file__).parents[2]
FAKE_GPU = "def dask_setup(worker): worker.startup_information['gpu'] = lambda worker: {'name': 'a fake GPU'}"
DEFAULT_SIGINT = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell's & would leave ignored
pytestmark = pytest.mark.clusters
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it


class Workers:
    """Real `dask worker` processes of one scheduler; a name that begins with gpu has one, or so it tells."""

    def __init__(self, client, stack, folder):
        self.client, self.stack, self.processes, self.fake_gpu = client, stack, {}, folder / "fake_gpu.py"
        self.fake_gpu.write_text(FAKE_GPU)

    def start(self, *names):
        for name in names:
            preload = ["--preload", self.fake_gpu] if name.startswith("gpu") else []
            command = [sys.executable, "-m", "distributed.cli.dask_worker", self.client.scheduler.address, *preload]
            command += ["--name", name, "--host", LOOPBACK, "--nthreads", "1", "--no-dashboard"]
            environment = os.environ | worker_settings(torch_threads=1) | {"PYTHONPATH": PYTHONPATH}
            process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            self.processes[name] = process
            self.stack.callback(self.lose, name)
        until(lambda: set(names) <= {worker["name"] for worker in self.client.scheduler_info(-1)["workers"].values()})

    def lose(self, name):
        """Kill a worker with its nanny, as if its host were gone."""
        process = self.processes.pop(name, None)
        if process:
            for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                each.kill()
            process.wait()


@pytest.fixture
def workers(tmp_path_factory):
    with ExitStack() as stack:
        cluster = LocalCluster(n_workers=0, host=LOOPBACK, dashboard_address=f"{LOOPBACK}:0", silence_logs=50)
        stack.enter_context(cluster)
        yield Workers(stack.enter_context(Client(cluster)), stack, tmp_path_factory.mktemp("preload"))


def name():
    from distributed import get_worker

    return get_worker().name


def die_once(marker):
    """Return the worker's name, in the second attempt; the first ends when somebody kills a worker."""
    log_metrics(size=dist.get_world_size())
    if not marker.exists():
        dist.barrier()
        if dist.get_rank() == 0:
            marker.touch()
        time.sleep(1000)
    return name()


def test_ranks_are_of_one_kind_and_stay_so_after_a_death(workers, tmp_path):
    workers.start("gpu", "cpu-0", "cpu-1")
    client = workers.client
    address = {worker["name"]: address for address, worker in known_workers(client).items()}
    with pytest.warns(UserWarning, match=f"with a GPU.*{address['cpu-0']}"):
        assert daskrun.run(client, name) == ["gpu"]
    with pytest.warns(UserWarning, match=f"without a GPU.*{address['gpu']}"):
        assert daskrun.run(client, name, n_workers=2) == ["cpu-0", "cpu-1"]
    with pytest.raises(JobError, match="3 workers.*1 with a GPU and 2 without"):
        daskrun.run(client, name, n_workers=3)
    with pytest.warns(UserWarning, match="with a GPU"):
        job = daskrun.launch(client, die_once, tmp_path / "marker", max_restarts=1)
    until((tmp_path / "marker").exists)
    (worker,) = psutil.Process(workers.processes["gpu"].pid).children()[-1:]
    worker.kill()  # and its nanny starts another
    assert job.result() == ["gpu"]


def test_after_a_death_as_many_as_before_are_waited_for_and_fewer_have_to_be_enough(workers, tmp_path):
    workers.start("one", "two", "three")
    pair = {"n_workers": (2, 8), "max_restarts": 1}
    job = daskrun.launch(workers.client, die_once, tmp_path / "first", wait_for_successors=1000, **pair)
    assert len(job.workers) == 3
    until((tmp_path / "first").exists)
    workers.lose("three")
    workers.start("four")  # on another host, say
    assert sorted(job.result()) == ["four", "one", "two"]  # long before the thousand seconds are over
    job = daskrun.launch(workers.client, die_once, tmp_path / "second", wait_for_successors=10, **pair)
    until((tmp_path / "second").exists)
    workers.lose("four")
    assert sorted(job.result()) == ["one", "two"] and len(job.failures) == 1
    job = daskrun.launch(workers.client, die_once, tmp_path / "third", wait_for_successors=2, max_restarts=1)
    until((tmp_path / "third").exists)
    workers.lose("two")
    with pytest.raises(WorkerDied) as caught:
        job.result()
    assert "wait_for_successors=2" in caught.value.__notes__[0]


def test_a_cluster_that_adapts_is_asked_for_its_minimum_and_retires_no_rank(tmp_path):
    settings = {"threads_per_worker": 1, "host": LOOPBACK, "dashboard_address": f"{LOOPBACK}:0", "silence_logs": 50}
    adaptive = {"interval": "100 ms", "wait_count": 1, "maximum": 3}

    def work():
        (tmp_path / f"began-{dist.get_rank()}").touch()
        while not (tmp_path / f"may-end-{dist.get_rank()}").exists():
            time.sleep(0.05)
        return os.getpid()

    with LocalCluster(n_workers=0, **settings) as cluster, Client(cluster) as client:
        cluster.adapt(minimum=0, **adaptive)
        with pytest.raises(JobError, match=r"cluster.adapt\(minimum=2\)"):
            daskrun.launch(client, work, n_workers=2)
        cluster.adapt(minimum=3, **adaptive)
        job = daskrun.launch(client, work, n_workers=(2, 2), wait_for_workers=240)
        until(lambda: len(list(tmp_path.glob("began-*"))) == 2)
        cluster.adapt(minimum=0, **adaptive)
        until(lambda: set(client.nthreads()) == set(job.workers))  # the third is retired
        (tmp_path / "may-end-1").touch()
        until(lambda: len(client.nthreads()) == 1)  # rank 1's worker is retired, too
        assert not job.done()
        (tmp_path / "may-end-0").touch()
        assert len(set(job.result())) == 2
        until(lambda: len(client.nthreads()) < 2)  # the last one keeps what the ranks returned


INTERRUPTED = """
    import sys, time
    from pathlib import Path
    import dask_jobqueue
    from distributed import Client
    import daskrun

    def work(marker):
        Path(marker).touch()
        time.sleep(1000)

    job = daskrun.launch(Client(sys.argv[1]), work, sys.argv[2])
    try:
        job.result()
    except SystemExit:
        print("SystemExit")
        raise
"""


def test_ctrl_c_frees_the_workers_also_after_dask_jobqueue_has_changed_what_it_raises(workers, tmp_path):
    workers.start("one", "two")
    script, marker = textwrap.dedent(INTERRUPTED), tmp_path / "running"
    command = [sys.executable, "-c", script, workers.client.scheduler.address, marker]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=DEFAULT_SIGINT)
    try:
        until(marker.exists)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert told == "SystemExit\n"
    assert len(daskrun.run(workers.client, os.getpid, wait_for_workers=240)) == 2
