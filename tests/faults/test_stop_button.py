"""The stop button in any cell, and two kernels that start clusters at once."""

import random
import time
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from queue import Empty

import nbformat
import pytest
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebook_output").glob("[0-9]*.ipynb"))
STOPPED_WITHIN_S, CELL_LIMIT_S = 60, 290
LONGEST_WAIT_S = 8  # before the stop button is pressed
TWO_RANKS = """
import daskrun
from workshop_utils.cluster import start_cluster
client = start_cluster(2)
assert daskrun.run(client, lambda: __import__("torch").distributed.get_world_size()) == [2, 2]
client.shutdown()
"""


@contextmanager
def kernel(folder):
    manager = KernelManager()
    manager.start_kernel(cwd=str(folder))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def answer(client, request, timeout_s):
    """Return the content of the reply to a request of this client; None if it does not come in time."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        try:
            reply = client.get_shell_msg(timeout=give_up - time.monotonic())
        except Empty:
            return None
        if reply["parent_header"].get("msg_id") == request:
            return reply["content"]
    return None


@pytest.mark.weekly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_after_the_stop_button_each_cell_runs(path, monkeypatch, told):
    """Each cell is started, stopped after a moment that is drawn anew each week, and then run to its end."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    draw, stopped = random.Random(f"{path.stem} {date.today().isocalendar()[:2]}"), 0
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    with kernel(ROOT / "notebooks") as (manager, client):
        # Where an import is stopped, only a new kernel helps: PyTorch refuses to be imported again, Dask lacks modules.
        answer(client, client.execute("import distributed, plotnine, torchvision"), CELL_LIMIT_S)
        for cell in cells:
            request = client.execute(cell.source)
            if answer(client, request, draw.uniform(0, LONGEST_WAIT_S)) is None:
                stopped += 1
                manager.interrupt_kernel()
                reply = answer(client, request, STOPPED_WITHIN_S)
                assert reply is not None, f"does not stop: {cell.source}"
            reply = answer(client, client.execute(cell.source), CELL_LIMIT_S)
            if reply and reply["status"] == "aborted":  # it came while the kernel still cleared its queue
                reply = answer(client, client.execute(cell.source), CELL_LIMIT_S)
            if reply and reply.get("ename") == "WorkersBusy":
                # Dask cannot end a function that runs. This is the error's own cure.
                answer(client, client.execute("client.restart()"), CELL_LIMIT_S)
                reply = answer(client, client.execute(cell.source), CELL_LIMIT_S)
            assert reply is not None, f"does not end after it was stopped: {cell.source}"
            allowed = "raises-exception" in cell.metadata.get("tags", [])
            assert allowed or reply["status"] == "ok", (cell.source, reply)
    told(f"the stop button in {path.stem}", f"{stopped} of {len(cells)} cells were stopped; each ran afterwards")


@pytest.mark.weekly
def test_two_kernels_that_start_clusters_at_once_both_have_one(tmp_path, told):
    with kernel(tmp_path) as (_, one), kernel(tmp_path) as (_, other):
        requests = [(client, client.execute(TWO_RANKS)) for client in (one, other)]
        for client, request in requests:
            reply = answer(client, request, 240)
            assert reply and reply["status"] == "ok", reply
    told("two kernels start clusters at once", "both have one, and run a job of two ranks")
