"""`workshop check --address` says of a running cluster what it lacks, and the cure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import dask_cluster

from daskrun.settings import THREADS, worker_settings

pytestmark = pytest.mark.clusters
WORKSHOP = Path(sys.executable).parent / "workshop"


@pytest.fixture(autouse=True)
def variables_of_a_fresh_shell(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", *THREADS):  # nannies of this process left them
        monkeypatch.delenv(name, raising=False)


def check(address, **settings):
    environment = {**os.environ, "TQDM_DISABLE": "1", **settings}
    done = subprocess.run([WORKSHOP, "check", "--address", address], env=environment, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_cluster_for_pytorch_is_well(tmp_path):
    with dask_cluster(tmp_path, 2, **worker_settings(1)) as (client, _):
        code, said = check(client.scheduler.address, WORKSHOP_SHARED=str(tmp_path / "shared"))
    assert "workers: 2 on 1 host(s), 0 with a GPU" in said
    assert f"{tmp_path}/shared/" in said and "is read and written by this machine and 2 workers" in said
    assert "ranks: 2 met and added up, over lo" in said
    assert said.count("[OK]") == 5 and code == 0
    assert not list((tmp_path / "shared").glob("*/*"))


def test_a_cluster_for_other_work_is_told_what_mends_it(tmp_path):
    with dask_cluster(tmp_path, 1) as (client, _):
        code, said = check(client.scheduler.address)
    assert "[FAIL] environment: MALLOC_TRIM_THRESHOLD_ is 65536" in said and "workshop join ADDRESS" in said
    assert "[FAIL] children:" in said and said.count("[OK]") == 3 and code == 1
