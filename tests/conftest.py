"""What many tests share: one cluster, one S3 server, a few sketches, small random weights, the real photos if there."""

import importlib
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import dask
import pytest
import torch
from distributed.core import Status
from distributed.utils import get_mp_context
from samples import ODD_NAMES, S3_SECRET, make_weights

from workshop_utils import object_store
from workshop_utils.cluster import start_cluster
from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.dogs.sketches import write_sketches

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
WORKERS_ARE = "distributed.worker.multiprocessing-method"
FORK_WORKERS = "workshop.fork-workers"
IMPORTED_ONCE = ["torchvision", "daskrun.horovod", "workshop_utils.inference", "workshop_utils.training"]
FAILED = pytest.StashKey[bool]()


def pytest_configure(config):
    # Where a shell started the suite with &, it and all its children would ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The suite is about the CPU, whatever the machine; `pytest -m gpu` is about the GPU.
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # All workers are forked from one process, as each import of PyTorch takes seconds of a core. A user's clusters
        # have one such process each: so they do in tests/test_cluster.py and in notebooks. Workers here keep the
        # environment of the first: what PyTorch or glibc reads when it starts has no effect in a later one.
        dask.config.set({WORKERS_ARE: "forkserver", FORK_WORKERS: False})
        get_mp_context().set_forkserver_preload(IMPORTED_ONCE)


def pytest_collection_modifyitems(config, items):
    if config.pluginmanager.hasplugin("rerunfailures"):  # `make oldest` has none
        for item in items:
            if item.get_closest_marker("timing"):
                item.add_marker(pytest.mark.flaky(reruns=2))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and `pytest -m gpu`")


@pytest.fixture(scope="module")
def browser():
    """A real browser, for a module's tests and no longer: its driver keeps an event loop in this thread."""
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed: apt install chromium")
    from playwright.sync_api import sync_playwright  # which takes seconds

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def no_settings_of_the_users(monkeypatch, tmp_path):
    for name in ("DATA", "WEIGHTS", "NAMES", "SHARED", "ROOM"):
        monkeypatch.delenv(f"WORKSHOP_{name}", raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def benchmark(monkeypatch):
    """Import a script of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module


class SharedCluster:
    """One cluster for the session; what a test breaks in it is mended before the next."""

    def __init__(self):
        self.n_workers = 1 if torch.cuda.is_available() else 2
        self.client = start_cluster(self.n_workers)

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
            self.client.restart(timeout=30)
        if not self.is_idle_soon():
            self.close()
            self.client = start_cluster(self.n_workers)

    def close(self):
        for part in (self.client, self.client.cluster):
            with suppress(Exception):
                part.close(timeout=30)


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A folder with `dogs`, 3 sketches of 4 breeds each, and `odd`, one breed under names that trip parsers."""
    folder = tmp_path_factory.mktemp("data") / "served"
    write_sketches(folder / "dogs", 3, BREEDS[:4])
    photo = next((folder / "dogs" / BREEDS[0].folder).iterdir()).read_bytes()
    (folder / "odd" / BREEDS[0].folder).mkdir(parents=True)
    for name in ODD_NAMES:
        (folder / "odd" / BREEDS[0].folder / name).write_bytes(photo)
    return folder


@pytest.fixture(scope="session")
def dogs(served):
    return served / "dogs"


@pytest.fixture(scope="session")
def s3(served):
    """The storage_options of an S3 server with `served` at s3://workshop/served."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store.secrets, "token_urlsafe", lambda: S3_SECRET)
        with object_store.local_object_store(served) as storage_options:
            yield storage_options


@pytest.fixture
def s3_admin(s3):
    import s3fs

    return s3fs.S3FileSystem(key=object_store.ADMIN, secret=S3_SECRET, client_kwargs=s3["client_kwargs"])


@pytest.fixture
def without_obstore(monkeypatch):
    """The base does not install it: s3fs reads and lists."""
    monkeypatch.setitem(sys.modules, "obstore", None)


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A checkpoint of a ResNet-18 that was never trained, but whose answers differ from photo to photo."""
    return make_weights(tmp_path_factory.mktemp("weights") / "random.pt", seed=0)


@pytest.fixture(scope="session")
def shared_folder():
    """The folder of real photos and real ImageNet weights beside the repository."""
    folder = Path(__file__).parents[2] / "shared"
    for name in ("data/stanford-dogs/Images", "weights/resnet50_imagenet_v1_fp16.pt"):
        if not (folder / name).exists():
            pytest.skip(f"needs ../shared/{name}")
    return folder
