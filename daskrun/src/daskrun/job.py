"""A job on the client: what its user sees of it, and the ways in which it is left."""

import builtins
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any

import pandas as pd
from distributed import CancelledError, Client, Future
from tqdm import tqdm

from daskrun.carry_out import Shell, Task
from daskrun.decide import Decisions, Limits
from daskrun.errors import WorkerDied, check_client
from daskrun.explain import explain, stacks
from daskrun.travel import pickled, unpacked

LOOK_S = 1.0  # between two looks whether the client was closed, and two updates of the line that shows the wait
SHOWN_AFTER_S = 2.0


class Job:
    """Ranks 0 to n - 1 of one function, each on a worker process of its own.

    As a context manager, it frees the workers however the block is left: by its end, by an exception, or by Ctrl-C and
    the notebook's stop button.
    """

    def __init__(
        self,
        client: Client,
        bootstrap: Callable,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        limits: Limits,
    ) -> None:
        """Start `fn(*args, **kwargs)`.

        bootstrap: called on each rank as (run, store, mine), it returns what run() returns; `store` is a
        `torch.distributed.TCPStore` that all ranks of this attempt share, served by rank 0's worker, and `mine` a
        `rank.Assignment`. What is raised is as in `daskrun.launch`.
        """
        check_client(client)
        self._function = getattr(fn, "__name__", "function")
        self.name = f"{self._function}-{uuid.uuid4().hex}"
        call = pickled(fn, args, kwargs)
        self._state = Decisions(limits)
        self._shell = Shell(client, self._state, Task(self.name, bootstrap, call, limits))
        self._client = client
        self._results: list[Any] | None = None
        self._traceback: Any = None
        try:
            # Until the ranks are submitted: what is submitted to Dask after `launch` comes after them.
            self._wait(lambda: self._shell.ranks or self._state.over, "choosing the workers")
        except BaseException:
            self.cancel()
            raise
        if self._state.error is not None and not self._state.workers:
            raise self._state.error

    def __repr__(self) -> str:
        phase = self._state.phase.value if self._state.error is None else f"failed: {self._state.error!r}"
        return f"<Job {self._function}, {_counted(self._state.size, 'rank')}, {phase}>"

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    @property
    def workers(self) -> list[str]:
        """The workers' addresses, in rank order; none while a dead one's successor is awaited."""
        return list(self._state.workers)

    @property
    def failures(self) -> list[WorkerDied]:
        """The deaths that the job survived."""
        return self._state.failures

    @property
    def futures(self) -> list[Future]:
        """One future per rank of this attempt, in rank order, once they are submitted; none if that was not reached.

        They tell when a rank is done or has failed; what it returned is in `result`. After a death, the next attempt
        has others. After a failure, all but those with an error are cancelled. After a success there are none, as
        workers then keep no results; but they keep what a future is for as long as you hold that future.
        """
        self._wait(lambda: self._shell.ranks or self._state.over)
        return self._shell.ranks

    def done(self) -> bool:
        """Return whether the job has ended, well or not."""
        return self._state.over

    def result(self) -> list[Any]:
        """Return what each rank returned, in rank order; wait for it. Tensors come back on the CPU.

        Raises the exception of the rank that failed first, with that rank's traceback; WorkerDied; SchedulerLost;
        TimeoutError; CancelledError. An interrupt (Ctrl-C, or the notebook's stop button) cancels the job.
        """
        self._wait(lambda: self._state.over, f"{self._function} on {_counted(self._state.size, 'rank')}")
        if (error := self._state.error) is not None:
            raise error.with_traceback(self._remote_traceback())
        if self._results is None:
            self._results = [unpacked(rank, result) for rank, result in enumerate(self._shell.packed)]
        return self._results

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each row of metrics as it arrives, until the job ends; then raise what it raised, if it did.

        Where the loop's body may be interrupted, write `with job:` around it, which frees the workers then.
        """
        rows, seen = self._shell.rows, 0
        while not (self._state.over and seen == len(rows)):
            self._wait(lambda: self._state.over or len(rows) > seen)  # noqa: B023  it is called within the turn
            new = rows[seen:]
            seen += len(new)
            yield from new
        self.result()

    def metrics(self) -> pd.DataFrame:
        """Return the rows of metrics that have arrived so far: rank, attempt, time, and what the ranks logged."""
        return pd.DataFrame(list(self._shell.rows))

    def stacks(self) -> str:
        """Return where each rank at work stands, as text: its Python stack, from the function's first line on.

        Ranks with the same stack stand together, and the odd one first.
        """
        return stacks(self._client.sync(self._shell.looks)[0])

    def explain(self) -> str:
        """Return who waits for whom, and the stacks: for a job that seems to hang.

        It says which ranks wait in which collective, and which have not called it; which ranks call different ones; and
        which process is stopped or does not let Python run. PyTorch's flight recorder knows the collectives of gloo and
        NCCL, but no monitored_barrier, and nothing of Horovod; who waits in gloo's send or recv is seen in its stack. A
        rank in `work.wait()` of an asynchronous call has no frame there, so it is said to have called it. A worker that
        does not answer costs five seconds.
        """
        return explain(*self._client.sync(self._shell.looks))

    def cancel(self) -> None:
        """End the job, if it runs, and free its workers.

        Those whose ranks are still at work are restarted; one without a nanny cannot be, and stays busy.
        """
        self._shell.stop(CancelledError(f"{self.name} was cancelled."))
        self._until(lambda: self._state.over)

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
                reached = self._shell.wait(condition, LOOK_S)
                while self._shell.warnings:
                    _warn(self._shell.warnings.pop(0))
                if self._shell.rows:
                    line.set_postfix_str(_counted(len(self._shell.rows), "row") + " of metrics", refresh=False)
                line.update(0)

    def _remote_traceback(self) -> Any:
        """Return the traceback that the error came with: each raise adds to the error's own."""
        if self._traceback is None and self._state.error is not None:
            self._traceback = self._state.error.__traceback__
        return self._traceback


def _warn(text: str) -> None:
    try:
        warnings.warn(text, stacklevel=6)
    except Warning:  # under -W error, which must not cancel the job
        print(text, file=sys.stderr)


def _line(what: str) -> tqdm:
    """Return a line that shows what is waited for, from the third second on; none where there is nothing to say."""
    in_notebook = hasattr(builtins, "__IPYTHON__")  # where stderr has the colour of an error
    screen = sys.stdout if in_notebook else sys.stderr  # None in a program that was started without one
    settings: dict[str, Any] = {} if what and screen else {"disable": True}  # given False, TQDM_DISABLE has no effect
    return tqdm(desc=what, bar_format="{desc} [{elapsed}{postfix}]", delay=SHOWN_AFTER_S, file=screen, **settings)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def limits(
    n_workers: int | tuple[int, int] | None,
    timeout: float | None,
    max_restarts: int,
    stall_after: float | None = None,
    **waits: Any,
) -> Limits:
    """Return the limits of a job; raise ValueError for one that cannot be. All is as in `daskrun.launch`."""
    pair = n_workers if isinstance(n_workers, tuple) else (n_workers, n_workers)
    whole = len(pair) == 2 and all(isinstance(number, Integral) and number is not True for number in pair)
    if n_workers is not None and not (whole and 1 <= pair[0] <= pair[1]):  # type: ignore[operator]
        raise ValueError(
            f"n_workers is {n_workers!r}: give a whole number of at least 1, a pair (fewest, most) of them, or None "
            "for all workers."
        )
    for name, value in (("timeout", timeout), ("stall_after", stall_after)):
        if value is not None and not (_is_seconds(value) and value > 0):
            raise ValueError(f"{name} is {value!r}: give seconds, or None for no limit.")
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts!r}: give a whole number of at least 0.")
    for name, seconds in waits.items():
        if not (_is_seconds(seconds) and seconds >= 0):
            raise ValueError(f"{name} is {seconds!r}: give seconds, 0 not to wait.")
    return Limits(*pair, timeout=timeout, max_restarts=max_restarts, stall_after=stall_after, **waits)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
