"""Run one function on several workers at once, as the ranks of one job: watch it, restart it, free its workers."""

import os
import socket
import threading
import time
import uuid
import warnings
import weakref
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import cloudpickle
import pandas as pd
from distributed import CancelledError, get_worker
from distributed.comm import get_address_host

from workshop_utils.results import reporting

TICK_S = 0.02  # between two looks at the futures
POLL_S = 0.5  # between two questions to the scheduler, whether all workers live
SETTLE_S = 1.0  # after a rank failed: for the death of another to be noticed, of which that is a consequence
CAUSE_S = 15  # where only ranks have failed that name another one: for that one's exception
GRACE_S = 2.0  # for the other ranks to end by themselves, before their workers are restarted
REACH_S = 30  # for a rank to reach rank 0's store, and for a killed worker's successor
JOIN_S = 300  # for all ranks to be there: they import and unpickle, each at its own speed
_jobs = []  # of this process, each until its workers are free
_choosing = threading.Lock()  # two launches at a time must not choose the same workers


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

    workers: their addresses, in rank order. failures: the deaths that it survived.
    """

    def __init__(self, client, bootstrap, fn, args, kwargs, *, n_workers=None, timeout=None, max_restarts=0):
        """Start `fn(*args, **kwargs)` on n_workers workers, all by default.

        bootstrap: called on each rank as (run, store, rank, world_size), it returns what run() returns; `store` is a
        `torch.distributed.TCPStore` that all ranks of this attempt share, served by rank 0's worker.
        Raises JobError and WorkersBusy, and TypeError where the function or an argument cannot be sent.
        """
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise ValueError(f"timeout is {timeout!r}: give seconds, or None for no limit.")
        if not isinstance(max_restarts, int) or max_restarts < 0:
            raise ValueError(f"max_restarts is {max_restarts!r}: give a whole number of at least 0.")
        self.client, self.timeout, self.max_restarts = client, timeout, max_restarts
        self.name = f"{getattr(fn, '__name__', 'function')}-{uuid.uuid4().hex}"
        self._bootstrap, self._call = bootstrap, _pickled(fn, args, kwargs)
        self._tasks, self._ranks, self.failures, self._rows = [], [], [], []
        self._outcome, self._error, self._remote, self._cancelled = None, None, None, False
        self._changed = threading.Condition()
        self._ended = False
        with _choosing:
            self.workers = _choose(client, n_workers)
            _jobs.append(self)
        receive = weakref.WeakMethod(self._receive)  # a client never forgets a handler, but must let the job go
        client.subscribe_topic(self.name, lambda event: (method := receive()) and method(event))
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def __repr__(self):
        state = "running" if not self._ended else f"failed: {self._error!r}" if self._error else "finished"
        return f"<Job {self.name.rsplit('-', 1)[0]}, {len(self.workers)} ranks, {state}>"

    @property
    def futures(self):
        """One future per rank, in rank order, once the ranks are submitted; none if that was not reached."""
        self._wait(lambda: self._ranks or self._ended)
        return self._ranks

    def done(self):
        """Return whether the job has ended, well or not."""
        return self._ended

    def result(self):
        """Return what each rank returned, in rank order; wait for it.

        Raises the exception of the rank that failed first, with that rank's traceback; WorkerDied; TimeoutError;
        CancelledError. An interrupt (Ctrl-C, or the notebook's stop button) cancels the job.
        """
        self._wait(lambda: self._ended)
        error, outcome = self._error, self._outcome
        self = None  # the client keeps a rank's exception, and that the frames it passed, which must not keep the job
        if error:
            raise error
        return outcome

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

    def _ending(self):
        return self._ended or (not self.max_restarts and any(task.status == "error" for task in self._tasks))

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
            self._error = error.with_traceback(self._remote)
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
        self._tasks = [port]
        try:
            self._watch(deadline)
            port = port.result()
            ranks = [
                submit(_rank, self._bootstrap, self._call, self.name, attempt, rank, world_size, host, port,
                       workers=[address], key=(f"{self.name}-{attempt}", rank))
                for rank, address in enumerate(self.workers)
            ]  # fmt: skip
            with self._changed:
                self._tasks = self._ranks = ranks
                self._changed.notify_all()
            self._watch(deadline)
            return _gathered(self.client, self._tasks)
        finally:
            store.release()  # which closes its server

    def _watch(self, deadline):
        """Return when all futures are finished; raise the reason why they will not be."""
        failed_at, looked_at = None, time.monotonic()
        while not all(future.done() for future in self._tasks):
            time.sleep(TICK_S)  # distributed.wait would go by the client that was made last, which may be another one
            now = time.monotonic()
            self._raise_for_cancelled()
            if now > looked_at + POLL_S:
                looked_at = now
                self._raise_for_dead()
            if failed := [future.exception() for future in self._tasks if future.status == "error"]:
                failed_at = failed_at or now
                known = any(not isinstance(error, Stopped) for error in failed)
                if now > failed_at + (SETTLE_S if known else CAUSE_S):
                    break
            if now > deadline:
                late = [rank for rank, future in enumerate(self._tasks) if not future.done()]
                raise TimeoutError(f"Rank {_listed(late)} had not returned after {self.timeout} s: look at "
                                   "client.call_stack() for where it waits, or give it a longer timeout.")  # fmt: skip
        if any(future.status != "finished" for future in self._tasks):
            self._raise_for_cancelled()
            self._raise_for_dead()
            self._raise_for_failed()

    def _raise_for_cancelled(self):
        if self._cancelled:
            raise CancelledError(f"{self.name} was cancelled.")
        if any(future.status == "cancelled" for future in self._tasks):
            raise CancelledError(f"{self.name} lost its tasks to client.cancel(), client.restart() or client.close().")

    def _raise_for_dead(self):
        if dead := self._dead():
            ranks = _listed(sorted(map(self.workers.index, dead)))
            raise WorkerDied(
                f"Rank {ranks} died: worker {_listed(dead)} was killed, ran out of memory, or was lost with its "
                "machine. To go on after that, give launch max_restarts, and let the function resume from a checkpoint."
            )

    def _raise_for_failed(self):
        failed = [future for future in self._tasks if future.status == "error"]
        cause = min(failed, key=lambda future: isinstance(future.exception(), Stopped))
        self._remote = cause.traceback()
        raise cause.exception()

    def _free(self):
        """Return when no rank is at work any more, and restarted workers are back."""
        grace_ends = time.monotonic() + (0 if self._cancelled else GRACE_S)
        while time.monotonic() < grace_ends and any(future.status == "pending" for future in self._tasks):
            time.sleep(TICK_S)
        dead, status = self._dead(), dict(zip(self.workers, [future.status for future in self._tasks], strict=False))
        self.client.cancel([future for future in self._tasks if not future.done()])
        busy = {a for a in status if status[a] not in ("finished", "error")}  # a cancelled task's thread may still run
        # Where one rank died while they connected, gloo in the others is broken: their next launches hung or failed.
        stuck = [address for address in (self.workers if dead else busy) if address not in dead]
        if immortal := [address for address in stuck if not self._members[address]["nanny"] and address in busy]:
            warnings.warn(f"Worker {_listed(immortal)} has no nanny to restart it, and stays busy until its rank "
                          "returns: end that process, and start workers with nannies.", stacklevel=2)  # fmt: skip
        stuck = [address for address in stuck if self._members[address]["nanny"]]
        for address in stuck:  # a thread cannot be stopped, a process can
            with suppress(Exception):  # it, or its nanny, is ending by itself
                self.client.run(_kill_worker, address, workers=[address], nanny=True)
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
            with suppress(JobError), _choosing:
                return _choose(self.client, needed, asking=self)
            if time.monotonic() > give_up:
                error.add_note(f"No worker took its place within {REACH_S} s, so the job was not resumed.")
                raise error
            time.sleep(POLL_S)


def _choose(client, n_workers, asking=None):
    """Return the addresses of idle workers, in rank order: by host, then by name."""
    for job in [job for job in _jobs if job._ending() and job is not asking]:
        job._thread.join()  # it is freeing its workers
    workers = _workers(client)
    if n_workers is not None and (not isinstance(n_workers, int) or n_workers < 1):
        raise JobError(f"n_workers is {n_workers!r}: give a whole number of at least 1, or None for all workers.")
    needed = len(workers) if n_workers is None else n_workers
    if needed > len(workers) or not workers:
        raise JobError(f"The job needs {needed or 'at least one'} workers, one for each rank, but the cluster has "
                       f"{len(workers)}: ask for fewer ranks, or start more workers.")  # fmt: skip
    at_work = client.run(_at_work, on_error="ignore")  # a worker that has just died is left out
    tasks = {address: keys for address, (_, keys) in at_work.items()}
    for job in _jobs:
        if job is not asking:
            tasks.update({address: [job.name] for address in job.workers})
    idle = [address for address in workers if address in tasks and not tasks[address]]
    if len(idle) < needed:
        busy = [f"{address} with {tasks.get(address)}" for address in workers if address not in idle]
        raise WorkersBusy(f"The job needs {needed} idle workers, but {_listed(busy)} is busy: wait for that to end, "
                          "or end it with job.cancel(), client.cancel(futures) or client.restart().")  # fmt: skip
    order = sorted(idle, key=lambda address: (workers[address]["host"], _natural(workers[address]["name"])))[:needed]
    if len({at_work[address][0] for address in order}) < needed:  # torch.distributed has one default group a process
        raise JobError(f"{_listed(order)} share a process, where each rank needs one of its own: start the cluster "
                       "with processes=True.")  # fmt: skip
    return order


def _workers(client):
    # Not scheduler_info(): a refresh in the background may cut its answer to five workers, as if the rest had died.
    return client.sync(client.scheduler.identity, n_workers=-1)["workers"]


def _identity(worker):
    return worker["local_directory"]  # a new one for each process, unlike id, name and often the address


def _natural(name):
    return (0, int(name), "") if str(name).isdigit() else (1, 0, str(name))


def _gathered(client, futures):
    try:
        return client.gather(futures)
    except TypeError as error:  # all have finished, so it is about the way here
        raise TypeError("What the function returned cannot be sent back: return numbers, text, tensors or a state_dict "
                        "instead of generators, files, locks or DataLoaders.") from error  # fmt: skip


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


def network_interface():
    """Return the network interface of this worker's address, else None; gloo would go by what the host's name means."""
    import psutil

    mine = get_address_host(get_worker().address)
    mine = "127.0.0.1" if mine.startswith("127.") else mine  # all of 127.0.0.0/8 is loopback, but not listed
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == mine for address in addresses):
            return name
    return None


@contextmanager
def environment(settings):
    """Set environment variables within the block, and leave none behind that is set there."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:  # what runs within sets more, and a later task of this worker must not find any of it
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _at_work(dask_worker):
    process = os.getpid(), id(_jobs)  # of two machines, the first may be equal
    state = dask_worker.state  # `executing` includes tasks that were cancelled, but whose thread still runs
    keys = [str(task.key) for task in (*state.executing, *state.long_running, *state.ready)]
    return process, keys


def _kill_worker(address, dask_worker):
    import psutil

    nanny = dask_worker  # which then starts another; nannies of a LocalCluster live in the client's own process
    if nanny.pid and nanny.worker_address == address:
        psutil.Process(nanny.pid).kill()


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
    store.set_timeout(timedelta(seconds=JOIN_S))
    if store.add(f"started-{rank}", 1) > 1:
        raise Stopped(f"Rank {rank} was started a second time by Dask: a job's ranks start together or not at all.")

    def run():
        try:
            fn, args, kwargs = cloudpickle.loads(call)
            result = fn(*args, **kwargs)
        except BaseException:
            _first_to_fail(store, rank)  # before the others can notice
            raise
        store.add(f"returned-{rank}", 1)
        return result

    try:
        with reporting(topic, rank=rank, attempt=attempt):
            return bootstrap(run, store, rank, world_size)
    except BaseException as raised:
        error = raised
    # Out of the `except`: a Stopped would travel with the other error as its context, and fail to where that cannot.
    first = _first_to_fail(store, rank)
    if first != rank:
        time.sleep(SETTLE_S)  # so that who looks at the futures alone meets the cause before this
        raise Stopped(f"Rank {rank} ended because rank {first} failed first.")
    if not isinstance(error, Exception):  # a worker would take SystemExit for its own end
        raise JobError(f"Rank {rank} called for the end of its process: {error!r}.") from error
    error.add_note(_about(store, rank, world_size))
    raise error


def _about(store, rank, world_size):
    note = f"Raised by rank {rank} of {world_size}, on worker {get_worker().address}."
    with suppress(Exception):  # rank 0's process may be gone, and the store with it
        if returned := [other for other in range(world_size) if store.check([f"returned-{other}"])]:
            note += f" Rank {_listed(returned)} had returned by then, and was in no collective any more."
    return note


def _first_to_fail(store, rank):
    try:
        return int(store.compare_set("failed", "", str(rank)))
    except Exception:  # rank 0's process is gone, and the store with it
        return rank
