"""Notebooks 04 and 06, unchanged, print on several hosts what they print on one machine."""

import sys

import pytest
from hosts import ROOT

sys.path.append(str(ROOT / "tests/notebooks"))
from lessons import RENDERED  # noqa: E402
from test_nbval import run_nbval  # noqa: E402

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]


@pytest.mark.parametrize("number", ["04", "06"])
def test_a_notebook_prints_what_is_stored(number, hosts_cluster, shared_storage, monkeypatch):
    hosts_cluster.join().close()
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", hosts_cluster.scheduler)
    monkeypatch.setenv("WORKSHOP_CACHE", str(ROOT / ".venv/cache"))
    path = next(RENDERED.glob(f"{number}-*.ipynb"))
    found, said = run_nbval(ROOT, path, timeout=350)
    assert found == {path.stem: {"PASSED"}}, said
    assert not hosts_cluster.has_ended()  # which is not this notebook's alone
