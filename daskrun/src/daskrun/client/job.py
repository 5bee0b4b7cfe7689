"""A job on the client: what its user sees of it, and the ways in which it is left."""

import asyncio
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distributed import CancelledError, Client
from tqdm import tqdm

from daskrun.client.attempt import Attempt
from daskrun.client.cluster import Cluster
from daskrun.client.control import Control
from daskrun.client.limits import Limits, seconds
from daskrun.client.prompt import can_ask, line_for
from daskrun.errors import Interrupted, JobError, check_client, warn
from daskrun.metrics import latest_rows
from daskrun.pickling import unpacked
from daskrun.protocol import Function, Script
from daskrun.screen import screen
from daskrun.why.verdict import explain, stacks
from daskrun.worker.output import Lines

LOOK_S = 1.0  # between two looks whether the client was closed, and two updates of the line that shows the wait
SHOWN_AFTER_S = 2.0
T = TypeVar("T")  # what a rank returns

if TYPE_CHECKING:
    import pandas as pd


class Job(Generic[T]):
    """Ranks 0 to n - 1 of one function or script, each in a process of its own on a worker of its own.

    As a context manager, it frees the workers however the block is left: by its end, by an exception, or by Ctrl-C and
    the notebook's stop button.
    """

    def __init__(
        self,
        client: Client,
        program: Function | Script,
        name: str,
        limits: Limits,
        show: Callable[[int, int, Lines], None] | None = None,
    ) -> None:
        """Start a program. What's raised is as in `launch`.

        Args:
            name: For people.
            show: Takes (rank, attempt, lines) that a rank has printed, where something waits for the job; by default
                they're printed.
        """
        check_client(client)
        self._function, self._show = name, show or _print_lines
        self.name = f"{name}-{uuid.uuid4().hex}"
        self._client = client
        self._control = Control(Cluster(client, self.name), self.name, program, limits)
        self._running = asyncio.run_coroutine_threadsafe(self._control.run(), self._control.loop)
        self._results: list[T] | None = None
        try:
            # Until the ranks are submitted: what is submitted to Dask after `launch` comes after them.
            control = self._control
            self._wait(lambda: (control.attempt and control.attempt.futures) or self.done(), "choosing the workers")
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
    def failures(self) -> list[BaseException]:
        """The deaths, and the exceptions that `retry` names, that the job survived."""
        return self._control.failures

    def done(self) -> bool:
        """Return whether the job has ended, well or not."""
        return self._control.is_over

    def result(self, timeout: float | str | None = None) -> list[T]:
        """Return what each rank returned, in rank order; wait for it. Tensors come back on the CPU.

        An interrupt (Ctrl-C, or the notebook's stop button) cancels the job.

        Args:
            timeout: How long to wait, in seconds or as a text; the job goes on after that. None for no limit.

        Raises:
            TimeoutError: If that was too short, or the job took longer than its ``time_limit``; that one says who
                waited for whom.
            WorkerDied: A JobError, which says how the process of a rank ended.
            JobError: For a backend that doesn't suit the ranks' GPUs, or GPUs on some of the ranks only.
            TypeError: For a result that can't be pickled.
            SchedulerLost: A JobError.
            CancelledError: If the job was canceled.

        A rank's own exception comes with its traceback.
        """
        __tracebackhide__ = True  # IPython and pytest show the caller, and what the rank did
        give_up = None if timeout is None else time.monotonic() + seconds("timeout", timeout)
        what = f"{self._function} on {_counted(self._control.size, 'rank')}"
        self._wait(lambda: self.done() or (give_up is not None and time.monotonic() >= give_up), what, give_up)
        if not self.done():
            raise TimeoutError(f"{self._function} is still {self._control.doing} after {timeout} (timeout of result).")
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
                self._tell()  # also where the loop's body is slower than the ranks
                yield rows[seen] if keep else rows.pop(0)
                seen += keep
        try:
            self.result()
        except StopIteration as error:  # which Python would take for this generator's own
            raise JobError(f"A rank raised {error!r}, as next() does at the end of an iterator.") from error

    def metrics(self, *, latest: bool = False, step: str = "step") -> "pd.DataFrame":
        """Return the rows of metrics that have arrived so far: rank, attempt, time, and what the ranks logged.

        Needs pandas.

        Args:
            latest: Whether to skip rows of steps that a later attempt of the same rank has repeated.
            step: The name of the number that tells which rows are of the same step, such as "epoch".
        """
        import pandas as pd

        rows = list(self._control.rows)
        return pd.DataFrame(latest_rows(rows, step) if latest else rows)

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

    def debug(self, rank: int) -> None:
        """Open the prompt of pdb where a rank has stopped: at ``breakpoint()``, or with debug="error" where it failed.

        It waits until the rank stops, and returns once that goes on. An interrupt leaves the rank where it is.

        Raises:
            JobError: If the job ends before.
        """
        control = self._control
        self._check_rank(rank)
        self._until(lambda: rank in control.prompts or self.done(), f"rank {rank} has not stopped yet")
        if self.done():
            raise JobError(f"{self.name} is over, and so is rank {rank}.")
        while rank in control.prompts:
            self._answer(rank, line_for(rank, control.prompts[rank][1]))
            self._until(lambda: rank in control.prompts or rank not in control.debugged or self.done())

    def kill(self, rank: int) -> None:
        """Kill a rank's process with SIGKILL, to see how the job gets over it; wait until all ranks have begun.

        Raises:
            JobError: If the job is over, or the rank has returned already.
        """
        self._check_rank(rank)
        attempt = self._begun()
        if attempt is None:
            raise JobError(f"{self.name} is over, and so is rank {rank}.")
        if not self._client.sync(self._control.cluster.kill, attempt, rank):
            raise JobError(f"Rank {rank} of {self.name} has ended already.")

    def _check_rank(self, rank: int) -> None:
        if rank not in range(self._control.size):
            raise ValueError(f"There are ranks 0 to {self._control.size - 1}, and no rank {rank}.")

    def _begun(self) -> Attempt | None:
        """Return the attempt whose ranks all run; wait for it. None if the job is over."""
        control = self._control
        self._until(lambda: self.done() or (control.attempt and len(control.attempt.begun) == control.attempt.size))
        return None if self.done() else control.attempt

    def _answer(self, rank: int, line: str | None) -> None:
        """Send a line to a rank's debugger; None ends it."""
        self._control.prompts.pop(rank, None)  # it's gone if the rank has ended meanwhile
        self._tell_ranks([rank], "line", line)

    def _tell_ranks(self, ranks: Sequence[int], kind: str, *about: Any) -> None:
        """Send a message to the processes of these ranks."""
        if attempt := self._begun():
            self._client.sync(self._control.cluster.tell, attempt, ranks, kind, *about)

    def _waits_in_collectives(self) -> bool:
        """Return whether a rank is in code of PyTorch that waits for other ranks."""
        return any(look.waits for look in self._client.sync(self._control.looks)[0])

    def _wait_for_replies(
        self, ranks: Sequence[int], number: int, timeout_s: float | None = None
    ) -> dict[int, bytes] | None:
        """Return what ranks answer to a request; None if the job ends before that, or the time is over."""
        there, keys = self._control.replies, {(rank, number) for rank in ranks}
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        self._until(
            lambda: there.keys() >= keys or self.done() or (give_up is not None and time.monotonic() >= give_up),
            give_up=give_up,
            opens_prompts=True,
        )
        return {rank: there.pop((rank, number)) for rank in ranks} if there.keys() >= keys else None

    def _raised(self, ranks: Sequence[int], number: int) -> list[int]:
        """Return ranks whose answer to a request is an error, as far as they have answered."""
        there = {rank: self._control.replies.get((rank, number)) for rank in ranks}
        answers = {rank: unpacked(rank, answer) for rank, answer in there.items() if answer}
        return [rank for rank, answer in answers.items() if getattr(answer, "error", None)]

    def _leave_debuggers(self) -> None:
        """Let the ranks go on whose debuggers wait, with an error."""
        for rank in list(self._control.prompts):
            self._answer(rank, None)

    def stop(self, grace: float | str = 30) -> None:
        """Send the ranks SIGTERM, which a function or a script may handle to save, and wait until the job has ended.

        Args:
            grace: How long they have, in seconds or as a text; then they're killed.
        """
        self.signal(signal.SIGTERM, grace)
        self._until(self.done, f"{self._function} is stopping")

    def signal(self, number: int, grace: float | str | None = None) -> bool:
        """Send a signal to the ranks' processes; return whether there was any. The job is over after it.

        Args:
            grace: As in `stop`; None for the job's shutdown_timeout.
        """
        control, name = self._control, signal.Signals(number).name
        control.stop_signal = number
        patience_s = control.limits.shutdown_timeout if grace is None else seconds("grace", grace)
        late = JobError(f"Ranks had not ended {patience_s:g} s after {name}, and were killed.")
        with suppress(RuntimeError):  # the client is closed, and so has the job ended
            control.loop.call_soon_threadsafe(control.loop.call_later, patience_s, control.stop, late)
            return bool(control.attempt) and self._client.sync(control.cluster.signal, control.attempt, number)
        return False

    def cancel(self) -> None:
        """End the job at once, if it runs, and free its workers."""
        with suppress(RuntimeError):  # the client is closed and its loop has ended, and so has the job
            self._control.loop.call_soon_threadsafe(self._control.stop, CancelledError(f"{self.name} was cancelled."))
        self._until(self.done)

    def _wait(self, condition: Callable[[], object], what: str = "", give_up: float | None = None) -> None:
        """Wait until the condition holds; an interrupt cancels the job.

        Args:
            what: Shown from the third second on.
            give_up: When the condition may hold without news of the job, on time.monotonic's clock.
        """
        try:
            self._until(condition, what, give_up, opens_prompts=True)
        except BaseException as error:  # Ctrl-C raises KeyboardInterrupt, and SystemExit once dask_jobqueue is imported
            self.cancel()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted from None
            raise

    def _until(
        self,
        condition: Callable[[], object],
        what: str = "",
        give_up: float | None = None,
        opens_prompts: bool = False,
    ) -> None:
        with _line(what) as line:
            reached = False
            while not reached:
                reached = self._reach(lambda: condition() or (opens_prompts and self._control.prompts), give_up)
                self._tell()
                for rank in sorted(self._control.prompts) if opens_prompts else ():
                    line.clear()
                    self.debug(rank) if can_ask() else self._answer(rank, None)
                    reached = False
                if rows := len(self._control.rows):
                    line.set_postfix_str(_counted(rows, "row") + " of metrics", refresh=False)
                line.update(0)

    def _tell(self) -> None:
        """Print what ranks have printed, and warn of what has happened."""
        control = self._control
        while control.output:
            self._show(*control.output.popleft())
        while control.warnings:
            _warn(control.warnings.pop(0))

    def _reach(self, condition: Callable[[], object], give_up: float | None) -> bool:
        """Return whether the condition holds, at news, and after LOOK_S at the latest."""
        if condition():
            return True
        control = self._control
        wait_s = LOOK_S if give_up is None else max(0.0, min(LOOK_S, give_up - time.monotonic()))
        news = asyncio.run_coroutine_threadsafe(control.until(lambda: condition() or control.output), control.loop)
        try:
            news.result(wait_s)
        except TimeoutError:
            news.cancel()
        except CancelledError:  # the client was closed, and its loop ends
            pass
        return bool(condition())


def _print_lines(rank: int, attempt: int, lines: Lines) -> None:
    for is_error, some in groupby(lines, key=itemgetter(0)):
        text = "\n".join(f"[rank{rank}]: {line.decode(errors='replace')}" for _, line in some)
        with suppress(OSError, ValueError):  # the stream is closed: the job goes on
            tqdm.write(text, file=sys.stderr if is_error else sys.stdout)


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
