"""What many tests share: one S3 server, a few sketches, small random weights, the real photos if there."""

import gc
import importlib
import os
import sys
from pathlib import Path

import pytest
from samples import ODD_NAMES, S3_SECRET, make_weights

from daskrun import local
from workshop_utils import object_store
from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.dogs.sketches import write_sketches

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
IMPORTED_ONCE = ["torchvision", "workshop_utils.classify", "workshop_utils.train"]


gc.disable()  # until all is imported: nothing of that is garbage, and to look for some takes a fifth of the time


def pytest_configure(config):
    # Workers are forked from one process for the session, as each import of PyTorch takes seconds of a core.
    os.environ[local.ALSO] = ",".join(IMPORTED_ONCE)


def pytest_collection_finish():
    gc.freeze()  # to look for garbage in what was imported takes half a second each time
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # else C++ libraries would print what is left at the end


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


@pytest.fixture(scope="session")
def imagenet_weights(shared_folder):
    """Real ImageNet weights of a ResNet-50."""
    return str(shared_folder / "weights/resnet50_imagenet_v1_fp16.pt")
