"""How a job can fail, other than by its own function's exception."""


class JobError(RuntimeError):
    """A job cannot start, or ended otherwise than by its own function; the message says why and what to do."""


class WorkersBusy(JobError):
    """The workers that a job needs are at work on something else, which the message names."""


class WorkerDied(JobError):
    """The process of a rank is gone: killed, out of memory, or its machine was lost."""


class SchedulerLost(JobError):
    """The connection to the scheduler is gone, and with it the job."""


class Stopped(JobError):
    """This rank ended because another one failed first."""
