"""How a job can fail, other than by its own function's exception."""

from collections.abc import Iterable


class JobError(RuntimeError):
    """A job cannot start, or ended otherwise than by its own function; the message says why and what to do."""


class WorkersBusy(JobError):
    """The workers that a job needs are not free: at work, paused, or taken by another job. The message names them."""


class WorkerDied(JobError):
    """The process of a rank is gone: killed, out of memory, or its machine was lost."""


class SchedulerLost(JobError):
    """The connection to the scheduler is gone, and with it the job."""


class Stopped(JobError):
    """This rank ended because another one failed first."""


def listed(values: Iterable[object]) -> str:
    """Return values as a message lists them.

    >>> listed([0, 2])
    '0, 2'
    """
    return ", ".join(map(str, values))
