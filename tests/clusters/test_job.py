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
import pytest
import torch.distributed as dist
from distributed import Client, LocalCluster
from hosts import PYTHONPATH
from processes import dask_process
from waiting import until

import daskrun
from daskrun import JobError
from daskrun.settings import worker_settings
from workshop_utils.object_store import LOOPBACK

ROOT = Path(__file__).parents[2]
FAKE_GPU = """
from types import SimpleNamespace
import torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_properties = lambda number: SimpleNamespace(uuid="a fake GPU")
"""
# As a process has whose GPU is hidden, where a worker with one announces nothing: dask/distributed#8567.
ANNOUNCES = "def dask_setup(worker): worker.startup_information['gpu'] = lambda worker: {'name': 'a hidden GPU'}"
DEFAULT_SIGINT = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell's & would leave ignored
pytestmark = pytest.mark.clusters
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it


@pytest.fixture
def start_workers(tmp_path):
    """Start real `dask worker` processes of one scheduler, and return a client; a name that begins with gpu has one."""
    preloads = {"gpu": tmp_path / "fake_gpu.py", "cpu": tmp_path / "announces.py"}
    preloads["gpu"].write_text(FAKE_GPU)
    preloads["cpu"].write_text(ANNOUNCES)
    with ExitStack() as stack:
        cluster = LocalCluster(n_workers=0, host=LOOPBACK, dashboard_address=f"{LOOPBACK}:0", silence_logs=50)
        client = stack.enter_context(Client(stack.enter_context(cluster)))

        def start(*names):
            for name in names:
                flags = ["--name", name, "--nthreads", 1]
                flags += ["--preload", preloads[name[:3]]] if name[:3] in preloads else []
                settings = worker_settings(torch_threads=1) | {"PYTHONPATH": PYTHONPATH, "WORKER": name}
                words = "worker", client.scheduler.address, *flags
                stack.enter_context(dask_process(*words, folder=tmp_path, **settings))
            client.wait_for_workers(len(names), timeout=240)
            return client

        yield start


def name():
    """Return the name of a rank's worker, whose environment it has."""
    return os.environ["WORKER"]


def die_once(marker):
    """Return the worker's name, in the second attempt; the first ends with its process."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return name()


def test_a_job_takes_the_workers_that_it_names_and_keeps_to_them_after_a_death(start_workers, tmp_path):
    client = start_workers("gpu", "cpu-0", "cpu-1")
    assert daskrun.run(client, name, backend="gloo", workers="gpu") == ["gpu"]
    assert daskrun.run(client, name, workers=["cpu-0", "cpu-1"]) == ["cpu-0", "cpu-1"]
    with pytest.raises(JobError, match="has 1 of gpu"):
        daskrun.run(client, name, n_workers=3, workers="gpu")
    job = daskrun.launch(client, die_once, tmp_path / "marker", backend="gloo", workers="gpu", max_restarts=1)
    assert job.result() == ["gpu"] and len(job.failures) == 1


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


def test_ctrl_c_frees_the_workers_also_after_dask_jobqueue_has_changed_what_it_raises(start_workers, tmp_path):
    client = start_workers("one", "two")
    script, marker = textwrap.dedent(INTERRUPTED), tmp_path / "running"
    command = [sys.executable, "-c", script, client.scheduler.address, marker]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=DEFAULT_SIGINT)
    try:
        until(marker.exists)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert told == "SystemExit\n"
    assert len(daskrun.run(client, os.getpid, wait_for_workers=240)) == 2
