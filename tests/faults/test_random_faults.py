"""Two hundred launches with random faults, each week others: none hangs, none harms the next, nothing is left."""

import os
import random
import signal
import sys
import threading
import time
from datetime import date

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import CancelledError
from processes import command_of

import daskrun
from daskrun import JobError, WorkerDied
from workshop_utils.cluster import start_cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it

LAUNCHES = 200
LIMIT_S = 60  # of a launch, its fault, and the launch that follows it
LOST_PEER = RuntimeError  # what gloo raises where the other rank has left
ON_A_RANK = {  # what the rank does: what the job then ends with
    "raises": (KeyError,),
    "is killed": (WorkerDied,),
    "leaves with os._exit": (WorkerDied,),
    "calls sys.exit": (JobError,),
    "is stopped": (TimeoutError,),
    "sleeps": (TimeoutError,),
    "returns early": (LOST_PEER,),
    "has no fault": (),
}
FROM_OUTSIDE = {  # any of these, or none where the job was faster
    "a worker is killed at any moment": (WorkerDied,),
    "both workers are killed at any moment": (WorkerDied,),
    "the job is cancelled at any moment": (CancelledError,),
}


def work(fault, rank, step):
    for number in range(20):
        if dist.get_rank() == rank and number == step:
            if fault == "returns early":
                return "early"
            commit(fault)
        dist.all_reduce(torch.ones(1000))
    return "done"


def commit(fault):
    if fault == "raises":
        raise KeyError("no such breed")
    if fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "leaves with os._exit":
        os._exit(3)
    if fault == "calls sys.exit":
        sys.exit(4)
    if fault == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # this thread may run on for a moment
    if fault == "sleeps":
        time.sleep(1000)


@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_two_hundred_launches_with_faults_hang_and_leave_nothing(told):
    week = date.today().isocalendar()[:2]
    draw, before = random.Random(f"{week}"), {process.pid for process in psutil.Process().children(recursive=True)}
    client = start_cluster(2)
    daskrun.run(client, os.getpid)
    ends = {}
    try:
        for number in range(LAUNCHES):
            fault = draw.choice([*ON_A_RANK, *FROM_OUTSIDE])
            begun = time.monotonic()
            end = launch(client, fault, draw)
            # The next job needs both workers, and they are there: the dead are replaced, the others free.
            assert daskrun.run(client, work, "has no fault", 0, 0, n_workers=2, wait_for_workers=30) == [
                "done",
                "done",
            ], (
                number,
                fault,
            )
            assert time.monotonic() - begun < LIMIT_S, (number, fault)
            ends.setdefault(f"{fault}: {end}", []).append(time.monotonic() - begun)
    finally:
        client.shutdown()
    still = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    helpers = ("resource_tracker", "forkserver")  # of multiprocessing, one each, for as long as this process lives
    assert not [process for process in still if not any(name in command_of(process) for name in helpers)]
    slowest = max(max(seconds) for seconds in ends.values())
    told(f"{LAUNCHES} launches with random faults", f"0 hang, 0 processes left; the slowest took {slowest:.0f} s")


def launch(client, fault, draw):
    """Launch a job with a fault; return what it ended with, which has to be what this fault ends with."""
    restarts, rank, step, after_s = draw.randrange(2), draw.randrange(2), draw.randrange(20), draw.uniform(0, 0.3)
    pids = list(client.run(os.getpid).values())
    limits = {"timeout": 4 if fault in ("is stopped", "sleeps") else LIMIT_S, "max_restarts": restarts}
    job = daskrun.launch(client, work, fault, rank, step, n_workers=2, wait_for_workers=30, **limits)
    ending = threading.Timer(after_s, lambda: end_from_outside(fault, job, pids[: 1 + ("both" in fault)]))
    ending.start()
    expected = ON_A_RANK.get(fault, ()) or FROM_OUTSIDE.get(fault, ())
    try:
        assert set(job.result()) <= {"done"}
        # A rank that ends its process does so in each attempt; a worker killed from outside is replaced.
        assert fault in (*FROM_OUTSIDE, "has no fault"), fault
        return f"ended well, with {len(job.failures)} restarts" if job.failures else "ended well"
    except BaseException as error:
        assert isinstance(error, expected), (fault, restarts, error)
        return type(error).__name__
    finally:
        ending.join()
        job.cancel()


def end_from_outside(fault, job, pids):
    if "cancelled" in fault:
        job.cancel()
    elif "killed at any moment" in fault:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
