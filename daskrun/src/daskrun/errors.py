"""How a job or a cluster can fail, other than by the job's own function."""

import signal
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Client

    from daskrun.child.interactive import CellError
    from daskrun.protocol import Ended

GO_ON = "To go on after a death, set max_restarts, and resume from a checkpoint."


class Interrupted(KeyboardInterrupt):
    """Waiting for ranks was interrupted."""

    def _render_traceback_(self) -> list[str]:  # IPython shows this
        return ["KeyboardInterrupt"]


class JobError(RuntimeError):
    """A job cannot start, or ended otherwise than by its own function; the message says why and what to do."""

    @property
    def summary(self) -> str:
        """The message without what a rank had printed."""
        return str(self)


class WorkersBusy(JobError):
    """The workers that a job needs are not free: at work, paused, or taken by another job. The message names them."""


class WorkerDied(JobError):
    """The process of a rank is gone: killed, out of memory, or its machine was lost.

    Attributes:
        deaths: How the process of each dead rank ended; None for one whose worker has died, too.
        output: The last lines of the last of these ranks.
    """

    def __init__(self, message: str = "", deaths: "Mapping[int, Ended | None] | None" = None, output: str = "") -> None:
        super().__init__(message, deaths, output)
        self.message, self.deaths, self.output = message, dict(deaths or {}), output

    @property
    def summary(self) -> str:
        return self.message

    def __str__(self) -> str:
        return self.message + _with(self.output)


class RankExited(JobError):
    """A rank's function called ``sys.exit``.

    Attributes:
        code: The exit code, or whatever it was called with.
    """

    def __init__(self, rank: int, code: object) -> None:
        super().__init__(rank, code)  # pickle needs both
        self.rank, self.code = rank, code

    def __str__(self) -> str:
        return f"Rank {self.rank} called sys.exit({self.code!r}): let the function return, or raise an error, instead."


class ScriptFailed(JobError):
    """A rank's script ended with an error.

    Attributes:
        code: Its exit code, or minus the signal that ended it.
        output: Its last lines.
    """

    def __init__(self, path: str, rank: int, worker: str, code: int, output: str) -> None:
        super().__init__(path, rank, worker, code, output)  # pickle needs them all
        self.path, self.rank, self.worker, self.code, self.output = path, rank, worker, code, output

    @property
    def summary(self) -> str:
        how = signal.Signals(-self.code).name if self.code < 0 else f"exit code {self.code}"
        return f"{self.path} ended with {how}."

    def __str__(self) -> str:
        return self.summary + _with(self.output)


class NoDebugger(JobError):
    """A rank stopped at ``breakpoint()``, and nobody answered its debugger.

    Attributes:
        rank: The rank.
        place: Where it stopped, such as "train.py:33".
    """

    def __init__(self, rank: int, place: str) -> None:
        super().__init__(rank, place)  # pickle needs both
        self.rank, self.place = rank, place

    def __str__(self) -> str:
        return (
            f"Rank {self.rank} stopped at {self.place}, and nobody answered its debugger: wait for the job "
            f"in a notebook or a terminal, or call job.debug({self.rank}) there."
        )


class CellFailed(JobError):
    """A cell failed on some of the ranks that ran it.

    Attributes:
        errors: The `CellError` of each of these ranks.
    """

    def __init__(self, errors: "Mapping[int, CellError]") -> None:
        super().__init__(errors)  # pickle needs it
        self.errors = dict(errors)

    def __str__(self) -> str:
        alike: dict[CellError, list[int]] = {}
        for rank, error in self.errors.items():
            alike.setdefault(error, []).append(rank)
        parts = []
        for (kind, message, line), ranks in alike.items():
            where = f" at line {line} of the cell" if line else ""
            parts.append(f"{ranks_do(ranks, 'raises', 'raise').capitalize()}{where}: {kind}: {message}")
        return "\n".join(parts)

    def _render_traceback_(self) -> list[str]:  # IPython shows this: the ranks have printed the rest
        return [str(self)]


class SchedulerLost(JobError):
    """The connection to the scheduler is gone, and with it the job."""


class ClusterError(RuntimeError):
    """A cluster could not be started or joined; the message says why and what to do."""


def check_client(client: "Client") -> None:
    """Raise TypeError for an asynchronous client and for what is none, and SchedulerLost for a closed one."""
    from distributed import Client

    if not isinstance(client, Client):
        raise TypeError(f"The client is {client!r}: make one, as by Client('tcp://HOST:8786').")
    if client.asynchronous:
        raise TypeError("The client is asynchronous, and this call waits: make one with Client(asynchronous=False).")
    if client.status not in ("running", "connecting"):
        raise SchedulerLost(f"The client is {client.status}: start or join a cluster, and use its client.")


def own_mistake(error: Exception) -> JobError:
    """Return the error of a job that the launcher could not see through."""
    wrong = JobError(f"The launcher failed, which is a mistake of its own: {error!r}.")
    return wrong.with_traceback(error.__traceback__)


def warn(text: str) -> None:
    """Warn of something at the innermost line that is not the launcher's own: the user's."""
    level, frame = 1, sys._getframe()
    while frame.f_back and Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parent):
        level, frame = level + 1, frame.f_back
    if "ipykernel_" in frame.f_code.co_filename:  # a file that is nowhere
        warnings.warn_explicit(text, UserWarning, "cell", frame.f_lineno)
    else:
        warnings.warn(text, stacklevel=level)


def _with(output: str) -> str:
    return f" Its last lines:\n\n{output}" if output else ""


def add_note(error: BaseException | None, note: str) -> None:
    """Add a note to an error that takes one."""
    if error is not None:
        with suppress(Exception):
            error.add_note(note)


def listed(values: Iterable[object]) -> str:
    """Return values as a message lists them.

    >>> listed([0, 2])
    '0, 2'
    """
    return ", ".join(map(str, values))


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks as a sentence names them.

    >>> ranks_named([1]), ranks_named([0, 1, 3])
    ('rank 1', 'ranks 0, 1 and 3')
    """
    *others, last = ranks
    return f"ranks {listed(others)} and {last}" if others else f"rank {last}"


def ranks_do(ranks: Sequence[int], one: str, many: str) -> str:
    """Return the ranks and a verb in the form that suits.

    >>> ranks_do([0, 2], "waits", "wait")
    'ranks 0 and 2 wait'
    """
    return f"{ranks_named(ranks)} {one if len(ranks) == 1 else many}"
