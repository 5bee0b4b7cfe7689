"""A job on the client: start it, show what is heard of it, restart it after a death, and end it however it is left."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import cloudpickle
import pandas as pd
from distributed import Client, Future

from workshop_utils.job.attempt import Attempt, Call
from workshop_utils.job.errors import JobError, SchedulerLost, WorkerDied
from workshop_utils.job.workers import await_successors
from workshop_utils.progress import waiting

_jobs: list["Job"] = []  # of this process, each until its workers are free


class Job:
    """Ranks 0 to n - 1 of one function, each on a worker process of its own.

    workers: their addresses, in rank order. failures: the deaths that it survived. As a context manager, it frees the
    workers however the block is left: by its end, by an exception, or by Ctrl-C and the notebook's stop button.
    """

    def __init__(self, client: Client, bootstrap: Callable, fn: Callable, args: tuple, kwargs: dict, *,
                 n_workers: int | tuple[int, int] | None = None, timeout: float | None = None, max_restarts: int = 0,
                 wait_for_workers: float = 0, wait_for_successors: float = 30) -> None:  # fmt: skip
        """Start `fn(*args, **kwargs)` on n_workers workers, all by default.

        bootstrap: called on each rank as (run, store, place), it returns what run() returns; `store` is a
        `torch.distributed.TCPStore` that all ranks of this attempt share, served by rank 0's worker, and `place` a
        `rank.Place`. All else, and what is raised, is as in `ddp.launch`.
        """
        self._fewest, self._most = _fewest_and_most(n_workers)
        _refuse_wrong(timeout, max_restarts, wait_for_workers=wait_for_workers, wait_for_successors=wait_for_successors)
        self._function = getattr(fn, "__name__", "function")
        self.name = f"{self._function}-{uuid.uuid4().hex}"
        self.failures: list[WorkerDied] = []
        self._call = Call(client, self.name, bootstrap, _pickled(fn, args, kwargs), max_restarts, timeout)
        self._changed, self._patience = self._call.changed, (wait_for_workers, wait_for_successors)
        self._attempt = Attempt(self._call, 0)
        self._rows: list[dict[str, Any]] = []
        self._gone: list[dict[str, Any]] = []  # what the scheduler knew of workers that died
        self._outcome: list[Any] = []
        self._error: BaseException | None = None
        self._ended = False
        self._call.listen(self.name, self._receive)
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        try:
            self._thread.start()  # all that has to be undone is done in there, where no interrupt comes
            self._wait(lambda: self.workers or self._ended, "choosing the workers")
        except BaseException:
            self.cancel()
            raise
        if not self.workers:  # kept here, the error and the frames of the caller that it passes would be a circle
            raise vars(self).pop("_error")

    def __repr__(self) -> str:
        state = "running" if not self._ended else f"failed: {self._error!r}" if self._error else "finished"
        return f"<Job {self._function}, {len(self.workers)} ranks, {state}>"

    @property
    def workers(self) -> list[str]:
        """The workers' addresses, in rank order."""
        return list(self._attempt.members)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self.cancel()

    @property
    def futures(self) -> list[Future]:
        """One future per rank, in rank order, once the ranks are submitted; none if that was not reached.

        They tell when a rank is done or has failed; what it returned is in `result`.
        """
        self._wait(lambda: self._attempt.ranks or self._ended)
        return self._attempt.ranks

    def done(self) -> bool:
        """Return whether the job has ended, well or not."""
        return self._ended

    def result(self) -> list[Any]:
        """Return what each rank returned, in rank order; wait for it. Tensors come back on the CPU.

        Raises the exception of the rank that failed first, with that rank's traceback; WorkerDied; SchedulerLost;
        TimeoutError; CancelledError. An interrupt (Ctrl-C, or the notebook's stop button) cancels the job.
        """
        self._wait(lambda: self._ended, f"{self._function} on {len(self.workers)} rank{'s'[: len(self.workers) > 1]}")
        if self._error:
            raise self._error.with_traceback(self._remote)  # anew, as each raise adds to it
        return self._outcome

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each row of metrics as it arrives, until the job ends; then raise what it raised, if it did.

        Where the loop's body may be interrupted, write `with job:` around it, which frees the workers then.
        """
        seen = 0
        while not (self._ended and seen == len(self._rows)):
            self._wait(lambda: self._ended or len(self._rows) > seen)  # noqa: B023  it is called within the turn
            new = self._rows[seen:]
            seen += len(new)
            yield from new
        self.result()

    def metrics(self) -> pd.DataFrame:
        """Return the rows of metrics that have arrived so far: rank, attempt, time, and what the ranks logged."""
        return pd.DataFrame(list(self._rows))

    def stacks(self) -> str:
        """Return where each rank at work stands, as text: its Python stack, from the function's first line on."""
        return "\n".join(f"Rank {rank}, at {at}:\n{stack}" for rank, at, stack in self._attempt.standing())

    def cancel(self) -> None:
        """End the job, if it runs, and free its workers; those that do not stop by themselves are restarted."""
        self._call.cancelled = True
        self._call.notice()
        if self._thread.ident:
            self._thread.join()

    def _wait(self, condition: Callable[[], object], what: str = "") -> None:
        try:
            shown = waiting(what, lambda: f"{len(self._rows)} rows of metrics" * bool(self._rows))
            with shown if what else nullcontext(), self._changed:
                self._changed.wait_for(condition)
        except BaseException:  # Ctrl-C raises KeyboardInterrupt, and SystemExit once dask_jobqueue is imported
            self.cancel()
            raise

    def _receive(self, event: tuple[float, dict[str, Any]]) -> None:
        row = event[1]
        if isinstance(row.get("exception"), bytes):  # which no metric is
            self._attempt.hear(row)
            return
        with self._changed:
            self._rows.append(row)
            self._changed.notify_all()

    def _run(self) -> None:
        _jobs.append(self)
        try:
            for job in [job for job in _jobs if job is not self and job._is_ending()]:
                job._thread.join()  # it is freeing its workers
            self._outcome = self._with_restarts()
        except BaseException as error:  # whatever it is, it belongs to who asks for the result
            self._error, self._remote = error, error.__traceback__
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        with suppress(Exception):  # the client may be closed by now
            if self._error and not isinstance(self._error, SchedulerLost):
                await_successors(self._call.client, self._gone + self._attempt.free(), self._patience[1])
            for topic in (self.name, *self.workers):
                self._call.client.unsubscribe_topic(topic)
        _jobs.remove(self)

    def _with_restarts(self) -> list[Any]:
        fewest, most, patience = self._fewest, self._most, self._patience[0]
        while True:
            try:
                self._attempt.start(fewest, most, patience, self._gone)
                return self._attempt.results()
            except WorkerDied as death:
                if len(self.failures) == self._call.max_restarts:
                    raise
                self.failures.append(death)
                self._gone += self._attempt.free()
                most, patience = len(self.workers), self._patience[1]
                fewest = self._fewest or most
                self._attempt = Attempt(self._call, len(self.failures))
            except JobError as error:
                if self.workers or not self.failures or isinstance(error, SchedulerLost):
                    raise
                self._gone.clear()  # they have been waited for
                self.failures[-1].add_note(f"No worker took its place within {patience} s (wait_for_successors), so "
                                           "the job was not resumed.")  # fmt: skip
                raise self.failures[-1] from error

    def _is_ending(self) -> bool:
        failed = any(task.status == "error" for task in self._attempt.ranks)
        return self._ended or (failed and not self._call.max_restarts)


def _fewest_and_most(n_workers: Any) -> tuple[int | None, int | None]:
    pair = n_workers if isinstance(n_workers, tuple) else (n_workers, n_workers)
    whole = len(pair) == 2 and all(isinstance(number, int) for number in pair)
    if n_workers is not None and not (whole and 1 <= pair[0] <= pair[1]):
        raise ValueError(f"n_workers is {n_workers!r}: give a whole number of at least 1, a pair (fewest, most) of "
                         "them, or None for all workers.")  # fmt: skip
    return pair


def _refuse_wrong(timeout: Any, max_restarts: Any, **waits: Any) -> None:
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ValueError(f"timeout is {timeout!r}: give seconds, or None for no limit.")
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts!r}: give a whole number of at least 0.")
    for name, seconds in waits.items():
        if not (isinstance(seconds, (int, float)) and seconds >= 0):
            raise ValueError(f"{name} is {seconds!r}: give seconds, 0 not to wait.")


def _pickled(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:  # pickling raises many kinds
        name = getattr(fn, "__name__", fn)
        raise TypeError(f"{name!r} or one of its arguments cannot be sent to workers ({error}): make files, locks, "
                        "clients and DataLoaders inside the function.") from error  # fmt: skip
