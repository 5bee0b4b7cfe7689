"""Local workers are forked from one process that has imported PyTorch, and are like new ones in all else."""

import multiprocessing
import os
import signal
import sys
import time

import dask
import numpy as np
import psutil
import pytest

from workshop_utils import ddp
from workshop_utils.cluster import start_cluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")


@pytest.fixture(autouse=True)
def workers_are_forked():
    with dask.config.set({"distributed.worker.multiprocessing-method": "spawn", "workshop.fork-workers": True}):
        yield


@pytest.fixture
def two():
    with start_cluster(2) as client, client.cluster:
        yield client


def has_torch():
    return "torch" in sys.modules and "workshop_utils.training" in sys.modules


def server_of(client):
    (parent,) = set(client.run(os.getppid).values())
    return psutil.Process(parent)


def until(is_so, what, limit_s=60):
    give_up = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < give_up, what
        time.sleep(0.1)


def test_a_worker_has_imported_pytorch_also_the_one_after_a_death(two):
    assert all(two.run(has_torch).values())
    before = two.run(os.getpid)
    os.kill(victim := min(before.values()), signal.SIGKILL)
    until(lambda: victim not in (now := two.run(os.getpid, on_error="ignore").values()) and len(now) == 2, "no new one")
    assert all(two.run(has_torch).values())
    assert server_of(two).ppid() == os.getpid()
    assert not any(two.run(lambda: sys.modules["workshop_utils.s3"]._is_fork).values())  # obstore can be used there


def test_each_cluster_finds_the_environment_of_its_start_and_its_server_ends_with_it(monkeypatch):
    monkeypatch.setenv("ONLY_BEFORE", "1")
    with start_cluster(2, threads_per_worker=1) as client, client.cluster:
        assert set(client.run(os.getenv, "ONLY_BEFORE").values()) == {"1"}
        first = server_of(client)
    monkeypatch.delenv("ONLY_BEFORE")
    monkeypatch.setenv("ONLY_LATER", "2")
    with start_cluster(1) as client, client.cluster:
        assert client.submit(lambda: (os.getenv("ONLY_BEFORE"), os.getenv("ONLY_LATER"))).result() == (None, "2")
        threads = client.submit(lambda: __import__("torch").get_num_threads()).result()
        assert threads == int(client.submit(os.getenv, "OMP_NUM_THREADS").result()) == os.cpu_count()
    until(lambda: not first.is_running(), "the server of the first cluster is still there, or a zombie")


def test_workers_draw_other_numbers_from_numpy_and_python(two):
    for draw in (lambda: np.random.random(), lambda: __import__("random").random()):
        assert len(set(two.run(draw).values())) == 2


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


def test_two_clusters_side_by_side_have_a_server_each(two):
    with start_cluster(1) as other, other.cluster:
        assert server_of(other) != server_of(two)
        assert ddp.run(two, os.getpid) != ddp.run(other, os.getpid)
    assert len(ddp.run(two, os.getpid)) == 2


def test_sigterm_ends_a_worker_and_not_the_server_of_all(two):
    server, before = server_of(two), set(two.run(os.getpid).values())
    server.terminate()
    os.kill(victim := min(before), signal.SIGTERM)
    until(lambda: victim not in (now := two.run(os.getpid, on_error="ignore").values()) and len(now) == 2, "no new one")
    assert server_of(two) == server
    assert before - {victim} < set(two.run(os.getpid).values())


def test_where_the_server_is_killed_its_workers_are_replaced_from_a_new_one(two):
    server, before = server_of(two), set(two.run(os.getpid).values())
    server.kill()

    def all_new():
        now = set(two.run(os.getpid, on_error="ignore").values())
        return len(now) == 2 and not now & before

    until(all_new, "the workers of the dead server are still in use")
    until(lambda: not any(map(psutil.pid_exists, before)), "workers of the dead server live on")
    assert len(ddp.run(two, os.getpid)) == 2 and server_of(two) != server


def test_a_setting_has_them_spawned():
    with dask.config.set({"workshop.fork-workers": False}), start_cluster(1) as client, client.cluster:
        assert set(client.run(os.getppid).values()) == {os.getpid()}
