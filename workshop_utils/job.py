"""Run one function on several workers at once, as the ranks of one job: watch it, restart it, free its workers."""

import socket
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from functools import partial

import cloudpickle
import pandas as pd
from distributed import CancelledError, get_worker, wait
from distributed.comm import get_address_host

from workshop_utils.results import reporting

POLL_S = 0.5  # between two looks at whether all workers live
SETTLE_S = 1.0  # after a rank failed: for the cause to arrive, where the first news was a consequence
GRACE_S = 2.0  # for the other ranks to end by themselves, before their workers are restarted
REACH_S = 30  # for a rank to reach rank 0's store, and for a killed worker's successor
_jobs = []  # of this process, each until its workers are free


class JobError(RuntimeError):
    """A job cannot start, or ended otherwise than by its own function; the message says why and what to do."""


class WorkersBusy(JobError):
    """The workers that a job needs are at work on something else."""


class WorkerDied(JobError):
    """The process of a rank is gone: killed, out of memory, or its machine was lost."""


class Stopped(JobError):
    """This rank ended because another one failed first."""


class Job:
    """Ranks 0 to n - 1 of one function, each on a worker process of its own.

    futures: one per rank, in rank order. workers: their addresses. failures: the deaths that it survived.
    """

    def __init__(self, client, bootstrap, fn, args, kwargs, *, n_workers=None, timeout=None, max_restarts=0):
        """Start `fn(*args, **kwargs)` on n_workers workers, all by default.

        bootstrap: called on each rank as (run, store, rank, world_size), it returns what run() returns; `store` is a
        `torch.distributed.TCPStore` that all ranks of this attempt share, served by rank 0's worker.
        Raises JobError and WorkersBusy, and TypeError where the function or an argument cannot be sent.
        """
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout!r}: give seconds, or None for no limit.")
        self.client, self.timeout, self.max_restarts = client, timeout, max_restarts
        self.name = f"{getattr(fn, '__name__', 'function')}-{uuid.uuid4().hex}"
        self._bootstrap, self._call = bootstrap, _pickled(fn, args, kwargs)
        self.futures, self.failures, self._rows = [], [], []
        self._outcome, self._error, self._cancelled = None, None, False
        self._changed = threading.Condition()
        self._ended = False
        self.workers = _choose(client, n_workers)
        client.subscribe_topic(self.name, self._receive)
        _jobs.append(self)
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def __repr__(self):
        state = "running" if not self._ended else f"failed: {self._error!r}" if self._error else "finished"
        return f"<Job {self.name.rsplit('-', 1)[0]}, {len(self.workers)} ranks, {state}>"

    def done(self):
        """Return whether the job has ended, well or not."""
        return self._ended

    def result(self):
        """Return what each rank returned, in rank order; wait for it.

        Raises the exception of the rank that failed first, with that rank's traceback; WorkerDied; TimeoutError;
        CancelledError. An interrupt (Ctrl-C, or the notebook's stop button) cancels the job.
        """
        self._wait(lambda: self._ended)
        if self._error:
            raise self._error
        return self._outcome

    def rows(self):
        """Yield each row of metrics as it arrives, until the job ends; then raise what it raised, if it did."""
        seen = 0
        while not (self._ended and seen == len(self._rows)):
            self._wait(lambda seen=seen: self._ended or len(self._rows) > seen)
            new = self._rows[seen:]
            seen += len(new)
            yield from new
        self.result()

    def metrics(self):
        """Return the rows of metrics that have arrived so far: rank, attempt, time, and what the ranks logged."""
        return pd.DataFrame(list(self._rows))

    def cancel(self):
        """End the job and free its workers; those that do not stop by themselves are restarted."""
        self._cancelled = True
        self._thread.join()

    def _wait(self, condition):
        try:
            with self._changed:
                self._changed.wait_for(condition)
        except KeyboardInterrupt:
            self.cancel()
            raise

    def _receive(self, event):
        with self._changed:
            self._rows.append(event[1])
            self._changed.notify_all()

    def _run(self):
        try:
            self._outcome = self._with_restarts()
        except BaseException as error:  # whatever it is, it belongs to who asks for the result
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        with suppress(Exception):  # the client may be closed by now
            if self._error:
                self._free()
            self.client.unsubscribe_topic(self.name)
        _jobs.remove(self)

    def _with_restarts(self):
        deadline = time.monotonic() + (self.timeout or float("inf"))
        while True:
            try:
                return self._attempt(deadline)
            except WorkerDied as error:
                if len(self.failures) == self.max_restarts:
                    raise
                self.failures.append(error)
                self._free()
                self.workers = self._successors(error, deadline)

    def _attempt(self, deadline):
        self._members = {address: info for address, info in _workers(self.client).items() if address in self.workers}
        host, world_size, attempt = get_address_host(self.workers[0]), len(self.workers), len(self.failures)
        submit = partial(self.client.submit, pure=False, allow_other_workers=False)
        store = submit(_serve_store, host, workers=self.workers[:1], key=f"store-{uuid.uuid4().hex}")
        port = submit(getattr, store, "port", workers=self.workers[:1])  # the store itself stays where it is
        self.futures = [port]
        try:
            self._watch(deadline)
            port = port.result()
            self.futures = [
                submit(_rank, self._bootstrap, self._call, self.name, attempt, rank, world_size, host, port,
                       workers=[address], key=(f"{self.name}-{attempt}", rank))
                for rank, address in enumerate(self.workers)
            ]  # fmt: skip
            self._watch(deadline)
            return self.client.gather(self.futures)
        finally:
            store.release()  # which closes its server

    def _watch(self, deadline):
        """Return when all futures are finished; raise the reason why they will not be."""
        failed_at, looked_at = None, time.monotonic()
        while pending := [future for future in self.futures if not future.done()]:
            with suppress(TimeoutError, CancelledError):
                wait(pending, timeout=POLL_S / 5 if failed_at else POLL_S, return_when="FIRST_COMPLETED")
            now = time.monotonic()
            if self._cancelled:
                raise CancelledError(f"{self.name} was cancelled.")
            if now > looked_at + POLL_S or failed_at:
                looked_at = now
                self._raise_for_dead()
            if failed_at is None and any(future.status == "error" for future in self.futures):
                failed_at = now
            if failed_at and now > failed_at + SETTLE_S:
                break
            if now > deadline:
                late = [rank for rank, future in enumerate(self.futures) if not future.done()]
                raise TimeoutError(f"Rank {_listed(late)} had not returned after {self.timeout} s: look at "
                                   "client.call_stack() for where it waits, or give it a longer timeout.")  # fmt: skip
        if any(future.status != "finished" for future in self.futures):
            self._raise_for_dead()
            self._raise_for_failed()

    def _raise_for_dead(self):
        if dead := self._dead():
            ranks = _listed(sorted(map(self.workers.index, dead)))
            raise WorkerDied(
                f"Rank {ranks} died: worker {_listed(dead)} was killed, ran out of memory, or was lost with its "
                "machine. To go on after that, give launch max_restarts, and let the function resume from a checkpoint."
            )

    def _raise_for_failed(self):
        failed = [future for future in self.futures if future.status == "error"]
        if not failed:
            raise CancelledError(f"{self.name}: its tasks were cancelled by somebody else.")
        cause = min(failed, key=lambda future: isinstance(future.exception(), Stopped))
        raise cause.exception().with_traceback(cause.traceback())

    def _free(self):
        """Return when no rank is at work any more, and restarted workers are back."""
        with suppress(TimeoutError, CancelledError):
            wait(self.futures, timeout=0 if self._cancelled else GRACE_S)
        pending = [future for future in self.futures if not future.done()]
        stuck = [address for future, address in zip(self.futures, self.workers, strict=False) if future in pending]
        dead = self._dead()
        self.client.cancel(pending)
        stuck = [address for address in stuck if address not in dead and self._members[address]["nanny"]]
        if stuck:  # a thread cannot be stopped, a process can
            self.client.run(_kill_worker, workers=stuck, nanny=True)
        gone = [self._members[address] for address in {*dead, *stuck} if address in self._members]
        awaited, give_up = {info["nanny"] for info in gone} - {None}, time.monotonic() + REACH_S
        while awaited and time.monotonic() < give_up:
            time.sleep(POLL_S / 5)
            present = [info for info in _workers(self.client).values() if _identity(info) not in map(_identity, gone)]
            awaited -= {info["nanny"] for info in present}

    def _dead(self):
        alive = {_identity(info) for info in _workers(self.client).values()}
        return [a for a in self.workers if a not in self._members or _identity(self._members[a]) not in alive]

    def _successors(self, error, deadline):
        needed = len(self.workers)
        give_up = min(time.monotonic() + REACH_S, deadline)
        while True:
            if self._cancelled:
                raise CancelledError(f"{self.name} was cancelled.")
            with suppress(JobError):
                return _choose(self.client, needed, asking=self)
            if time.monotonic() > give_up:
                error.add_note(f"No worker took its place within {REACH_S} s, so the job was not resumed.")
                raise error
            time.sleep(POLL_S)


def _choose(client, n_workers, asking=None):
    """Return the addresses of idle workers, in rank order: by host, then by name."""
    for job in [job for job in _jobs if job.done() and job is not asking]:
        job._thread.join()  # it is freeing its workers
    workers = _workers(client)
    if n_workers is not None and (not isinstance(n_workers, int) or n_workers < 1):
        raise JobError(f"n_workers is {n_workers!r}: give a whole number of at least 1, or None for all workers.")
    needed = len(workers) if n_workers is None else n_workers
    if needed > len(workers) or not workers:
        raise JobError(f"The job needs {needed or 'at least one'} workers, one for each rank, but the cluster has "
                       f"{len(workers)}: ask for fewer ranks, or start more workers.")  # fmt: skip
    tasks = client.run(_tasks_at_work)
    for job in _jobs:
        if job is not asking:
            tasks.update({address: [job.name] for address in job.workers})
    idle = [address for address in workers if address in tasks and not tasks[address]]
    if len(idle) < needed:
        busy = [f"{address} with {tasks.get(address)}" for address in workers if address not in idle]
        raise WorkersBusy(f"The job needs {needed} idle workers, but {_listed(busy)} is busy: wait for that to end, "
                          "or end it with job.cancel(), client.cancel(futures) or client.restart().")  # fmt: skip
    return sorted(idle, key=lambda address: (workers[address]["host"], _natural(workers[address]["name"])))[:needed]


def _workers(client):
    return client.scheduler_info(n_workers=-1)["workers"]


def _identity(worker):
    return worker["local_directory"]  # a new one for each process, unlike id, name and often the address


def _natural(name):
    return (0, int(name), "") if str(name).isdigit() else (1, 0, str(name))


def _listed(values):
    return ", ".join(map(str, values))


def _pickled(fn, args, kwargs):
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:  # pickling raises many kinds
        name = getattr(fn, "__name__", fn)
        raise TypeError(f"{name!r} or one of its arguments cannot be sent to workers ({error}): make files, locks, "
                        "clients and DataLoaders inside the function.") from error  # fmt: skip


# What follows runs on the workers.


def _tasks_at_work(dask_worker):
    state = dask_worker.state  # `executing` includes tasks that were cancelled, but whose thread still runs
    return [str(task.key) for task in (*state.executing, *state.long_running, *state.ready)]


def _kill_worker(dask_worker):
    import psutil

    psutil.Process(dask_worker.pid).kill()  # this runs on the worker's nanny, which then starts another


def _serve_store(host):
    import torch.distributed as dist

    try:
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:  # a worker behind address translation does not own the address that others know it by
        listening = socket.create_server(("", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _rank(bootstrap, call, topic, attempt, rank, world_size, host, port):
    import torch.distributed as dist

    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=REACH_S))
    if store.add(f"started-{rank}", 1) > 1:
        raise Stopped(f"Rank {rank} was started a second time by Dask: a job's ranks start together or not at all.")
    fn, args, kwargs = cloudpickle.loads(call)

    def run():
        try:
            return fn(*args, **kwargs)
        except BaseException:
            _first_to_fail(store, rank)  # before the others can notice
            raise

    try:
        with reporting(topic, rank=rank, attempt=attempt):
            return bootstrap(run, store, rank, world_size)
    except BaseException as error:
        first = _first_to_fail(store, rank)
        if first != rank:
            raise Stopped(f"Rank {rank} ended because rank {first} failed first.") from None
        if not isinstance(error, Exception):  # a worker would take SystemExit for its own end
            raise JobError(f"Rank {rank} called for the end of its process: {error!r}.") from error
        error.add_note(f"Raised by rank {rank} of {world_size}, on worker {get_worker().address}.")
        raise


def _first_to_fail(store, rank):
    try:
        return int(store.compare_set("failed", "", str(rank)))
    except Exception:  # rank 0's process is gone, and the store with it
        return rank
