"""One function on several workers at once, as the ranks of one job: choose workers, watch, restart, set them free."""

from workshop_utils.job.errors import JobError, SchedulerLost, Stopped, WorkerDied, WorkersBusy
from workshop_utils.job.supervise import Job

__all__ = ["Job", "JobError", "SchedulerLost", "Stopped", "WorkerDied", "WorkersBusy"]
