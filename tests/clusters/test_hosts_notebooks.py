"""Notebooks 04 and 06, unchanged, print on several hosts what they print on one machine."""

import shutil
import sys

import nbformat
import pytest
from hosts import ROOT

sys.path.append(str(ROOT / "tests/notebooks"))
from lessons import RENDERED, read, without_bars  # noqa: E402
from test_nbval import run_nbval  # noqa: E402

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]


@pytest.mark.parametrize("number", ["04", "06"])
def test_a_notebook_prints_what_is_stored(number, hosts_cluster, shared_storage, monkeypatch):
    hosts_cluster.join().close()
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", hosts_cluster.scheduler)
    monkeypatch.setenv("WORKSHOP_CACHE", str(ROOT / ".venv/cache"))
    path = next(RENDERED.glob(f"{number}-*.ipynb"))
    folder = ROOT / ".nbval-hosts"  # as deep as the notebooks, which open files beside them
    folder.mkdir()
    try:
        nbformat.write(without_bars(read(path)), folder / path.name)
        found, said = run_nbval(ROOT, folder / path.name, timeout=350)
    finally:
        shutil.rmtree(folder)
    assert found == {path.stem: {"PASSED"}}, said
    assert not hosts_cluster.has_ended()  # which is not this notebook's alone
