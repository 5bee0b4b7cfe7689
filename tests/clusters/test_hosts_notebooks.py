"""Notebook 04, unchanged, prints on several hosts what it prints on one machine."""

import shutil
import subprocess
import sys

import nbformat
import pytest
from hosts import ROOT

sys.path.append(str(ROOT / "tests/notebooks"))
from compare import nbval  # noqa: E402
from lessons import RENDERED, read, without_bars  # noqa: E402

pytestmark = [pytest.mark.clusters, pytest.mark.weekly, pytest.mark.timeout(900)]


def test_a_notebook_prints_what_is_stored(hosts_cluster, shared_storage, monkeypatch):
    hosts_cluster.join().close()
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", hosts_cluster.scheduler)
    monkeypatch.setenv("WORKSHOP_CACHE", str(ROOT / ".venv/cache"))
    path = next(RENDERED.glob("04-*.ipynb"))
    notebook = without_bars(read(path))
    folder = ROOT / ".nbval-hosts"  # as deep as the notebooks, which open files beside them
    folder.mkdir()
    try:
        nbformat.write(notebook, folder / path.name)
        done = nbval(folder / path.name, stdout=subprocess.PIPE, timeout=840)
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stdout
    assert not hosts_cluster.has_ended()  # which is not this notebook's alone
