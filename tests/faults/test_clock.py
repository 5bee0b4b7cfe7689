"""A machine's clock may be set while a job runs, as when it wakes up or hears from a time server."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import threading
import time
import torch
import torch.distributed as dist
import daskrun
from workshop_utils.cluster import start_cluster
from daskrun import log_metrics

def work():
    pause = threading.Event()
    for step in range(60):
        dist.all_reduce(torch.ones(1))
        log_metrics(step=step)
        pause.wait(0.1)  # not time.sleep, which libfaketime breaks
    return "done"

if __name__ == "__main__":
    with start_cluster(2) as client, daskrun.launch(client, work, time_limit=200, stall_after=50) as job:
        for row in job.rows():
            if row["rank"] == 0:
                print(row["step"], time.time(), flush=True)
        print(*job.result(), flush=True)
"""
AT_STEP, JUMP_S = 20, 3600


@pytest.mark.weekly
def test_a_clock_that_jumps_by_an_hour_costs_a_job_nothing(tmp_path, told):
    # Forwards alone: a clock that is set back may hold up Dask's messages until it has caught up (distributed.batched).
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not libraries:
        pytest.skip("needs libfaketime: apt install faketime")
    clock = tmp_path / "clock"
    clock.write_text("+0")
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = {"FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    environment = os.environ | settings | {"LD_PRELOAD": str(libraries[0]), "TQDM_DISABLE": "1"}
    command, seen = [sys.executable, "script.py"], []
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line == "done done\n":
                break
            step, seconds = line.split()
            seen.append((int(step), float(seconds) - time.time()))
            if seen[-1][0] == AT_STEP:
                clock.write_text(f"+{JUMP_S}")
        assert process.wait(60) == 0
    assert [step for step, _ in seen] == list(range(60))
    assert seen[-1][1] > JUMP_S / 2 > seen[0][1], "the clock did not jump"
    told("the clock jumps forwards by an hour", "the job ends well, with all rows in order")
