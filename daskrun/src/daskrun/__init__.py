"""One function on several workers at once, as the ranks of one job: choose workers, watch, restart, set them free.

The invariant: a worker belongs to a job from the moment it is chosen until its rank is over and it is idle again or
replaced, and it changes hands only in one step of the scheduler's event loop, which nothing interrupts (see
`on_scheduler`). No question to Dask, and no wait, is inside such a step. One exception: a worker without a nanny cannot
be replaced, so a job that ends early gives it up at work; the next launch asks it, and finds it busy.

`supervise` is what the user holds. `decide` says what the job does next; `carry_out` does it, with `choose` to get
workers. `call` looks at the function first. `rank` runs on the workers, `owners` on the scheduler.
"""

from daskrun.call import check_call
from daskrun.errors import JobError, SchedulerLost, Stopped, WorkerDied, WorkersBusy
from daskrun.job import Job, limits

__all__ = ["Job", "JobError", "SchedulerLost", "Stopped", "WorkerDied", "WorkersBusy", "check_call", "limits"]
