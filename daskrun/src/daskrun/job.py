"""A job on the client: what its user sees of it, and the ways in which it is left."""

import asyncio
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distributed import CancelledError, Client, Future
from tqdm import tqdm

from daskrun.cluster import Cluster
from daskrun.control import Control
from daskrun.errors import JobError, WorkerDied, check_client, warn
from daskrun.limits import Limits
from daskrun.pickling import pickled, unpacked
from daskrun.screen import screen
from daskrun.why.verdict import explain, stacks

LOOK_S = 1.0  # between two looks whether the client was closed, and two updates of the line that shows the wait
SHOWN_AFTER_S = 2.0
T = TypeVar("T")  # what a rank returns

if TYPE_CHECKING:
    import pandas as pd


class Job(Generic[T]):
    """Ranks 0 to n - 1 of one function, each on a worker process of its own.

    As a context manager, it frees the workers however the block is left: by its end, by an exception, or by Ctrl-C and
    the notebook's stop button.
    """

    def __init__(
        self,
        client: Client,
        bootstrap: Callable,
        fn: Callable[..., T],
        args: tuple,
        kwargs: dict,
        limits: Limits,
    ) -> None:
        """Start `fn(*args, **kwargs)`.

        bootstrap: called on each rank as (run, store, mine), it returns what run() returns; `store` is a
        `torch.distributed.TCPStore` that all ranks of this attempt share, served by rank 0's worker, and `mine` a
        `rank.Assignment`. What is raised is as in `launch`.
        """
        check_client(client)
        self._function = getattr(fn, "__name__", "function")
        self.name = f"{self._function}-{uuid.uuid4().hex}"
        call = pickled(fn, args, kwargs)
        self._client = client
        self._control = Control(Cluster(client, self.name), self.name, bootstrap, call, limits)
        self._running = asyncio.run_coroutine_threadsafe(self._control.run(), self._control.loop)
        self._results: list[T] | None = None
        try:
            # Until the ranks are submitted: what is submitted to Dask after `launch` comes after them.
            self._wait(lambda: self._futures or self.done(), "choosing the workers")
        except BaseException:
            self.cancel()
            raise
        if self._control.error is not None and self._control.attempt is None:
            raise self._control.error

    def __repr__(self) -> str:
        error = self._control.error
        doing = self._control.doing if error is None else f"failed: {error!r}"
        return f"<Job {self._function}, {_counted(self._control.size, 'rank')}, {doing}>"

    def __enter__(self) -> "Job[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    @property
    def workers(self) -> list[str]:
        """The workers' addresses, in rank order; none while a dead one's successor is awaited."""
        attempt = self._control.attempt
        return [member.address for member in attempt.members] if attempt else []

    @property
    def failures(self) -> list[WorkerDied]:
        """The deaths that the job survived."""
        return self._control.failures

    @property
    def futures(self) -> list[Future]:
        """One future per rank of this attempt, in rank order, once they are submitted; none if that was not reached.

        They tell when a rank is done or has failed; what it returned is in `result`. After a death, the next attempt
        has others. After a failure, all but those with an error are cancelled. After a success there are none, as
        workers then keep no results; but they keep what a future is for as long as you hold that future.
        """
        self._wait(lambda: self._futures or self.done())
        return self._futures

    def done(self) -> bool:
        """Return whether the job has ended, well or not."""
        return self._control.is_over

    def result(self) -> list[T]:
        """Return what each rank returned, in rank order; wait for it. Tensors come back on the CPU.

        Raises the exception of the rank that failed first, with that rank's traceback; WorkerDied; SchedulerLost;
        TimeoutError; CancelledError. An interrupt (Ctrl-C, or the notebook's stop button) cancels the job.
        """
        __tracebackhide__ = True  # IPython and pytest show the caller, and what the rank did
        self._wait(self.done, f"{self._function} on {_counted(self._control.size, 'rank')}")
        if (error := self._control.error) is not None:
            raise error.with_traceback(self._control.traceback)  # each raise adds to the error's own
        if self._results is None:
            self._results = [unpacked(rank, result) for rank, result in enumerate(self._control.results)]
        return self._results

    def rows(self, *, keep: bool = True) -> Iterator[dict[str, Any]]:
        """Yield each row of metrics as it arrives, until the job ends; then raise what it raised, if it did.

        keep: whether the job keeps the rows, for `metrics` and other calls of this.
        Where the loop's body may be interrupted, write `with job:` around it, which frees the workers then.
        """
        __tracebackhide__ = True  # as in `result`
        rows, seen = self._control.rows, 0
        while not (self.done() and seen >= len(rows)):
            self._wait(lambda: self.done() or len(rows) > seen)  # noqa: B023  it is called within the turn
            while seen < len(rows):
                self._warn()  # also where the loop's body is slower than the ranks
                yield rows[seen] if keep else rows.pop(0)
                seen += keep
        try:
            self.result()
        except StopIteration as error:  # which Python would take for this generator's own
            raise JobError(f"A rank raised {error!r}, as next() does at the end of an iterator.") from error

    def metrics(self) -> "pd.DataFrame":
        """Return the rows of metrics that have arrived so far: rank, attempt, time, and what the ranks logged.

        Needs pandas.
        """
        import pandas as pd

        return pd.DataFrame(list(self._control.rows))

    def stacks(self) -> str:
        """Return where each rank at work stands, as text: its Python stack, from the function's first line on.

        Ranks with the same stack stand together, and the odd one first.
        """
        return stacks(self._client.sync(self._control.looks)[0])

    def explain(self) -> str:
        """Return who waits for whom, and the stacks: for a job that seems to hang.

        It says which ranks wait in which collective, and which have not called it; which ranks call different ones; and
        which process is stopped or does not let Python run. PyTorch's flight recorder knows the collectives of gloo and
        NCCL, but no monitored_barrier, and nothing of Horovod; who waits in gloo's send or recv is seen in its stack. A
        rank in `work.wait()` of an asynchronous call has no frame there, so it is said to have called it. A worker that
        does not answer costs five seconds.
        """
        return explain(*self._client.sync(self._control.looks))

    def signal_scripts(self, number: int) -> bool:
        """Pass a signal on to the scripts, which may save and end; return whether there was any.

        The job then has shutdown_timeout to end, and starts no more.
        """
        control, name = self._control, signal.Signals(number).name
        control.is_last = True
        patience_s = control.limits.shutdown_timeout
        late = JobError(f"Scripts had not ended {patience_s:g} s after {name} (shutdown_timeout), and were killed.")
        control.loop.call_soon_threadsafe(control.loop.call_later, patience_s, control.stop, late)
        return bool(control.attempt) and self._client.sync(control.cluster.stop_scripts, control.attempt, number)

    def cancel(self) -> None:
        """End the job, if it runs, and free its workers.

        Those whose ranks are still at work are restarted; one without a nanny cannot be, and stays busy.
        """
        with suppress(RuntimeError):  # the client is closed and its loop has ended, and so has the job
            self._control.loop.call_soon_threadsafe(self._control.stop, CancelledError(f"{self.name} was cancelled."))
        self._until(self.done)

    def _wait(self, condition: Callable[[], object], what: str = "") -> None:
        """Wait until the condition holds; an interrupt cancels the job. what: shown from the third second on."""
        try:
            self._until(condition, what)
        except BaseException:  # Ctrl-C raises KeyboardInterrupt, and SystemExit once dask_jobqueue is imported
            self.cancel()
            raise

    def _until(self, condition: Callable[[], object], what: str = "") -> None:
        with _line(what) as line:
            reached = False
            while not reached:
                reached = self._reach(condition)
                self._warn()
                if rows := len(self._control.rows):
                    line.set_postfix_str(_counted(rows, "row") + " of metrics", refresh=False)
                line.update(0)

    def _warn(self) -> None:
        while self._control.warnings:
            _warn(self._control.warnings.pop(0))

    def _reach(self, condition: Callable[[], object]) -> bool:
        """Return whether the condition holds, after LOOK_S at the latest."""
        if condition():
            return True
        reached = asyncio.run_coroutine_threadsafe(self._control.until(condition), self._control.loop)
        try:
            reached.result(LOOK_S)
        except TimeoutError:
            reached.cancel()
        except CancelledError:  # the client was closed, and its loop ends
            pass
        return bool(condition())

    @property
    def _futures(self) -> list[Future]:
        return self._control.attempt.futures if self._control.attempt else []


def _warn(text: str) -> None:
    try:
        warn(text)
    except Warning:  # under -W error, which must not cancel the job
        print(text, file=sys.stderr)


def _line(what: str) -> tqdm:
    """Return a line that shows what is waited for, from the third second on; none where there is nothing to say."""
    settings: dict[str, Any] = {} if what else {"disable": True}  # given False, TQDM_DISABLE has no effect
    return tqdm(desc=what, bar_format="{desc} [{elapsed}{postfix}]", delay=SHOWN_AFTER_S, file=screen(), **settings)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
