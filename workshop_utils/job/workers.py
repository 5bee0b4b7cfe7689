"""The workers of a cluster, as the client sees them: who is there, who is idle, where one stands."""

import asyncio
import os
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distributed import Client, Lock

from workshop_utils.job.errors import JobError, SchedulerLost, WorkersBusy

ANSWER_S = 10  # for the scheduler and the workers to answer a question
LAUNCH_S = 90  # for launches of other clients to be over; the scheduler forgets one whose client is gone after 40
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


def choose(client: Client, fewest: int | None, most: int | None,
           gone: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return what the scheduler knows of idle workers of one kind, by address, in rank order: by host, then by name.

    fewest, most: None for all of a kind. gone: the job's own that have ended, which the scheduler may not know yet.
    The kind is that of those, else with a GPU where there are `fewest` of these, else without; a warning says so.
    Raises JobError where there are too few workers, WorkersBusy where they are at work.
    """
    workers = _of_one_kind(client, fewest or 1, gone)
    # The scheduler knows a task before its worker does, the worker a cancelled one whose thread still runs.
    assigned, at_work = client.processing(), _ask(client, workers, _at_work)
    tasks = {address: {*map(_name, assigned.get(address, ())), *map(_name, keys)}
             for address, (_, keys) in at_work.items()}  # fmt: skip
    idle = [address for address in workers if address in tasks and not tasks[address]]
    if len(idle) < (needed := fewest or len(workers)):
        busy = [f"{address} with {sorted(tasks[address])} is busy" if address in tasks else f"{address} does not answer"
                for address in workers if address not in idle]  # fmt: skip
        raise WorkersBusy(f"The job needs {needed} idle workers, but {listed(busy)}: wait for that to end, end it with "
                          "job.cancel(), client.cancel(futures) or client.restart(), or give launch "
                          "wait_for_workers.")  # fmt: skip
    order = sorted(idle, key=lambda address: _natural(workers[address]))[:most]
    if len({at_work[address][0] for address in order}) < len(order):  # torch has one default group a process
        raise JobError(f"{listed(order)} share a process, where each rank needs one of its own: start the cluster "
                       "with processes=True.")  # fmt: skip
    return {address: workers[address] for address in order}


def kill(client: Client, workers: list[str]) -> None:
    """End the processes of these workers at once, through their nannies, which start others."""
    # Client.restart_workers would wait four seconds for a thread that cannot be stopped.
    def end(dask_worker: Any) -> None:  # in here it is pickled by value: a nanny may lack this package
        import psutil

        if dask_worker.pid and dask_worker.worker_address in workers:  # it is one of a LocalCluster in this process
            psutil.Process(dask_worker.pid).kill()

    _ask(client, workers, end, nanny=True)


def await_successors(client: Client, gone: list[dict[str, Any]], seconds: float) -> None:
    """Return once the nannies of these workers, or as many new ones, have others; at the latest after so many seconds.

    New ones may have to do, as the nanny of a host that is cut off will not be back.
    """
    missing, give_up = {worker["nanny"] for worker in gone} - {None}, time.monotonic() + seconds
    processes = set(map(process_of, gone))
    known = missing | {worker["nanny"] for worker in workers_of(client).values()}
    new: set[str] = set()
    while len(missing) > len(new) and time.monotonic() < give_up:
        time.sleep(0.1)
        nannies = {worker["nanny"] for worker in workers_of(client).values() if process_of(worker) not in processes}
        missing, new = missing - nannies, nannies - known


def stacks_of(client: Client, workers: list[str], job: tuple) -> dict[str, tuple[str, str]]:
    """Return (place, stack) of each worker at a task whose key begins with `job`; who does not answer is left out.

    place: the innermost line of the user's own code, and what it calls. stack: text, from that code's first line on.
    """
    return {address: at for address, at in _ask(client, workers, _stack, job).items() if at}


def listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _ask(client: Client, workers: Iterable[str], function: Callable, *args: Any, nanny: bool = False) -> dict[str, Any]:
    """Return what function(*args) returns on each of these workers, or on its nanny, that answers within ANSWER_S."""

    async def ask(address: str) -> dict[str, Any]:
        with suppress(Exception):  # it is ending by itself, or its host is cut off: nobody else's answer shall wait
            told = client._run(function, *args, workers=[address], nanny=nanny, on_error="ignore")
            return await asyncio.wait_for(told, ANSWER_S)
        return {}

    async def ask_all() -> list[dict[str, Any]]:
        return await asyncio.gather(*map(ask, workers))

    return {address: answer for one in client.sync(ask_all) for address, answer in one.items()}


def _of_one_kind(client: Client, fewest: int, gone: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    ended = set(map(process_of, gone))
    workers = {address: worker for address, worker in workers_of(client).items() if process_of(worker) not in ended}
    kinds: dict[str, dict[str, dict[str, Any]]] = {"with a GPU": {}, "without a GPU": {}}
    for address, worker in workers.items():
        kinds[_kind(worker)][address] = worker
    for kind in {_kind(gone[0])} if gone else kinds:
        if len(chosen := kinds[kind]) >= fewest:
            if others := workers.keys() - chosen:
                warnings.warn(f"The job takes workers {kind} and leaves out {listed(sorted(others))}, as ranks have to "
                              "be of one kind.", stacklevel=2)  # fmt: skip
            return chosen
    both = " and ".join(f"{len(some)} {kind}" for kind, some in kinds.items()) if all(kinds.values()) else ""
    raise JobError(f"The job needs {fewest if fewest > 1 else '1 or more'} workers{' of one kind' * bool(both)}, one "
                   f"for each rank, but the cluster has {both or len(workers)}: ask for fewer ranks, or start more "
                   "workers (an adaptive cluster starts them for tasks, not for ranks: write "
                   f"cluster.adapt(minimum={fewest}) there) and give launch wait_for_workers=60.")  # fmt: skip


def _kind(worker: dict[str, Any]) -> str:
    return "with a GPU" if worker.get("gpu") else "without a GPU"


def _natural(worker: dict[str, Any]) -> tuple[str, int, str]:
    return worker["host"], len(str(worker["name"])), str(worker["name"])  # 9 before 10


def _name(key: Any) -> str:
    return str(key[0] if isinstance(key, tuple) else key)  # a rank's key is (job, attempt, rank)


def _at_work(dask_worker: Any) -> tuple[tuple[int, int], list[Any]]:
    process = os.getpid(), id(choose)  # of two machines, the first may be equal
    state = dask_worker.state
    return process, [task.key for task in (*state.executing, *state.long_running, *state.ready)]


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
