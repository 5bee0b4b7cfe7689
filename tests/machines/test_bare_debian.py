"""The workshop works on a bare Debian 13 with its Python 3.13, for a user who is not root, and offline once set up."""

import asyncio
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from bare_debian import bare_debian
from distributed.core import rpc

from workshop_utils.cluster import ClusterError, start_cluster

ROOT = Path(__file__).parents[2]
SUITE, PYTHON = "trixie", (3, 13)
NOTEBOOKS = "01"
COMPUTES = """
from workshop_utils.cluster import start_cluster
client = start_cluster(address="{address}")
print(client.submit(sum, [40, 2]).result(), "from the workers")
"""

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root on Linux can make a Debian"),
    pytest.mark.skipif(
        not (shutil.which("mmdebstrap") and shutil.which("ip")), reason="needs: apt install mmdebstrap iproute2"
    ),
]


@pytest.fixture(scope="module")
def debian():
    with bare_debian(SUITE, "make", "python3-venv") as machine:
        machine.copy(ROOT)
        yield machine
    assert not Path(machine.root).exists()


@pytest.fixture(scope="module")
def ready(debian):
    debian.run("make setup", online=True)
    return debian


@pytest.fixture(scope="module")
def ready_for_tests(ready):
    ready.run("make setup-test", online=True)
    return ready


@pytest.fixture
def cluster(ready):
    """The address of a scheduler and two workers that run in the Debian."""
    start = "from dask.distributed import LocalCluster; import time; c = LocalCluster(n_workers=2, host='127.0.0.1', "
    start += "dashboard_address=None); print(c.scheduler_address, flush=True); time.sleep(600)"
    lines = f"if __name__ == '__main__':\n    {start}\n"
    Path(f"{ready.root}/tmp/start.py").write_text(lines)
    process = ready.start(".venv/bin/python /tmp/start.py", online=True)
    while not (said := process.stdout.readline()).startswith("tcp://"):
        assert said, "the cluster did not start"
    yield said.strip()
    process.kill()
    process.communicate()


def workers_of(address):
    """Return the workers' addresses; one that was killed comes back with another."""

    async def ask():
        async with rpc(address) as scheduler:
            return set((await scheduler.identity(n_workers=-1))["workers"])

    return asyncio.run(ask())


def test_setup_needs_python_and_make_alone(ready):
    version = ready.run(".venv/bin/python --version; id --user")
    assert version.startswith("Python {}.{}.".format(*PYTHON)) and not version.endswith("\n0\n")
    assert "make: Nothing" in ready.run("make setup")


def test_the_command_finds_nothing_to_mend(ready):
    said = ready.run("TQDM_DISABLE=1 .venv/bin/workshop check")  # drawing sketches shows a bar where it takes long
    assert "[OK]   Python: {}.{}.".format(*PYTHON) in said
    assert {line.split()[0] for line in said.splitlines()} == {"[OK]"}


def test_what_proves_that_the_workshop_works_here_works_there(ready_for_tests):
    said = ready_for_tests.run(".venv/bin/pytest -q -m smoke", timeout_s=900)
    assert re.search(r"^\d{2,} passed", said, flags=re.MULTILINE), said


def test_a_notebook_prints_what_is_stored(ready_for_tests):
    said = ready_for_tests.run(f"make test-notebooks ONLY='{NOTEBOOKS}'")
    assert re.search(r"=+ \d{2,} passed(, \d+ warnings?)? in .* =+$", said, flags=re.MULTILINE), said


@pytest.mark.skipif(sys.version_info[:2] == PYTHON, reason="this machine has the same Python as the Debian")
def test_a_cluster_of_another_python_is_refused_and_goes_on_working(ready, cluster):
    workers = workers_of(cluster)
    assert len(workers) == 2
    with pytest.raises(ClusterError, match=r"python 3\.13"):
        start_cluster(address=cluster)
    time.sleep(3)  # a worker that died of it would be replaced by now
    assert workers_of(cluster) == workers
    computes = COMPUTES.format(address=cluster)
    assert "42 from the workers" in ready.run(f".venv/bin/python -W ignore -c '{computes}'", online=True)
