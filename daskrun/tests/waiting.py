"""How tests await a state: they ask until it is there, and a time limit only ends a hang."""

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager

import cloudpickle
import torch.distributed as dist

import daskrun
from daskrun import log_metrics

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it

GIVE_UP_S = 240  # of the 300 that pytest allows a test


def until(condition, what=lambda: "what was awaited did not come"):
    """Return what the condition returns once it is true; where it does not become so, say what()."""
    give_up = time.monotonic() + GIVE_UP_S
    while not (found := condition()):
        assert time.monotonic() < give_up, what()
        time.sleep(0.05)
    return found


def owned(client):
    """Return the job that owns each worker."""
    return client.run_on_scheduler(lambda dask_scheduler: owners(dask_scheduler.plugins["daskrun"].claims))


def owners(claims):
    """Return the job that owns each slot."""
    return {name: slot.job for name, slot in claims._slots.items()}


def until_replaced(client, pid):
    """Return once the workers are as many as before this one's process died."""
    n_workers = len(client.cluster.worker_spec)

    def is_replaced():
        now = client.run(os.getpid, on_error="ignore").values()
        return pid not in now and len(now) == n_workers

    until(is_replaced)


def wait_for(gate):
    """Return once there is a file `gate`; for a task, or a rank."""
    while not gate.exists():
        time.sleep(0.02)


def waits(gate):
    """Log a row, wait for the gate, and return the rank; for a rank."""
    log_metrics(awake=True)
    wait_for(gate)
    return dist.get_rank()


def awake(job, n_ranks=2):
    """Return the job once so many of its ranks have logged a row."""
    until(lambda: len(job.metrics()) >= n_ranks)
    return job


def settled(client):
    """Return the client once no worker of an earlier job is being replaced: Dask lists it a moment longer."""
    daskrun.run(client, os.getpid, wait_for_workers=GIVE_UP_S)
    return client


@contextmanager
def interrupted(function):
    """Send this process Ctrl-C, as the notebook's stop button does, once its main thread waits in this function."""
    main = threading.main_thread().ident

    def is_waiting():
        codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
        return codes[0].co_name == "wait" and function.__code__ in codes

    def interrupt():
        until(is_waiting)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()
