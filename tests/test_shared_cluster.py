"""The cluster that tests share: a test that fails, hangs or breaks it costs no other test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
BREAK_IT = """
import os, time, pytest
held = []

def works(client):
    assert len(client.nthreads()) == 2
    assert client.gather(client.map(lambda n: n + 1, range(8), pure=False)) == list(range(1, 9))

def occupy(client):
    held.extend(client.map(time.sleep, [1000] * 4, pure=False))

@pytest.mark.timeout(4)
def test_that_hangs(client):
    works(client)
    occupy(client)
    held[-1].result()

def test_that_leaves_tasks_at_work(client):
    works(client)
    occupy(client)

def test_that_closes_everything(client):
    works(client)
    client.cluster.close()
    client.close()

def test_after_them(client):
    works(client)
"""


@pytest.mark.long
def test_each_test_finds_the_cluster_at_work_whatever_the_one_before_did(tmp_path):
    (tmp_path / "test_tiny.py").write_text(BREAK_IT)
    command = [sys.executable, "-m", "pytest", "-c", TESTS.parent / "pyproject.toml", "-p", "conftest", "--rootdir"]
    command += [tmp_path, "--confcutdir", tmp_path, "-p", "no:cacheprovider", "-q", tmp_path / "test_tiny.py"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 1 and "1 failed, 3 passed" in result.stdout, result.stdout
    assert "test_that_hangs - Failed: Timeout" in result.stdout
