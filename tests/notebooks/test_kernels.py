"""However a notebook's kernel ends, nothing that it started stays: workers, DataLoader's processes, the S3 server."""

import os
import signal
import sys

import psutil
import pytest
from jupyter_client.manager import KernelManager
from processes import command_of, has_ended

STARTED = """
from torch.utils.data import DataLoader
from workshop_utils.cluster import start_cluster
from workshop_utils.object_store import ObjectStore

def load_forever(dask_worker):
    dask_worker.loader = iter(DataLoader(range(10**6), num_workers=1))
    return next(dask_worker.loader).item()

client = start_cluster(1)
assert set(client.run(load_forever).values()) == {0}
store = ObjectStore("deep")
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A real kernel with a worker, that with a DataLoader's process, and an S3 server; and all these processes."""
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "")
    (tmp_path / "deep").mkdir()
    manager = KernelManager()
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=240)
    reply = client.execute_interactive(STARTED, timeout=120, output_hook=lambda message: None)
    assert reply["content"]["status"] == "ok", reply["content"]
    process = psutil.Process(manager.provisioner.pid)
    processes = process.children(recursive=True)
    names = " ".join(map(command_of, processes))
    assert "multiprocessing.forkserver" in names and "weed server" in names and len(processes) >= 5, names
    yield manager, process, processes
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    for left in processes:
        if left.is_running():
            left.kill()


def restart(manager, process):
    manager.restart_kernel()


def kill(manager, process):
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
@pytest.mark.parametrize("end", [pytest.param(restart, marks=pytest.mark.weekly), kill])
def test_a_kernel_leaves_no_orphan(kernel, end):
    manager, process, processes = kernel
    end(manager, process)
    _, alive = psutil.wait_procs(processes, timeout=240)
    assert not [command_of(one) for one in alive if not has_ended(one.pid)]
