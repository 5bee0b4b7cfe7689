"""Two hundred launches with random faults, each week others: none hangs, none harms the next, nothing is left."""

import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import date

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import CancelledError
from processes import command_of, has_ended
from waiting import until

import daskrun
from daskrun import JobError, WorkerDied, log_metrics

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
    "a rank is killed at any moment": (WorkerDied,),
    "both ranks are killed at any moment": (WorkerDied,),
    "a worker is killed at any moment": (WorkerDied,),
    "both workers are killed at any moment": (WorkerDied,),
    "the job is cancelled at any moment": (CancelledError,),
}


HELPERS = ("resource_tracker", "forkserver", "daskrun.child.template")  # one each, for as long as this process lives


def work(fault, rank, step):
    log_metrics(pid=os.getpid())
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
    draw = random.Random(f"{date.today().isocalendar()[:2]}")
    before = set(psutil.Process().children(recursive=True))
    client = daskrun.start_local(2)
    daskrun.run(client, os.getpid)
    ends = {}
    try:
        for number in range(LAUNCHES):
            fault = draw.choice([*ON_A_RANK, *FROM_OUTSIDE])
            begun = time.monotonic()
            end = launch(client, fault, draw)
            # The next job needs both workers, and they are there: the dead are replaced, the others free.
            results = daskrun.run(client, work, "has no fault", 0, 0, n_workers=2, wait_for_workers=30)
            assert results == ["done", "done"], (number, fault)
            assert time.monotonic() - begun < LIMIT_S, (number, fault)
            ends.setdefault(f"{fault}: {end}", []).append(time.monotonic() - begun)
    finally:
        client.shutdown()
    until(lambda: not left(before), lambda: f"left: {left(before)}")
    slowest = max(max(seconds) for seconds in ends.values())
    told(f"{LAUNCHES} launches with random faults", f"0 hang, 0 processes left; the slowest took {slowest:.0f} s")


def left(before):
    """Return the commands of processes that were started since, but for one of each helper: forks have its command."""
    still = [process for process in psutil.Process().children(recursive=True) if process not in before]
    commands = [command_of(process) for process in still if not has_ended(process.pid)]
    for helper in HELPERS:
        if known := [command for command in commands if helper in command]:
            commands.remove(known[0])
    return commands


def launch(client, fault, draw):
    """Launch a job with a fault; return what it ended with, which has to be what this fault ends with."""
    restarts, rank, step, after_s = draw.randrange(2), draw.randrange(2), draw.randrange(20), draw.uniform(0, 0.3)
    workers = list(client.run(os.getpid).values())
    limits = {"time_limit": 4 if fault in ("is stopped", "sleeps") else LIMIT_S, "max_restarts": restarts}
    limits |= {"wait_for_workers": 30, "shutdown_timeout": 5}
    job = daskrun.launch(client, work, fault, rank, step, n_workers=2, **limits)
    ending = threading.Timer(after_s, lambda: end_from_outside(fault, job, workers))
    ending.start()
    expected = ON_A_RANK.get(fault, ()) or FROM_OUTSIDE.get(fault, ())
    try:
        assert set(job.result()) <= {"done"}
        # A rank that ends its process does so in each attempt; what was killed from outside is replaced.
        assert fault in (*FROM_OUTSIDE, "has no fault"), fault
        return f"ended well, with {len(job.failures)} restarts" if job.failures else "ended well"
    except BaseException as error:
        assert isinstance(error, expected), (fault, restarts, error)
        return type(error).__name__
    finally:
        ending.join()
        job.cancel()


def end_from_outside(fault, job, workers):
    if "cancelled" in fault:
        job.cancel()
    elif "killed at any moment" in fault:
        pids = list(job.metrics().get("pid", []))[-2:] if "rank" in fault else workers
        for pid in pids[: 1 + ("both" in fault)]:
            with suppress(ProcessLookupError):  # the job was faster
                os.kill(int(pid), signal.SIGKILL)
