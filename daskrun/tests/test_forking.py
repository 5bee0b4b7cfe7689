"""Local workers are forked from one process that has imported PyTorch, and are like new ones in all else."""

import atexit
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.util import get_temp_dir
from pathlib import Path

import dask
import numpy as np
import psutil
import pytest
import torch
from distributed import Client, LocalCluster
from processes import command_of
from waiting import until

import daskrun
from daskrun.forking import METHOD
from workshop_utils.cluster import start_cluster

corner = pytest.mark.weekly

OTHERS: set = set()  # servers of the tests before

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")


@pytest.fixture(autouse=True, scope="module")
def workers_are_forked():
    OTHERS.update(servers())
    with dask.config.set({METHOD: "spawn", "workshop.fork-workers": True}):
        yield


@pytest.fixture(scope="module")
def two():
    with start_cluster(2) as client, client.cluster:
        yield client


def has_torch():
    return "torch" in sys.modules and "workshop_utils.training" in sys.modules


def server_of(client):
    (parent,) = set(client.run(os.getppid).values())
    return psutil.Process(parent)


def servers():
    children = psutil.Process().children()
    return {child for child in children if "multiprocessing.forkserver" in command_of(child)} - OTHERS


def until_replaced(client, victim):
    def is_replaced():
        now = client.run(os.getpid, on_error="ignore").values()
        return victim not in now and len(now) == 2

    until(is_replaced, "no new worker")


def test_a_worker_has_imported_pytorch_also_the_one_after_a_death():
    with start_cluster(2) as client, client.cluster:
        assert all(client.run(has_torch).values())
        assert not any(client.run(lambda: sys.modules["workshop_utils.s3"]._is_fork).values())  # obstore can be used
        server = server_of(client)
        assert server.ppid() == os.getpid()
        server.terminate()  # as Slurm does to all processes of a job: the server stays
        for deadly in (signal.SIGKILL, signal.SIGTERM):
            os.kill(victim := min(client.run(os.getpid).values()), deadly)
            until_replaced(client, victim)
        assert all(client.run(has_torch).values()) and server_of(client) == server
    until(lambda: not server.is_running(), "the server is left though its cluster is closed")


@corner
def test_a_new_worker_finds_the_environment_of_its_start_and_an_old_server_ends(monkeypatch):
    monkeypatch.setenv("ONLY_BEFORE", "1")
    with start_cluster(2) as client, client.cluster:
        assert set(client.run(os.getenv, "ONLY_BEFORE").values()) == {"1"}
        first = server_of(client)
        monkeypatch.delenv("ONLY_BEFORE")
        monkeypatch.setenv("ONLY_LATER", "2")
        os.kill(victim := min(client.run(os.getpid).values()), signal.SIGKILL)
        until_replaced(client, victim)
        seen = client.run(lambda: (os.getenv("ONLY_BEFORE"), os.getenv("ONLY_LATER"))).values()
        assert set(seen) == {("1", None), (None, "2")}
    until(lambda: not servers() and not first.is_running(), "a server is left though its cluster is closed")


@contextmanager
def signalled(number, after_s):
    """Send a signal to the server that begins inside, `after_s` after its begin. Yields a list, which names it then."""
    until(lambda: not servers(), "the server of the test before is still there")
    told = []

    def send():
        until(servers, "no server")
        time.sleep(after_s)
        told.extend(servers())
        told[0].send_signal(number)

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        yield told
        sent.result()


@corner
@pytest.mark.parametrize("after_s", [0, 0.04, 0.5])
def test_the_stop_button_does_not_end_a_server_that_still_imports(after_s):
    with signalled(signal.SIGINT, after_s) as told, start_cluster(1) as client, client.cluster:
        assert [server_of(client)] == told
        (blocked,) = client.run(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())).values()
        assert not blocked & {signal.SIGINT, signal.SIGTERM}


@corner
def test_a_server_that_is_killed_while_it_imports_ends_the_start_but_not_the_next():
    with signalled(signal.SIGKILL, 0.5), pytest.raises(RuntimeError, match="failed to start"):
        start_cluster(1)
    with start_cluster(1) as client, client.cluster:
        assert client.submit(has_torch).result()


@corner
def test_a_worker_that_ends_cleans_up_and_what_it_started_keeps_no_server(tmp_path):
    def begin():
        atexit.register(Path(tmp_path, str(os.getpid())).touch)
        os.system("sleep 90 >/dev/null 2>&1 &")
        return os.getpid()

    with start_cluster(1) as client, client.cluster:
        pid = client.submit(begin).result()
    until(lambda: not servers(), "the server is left")
    assert [path.name for path in tmp_path.iterdir()] == [str(pid)]


@corner
def test_a_file_in_the_working_directory_is_not_taken_for_a_library(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/tqdm.py").write_text("raise RuntimeError")
    (tmp_path / "script.py").write_text(
        "from workshop_utils.cluster import start_cluster\n"
        "if __name__ == '__main__':\n"
        "    with start_cluster(1) as client, client.cluster:\n"
        "        print(client.submit(lambda: 'torch' in __import__('sys').modules).result())\n"
    )
    environment = {**os.environ, "DASK_WORKSHOP__DASHBOARD_PORT": "0"}
    command = [sys.executable, tmp_path / "script.py"]
    said = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, timeout=100)
    assert said.stdout == "True\n", said.stderr


@corner
def test_pytorch_computes_on_all_cores_of_a_workers_share():
    with start_cluster(1) as client, client.cluster:
        threads = client.submit(lambda: __import__("torch").get_num_threads()).result()
        assert threads == int(client.submit(os.getenv, "OMP_NUM_THREADS").result()) == os.cpu_count()


@corner
def test_other_children_of_the_program_keep_their_own_server():
    context = multiprocessing.get_context("forkserver")
    children = []

    def server_of_a_child():
        children.append(child := context.Process(target=time.sleep, args=(600,)))
        child.start()
        return psutil.Process(psutil.Process(child.pid).ppid())

    own = server_of_a_child()
    files = set(os.listdir(get_temp_dir()))
    with start_cluster(1) as client, client.cluster:
        assert server_of_a_child() == own != server_of(client)
    until(lambda: set(os.listdir(get_temp_dir())) <= files, "a server's socket is left")
    assert server_of_a_child() == own
    for child in children:
        child.terminate()
        child.join(30)
        assert child.exitcode == -signal.SIGTERM


@corner
def test_a_cluster_of_the_users_own_is_as_dasks_settings_say(two):
    settings = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0", "silence_logs": 50}
    with LocalCluster(**settings) as cluster, Client(cluster) as client:
        assert set(client.run(os.getppid).values()) == {os.getpid()}
        assert not any(client.run(has_torch).values())


@corner
def test_workers_draw_other_numbers(two):
    for draw in (
        lambda: np.random.random(),
        lambda: random.random(),
        lambda: torch.rand(1).item(),
        lambda: torch.initial_seed(),
    ):
        assert len(set(two.run(draw).values())) == 2


@corner
def test_a_worker_forks_as_any_process_does(two):
    def drawn_in_a_child():
        np.random.seed(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        context = multiprocessing.get_context("fork")
        reader, writer = context.Pipe(duplex=False)
        child = context.Process(
            target=lambda: writer.send((np.random.random(), signal.getsignal(signal.SIGTERM) == signal.SIG_IGN))
        )
        child.start()
        child.join(30)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return reader.recv()

    drawn = np.random.RandomState(3).random_sample()
    assert list(two.run(drawn_in_a_child).values()) == [(drawn, True)] * 2  # in the main thread, as signals need


@corner
def test_of_two_clusters_each_keeps_its_number_of_threads():
    with start_cluster(2) as two, two.cluster, start_cluster(1) as other, other.cluster:
        server = server_of(two)
        assert daskrun.run(two, os.getpid) != daskrun.run(other, os.getpid)
        os.kill(victim := min(two.run(os.getpid).values()), signal.SIGKILL)
        until_replaced(two, victim)
        threads = [set(client.run(os.getenv, "OMP_NUM_THREADS").values()) for client in (two, other)]
        assert threads == [{str(os.cpu_count() // 2)}, {str(os.cpu_count())}]
        assert server_of(two) == server != server_of(other)
        assert len(daskrun.run(two, os.getpid)) == 2


@corner
def test_where_the_server_is_killed_its_workers_are_replaced_from_a_new_one(two):
    before = set(two.run(os.getpid).values())
    for server in servers():
        server.kill()

    def all_new():
        now = set(two.run(os.getpid, on_error="ignore").values())
        return len(now) == 2 and not now & before

    until(all_new, "the workers of the dead server are still in use")
    until(lambda: not any(map(psutil.pid_exists, before)), "workers of the dead server live on")
    assert len(daskrun.run(two, os.getpid)) == 2


@corner
def test_a_worker_starts_children_as_dasks_settings_say():
    with start_cluster(1) as client, client.cluster:
        setting = "distributed.worker.multiprocessing-method"
        found = client.submit(lambda: (multiprocessing.get_start_method(), dask.config.get(setting))).result()
        assert found == ("spawn", "spawn")
