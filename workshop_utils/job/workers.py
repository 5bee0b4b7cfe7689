"""The workers of a cluster, as the client sees them: who is there, who is idle, where one stands."""

import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distributed import Client, Lock

from workshop_utils.job.errors import JobError, SchedulerLost, WorkersBusy

ANSWER_S = 10  # for the scheduler and the workers to answer a question
LAUNCH_S = 90  # for launches of other clients to be over; the scheduler forgets one whose client is gone after 40
REACH_S = 30  # for the successor of a worker to be there
WRAPPERS = ("wrapper", "decorate_context", "inner")  # what decorators call their function: PyTorch's collectives', too


def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """Return what the scheduler knows of each worker, by address. Raises SchedulerLost."""
    try:  # not scheduler_info(): a refresh in the background may cut its answer to five workers
        return client.sync(client.scheduler.identity, n_workers=-1, callback_timeout=ANSWER_S)["workers"]
    except (OSError, TimeoutError, AttributeError) as error:  # without a connection, there is no client.scheduler
        raise SchedulerLost(f"The scheduler does not answer ({str(error) or type(error).__name__}).") from error


def process_of(worker: dict[str, Any]) -> str:
    """Return what tells a worker's process from its successor's, which may have the same name and address."""
    return worker["local_directory"]


@contextmanager
def alone(client: Client) -> Iterator[None]:
    """Keep other launches on this scheduler, from whatever client, out of the block. Raises WorkersBusy."""
    lock = Lock("workshop-launch", scheduler_rpc=client.scheduler, loop=client.loop)
    if not lock.acquire(timeout=LAUNCH_S):
        raise WorkersBusy(f"Another launch on this cluster has not been over within {LAUNCH_S} s: try again.")
    try:
        yield
    finally:
        lock.release()


def choose(client: Client, n_workers: int | None) -> dict[str, dict[str, Any]]:
    """Return what the scheduler knows of idle workers, by address, in rank order: by host, then by name.

    n_workers: None for all. Raises JobError where there are too few workers, WorkersBusy where they are at work.
    """
    workers = workers_of(client)
    needed = len(workers) if n_workers is None else n_workers
    if needed > len(workers) or not workers:
        raise JobError(f"The job needs {needed or '1 or more'} workers, one for each rank, but the cluster has "
                       f"{len(workers)}: ask for fewer ranks, or start more workers.")  # fmt: skip
    # The scheduler knows a task before its worker does, the worker a cancelled one whose thread still runs.
    assigned = client.processing()
    at_work = client.sync(client._run, _at_work, on_error="ignore", callback_timeout=ANSWER_S)
    tasks = {address: {*map(_name, assigned.get(address, ())), *map(_name, keys)}
             for address, (_, keys) in at_work.items()}  # fmt: skip
    idle = [address for address in workers if address in tasks and not tasks[address]]
    if len(idle) < needed:
        busy = [f"{address} with {sorted(tasks.get(address, ()))}" for address in workers if address not in idle]
        raise WorkersBusy(f"The job needs {needed} idle workers, but {listed(busy)} is busy: wait for that to end, end "
                          "it with job.cancel(), client.cancel(futures) or client.restart(), or give launch "
                          "wait_for_workers.")  # fmt: skip
    order = sorted(idle, key=lambda address: _natural(workers[address]))[:needed]
    if len({at_work[address][0] for address in order}) < needed:  # torch.distributed has one default group a process
        raise JobError(f"{listed(order)} share a process, where each rank needs one of its own: start the cluster "
                       "with processes=True.")  # fmt: skip
    return {address: workers[address] for address in order}


def kill(client: Client, workers: list[str]) -> None:
    """End the processes of these workers at once, through their nannies, which start others."""
    # Client.restart_workers would wait four seconds for a thread that cannot be stopped.
    with suppress(Exception):  # a worker, or its nanny, is ending by itself
        client.sync(client._run, _kill, workers, workers=workers, nanny=True, on_error="ignore",
                    callback_timeout=ANSWER_S)  # fmt: skip


def await_successors(client: Client, gone: list[dict[str, Any]]) -> None:
    """Return once the nannies of these workers have others, or after REACH_S."""
    awaited, give_up = {worker["nanny"] for worker in gone} - {None}, time.monotonic() + REACH_S
    processes = set(map(process_of, gone))
    while awaited and time.monotonic() < give_up:
        time.sleep(0.1)
        awaited -= {worker["nanny"] for worker in workers_of(client).values() if process_of(worker) not in processes}


def stacks_of(client: Client, workers: list[str], job: tuple) -> dict[str, tuple[str, str]]:
    """Return (place, stack) of each worker at a task whose key begins with `job`; who does not answer is left out.

    place: the innermost line of the user's own code, and what it calls. stack: text, from that code's first line on.
    """
    found: dict[str, tuple[str, str] | None] = {}
    with suppress(OSError, TimeoutError):
        found = client.sync(client._run, _stack, job, workers=workers, on_error="ignore", callback_timeout=ANSWER_S)
    return {address: at for address, at in found.items() if at}


def listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _natural(worker: dict[str, Any]) -> tuple[str, int, str]:
    return worker["host"], len(str(worker["name"])), str(worker["name"])  # 9 before 10


def _name(key: Any) -> str:
    return str(key[0] if isinstance(key, tuple) else key)  # a rank's key is (job, attempt, rank)


def _at_work(dask_worker: Any) -> tuple[tuple[int, int], list[Any]]:
    process = os.getpid(), id(choose)  # of two machines, the first may be equal
    state = dask_worker.state
    return process, [task.key for task in (*state.executing, *state.long_running, *state.ready)]


def _kill(workers: list[str], dask_worker: Any) -> None:
    import psutil

    if dask_worker.pid and dask_worker.worker_address in workers:  # it is a nanny, of a LocalCluster in this process
        psutil.Process(dask_worker.pid).kill()


def _stack(job: tuple, dask_worker: Any) -> tuple[str, str] | None:
    for thread, key in dict(dask_worker.active_threads).items():
        if isinstance(key, tuple) and key[: len(job)] == job:
            frames = list(traceback.extract_stack(sys._current_frames()[thread]))
            here = str(Path(__file__).with_name("rank.py"))  # which calls the user's function
            starts = [position for position, frame in enumerate(frames, 1) if frame.filename == here]
            frames = frames[starts[-1] if starts else 0 :] or frames[-1:]
            return _place(frames), "".join(traceback.format_list(frames))
    return None


def _place(frames: list[traceback.FrameSummary]) -> str:
    libraries = *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen"
    at = max((i for i, frame in enumerate(frames) if not frame.filename.startswith(libraries)), default=0)
    called = [frame.name for frame in frames[at + 1 :] if frame.name not in WRAPPERS]
    return f"{Path(frames[at].filename).name}:{frames[at].lineno} in {[*called, frames[at].name][0]}"
