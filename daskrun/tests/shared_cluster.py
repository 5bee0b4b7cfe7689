"""One cluster for all tests of a session, and what every run of pytest here needs."""

import os
import signal
import time
from contextlib import suppress

import pytest
import torch
from distributed.core import Status

from daskrun import local

FAILED = pytest.StashKey[bool]()


def pytest_configure(config):
    # Where a shell started the suite with & or nohup, it and all its children would ignore Ctrl-C or a terminal's end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # The suite is about the CPU, whatever the machine; `pytest -m gpu` is about the GPU.
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the others have the other cores


def pytest_collection_modifyitems(config, items):
    if config.pluginmanager.hasplugin("rerunfailures"):  # `make oldest` has none
        for item in items:
            if item.get_closest_marker("timing"):
                item.add_marker(pytest.mark.flaky(reruns=2))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and `pytest -m gpu`")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


class SharedCluster:
    """One cluster for the session; what a test breaks in it is mended before the next."""

    def __init__(self):
        self.n_workers = 1 if torch.cuda.is_available() else 2
        self.client = local.start_local(self.n_workers)

    def is_open(self):
        return self.client.status == "running" and self.client.cluster.status == Status.running

    def is_idle(self):
        if any(future.status == "pending" for future in list(self.client.futures.values())):
            return False  # the scheduler may not know of it yet: submitting does not wait for it
        if len(self.client.nthreads()) != self.n_workers or any(self.client.processing().values()):
            return False
        # The scheduler lists a worker that a job has killed a moment longer.
        return all(isinstance(pid, int) for pid in self.client.run(os.getpid, on_error="return").values())

    def is_idle_soon(self, timeout_s=20):
        """Wait for it: a worker that a test killed is back in seconds, a cancelled task ends when it does."""
        give_up = time.monotonic() + timeout_s
        while self.is_open() and time.monotonic() < give_up:
            if self.is_idle():
                return True
            time.sleep(0.1)
        return False

    def mend(self):
        """Restart the workers; where that does not help, start another cluster."""
        with suppress(Exception):  # whatever a test did to the client or to the cluster
            self.client.restart(timeout=120)
        if not self.is_idle_soon():
            self.close()
            self.client = local.start_local(self.n_workers)

    def close(self):
        for part in (self.client, self.client.cluster):
            with suppress(Exception):
                part.close(timeout=120)


@pytest.fixture(scope="session")
def shared_cluster():
    cluster = SharedCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def client(shared_cluster, request):
    yield shared_cluster.client
    if request.node.stash.get(FAILED, False) or not shared_cluster.is_idle_soon():
        shared_cluster.mend()
