"""What tests ask about processes that may end while they ask, and Dask's own, as somebody else would start them."""

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import psutil
from distributed import Client


def has_ended(pid):
    """Say whether a process is over: gone, or a zombie, which waits for its parent to ask how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_of(process):
    """Return the command line of a psutil.Process, or "" once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@contextmanager
def dask_process(what, *flags, folder, **environment):
    """Run a "scheduler" or a "worker" on loopback, which does not outlive the block; yield its Popen."""
    command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *map(str, flags)]
    command += ["--host", "127.0.0.1", "--no-dashboard"]
    process = subprocess.Popen(command, cwd=folder, env=os.environ | environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()  # a worker ends with its nanny
        process.wait()


@contextmanager
def dask_cluster(folder, n_workers, *flags, **environment):
    """Run a scheduler and workers with the same flags and variables; yield (a client, the scheduler's Popen)."""
    file = folder / "scheduler.json"
    with ExitStack() as stack:

        def start(what, *own):
            words = what, "--scheduler-file", file, *own, *flags
            return stack.enter_context(dask_process(*words, folder=folder, **environment))

        scheduler = start("scheduler", "--port", 0)
        for _ in range(n_workers):
            start("worker", "--nthreads", 1)
        client = stack.enter_context(Client(scheduler_file=str(file), timeout="120s"))
        client.wait_for_workers(n_workers, timeout=240)
        yield client, scheduler
