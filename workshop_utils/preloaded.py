"""What the process has imported that local workers are forked from: see `forking`.

Nothing else may import this, as it has the process ignore signals.
"""

# ruff: noqa: E402
import os
import signal
import sys

sys.path[:] = filter(None, sys.path)  # without the working directory, whose files could be taken for libraries
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter's stop button signals the kernel's children, too
# Slurm signals all processes of a job. Without this one, nannies would take their workers for dead.
signal.signal(signal.SIGTERM, signal.SIG_IGN)

import distributed.nanny  # noqa: F401
import numpy as np
import torch

import workshop_utils.inference
import workshop_utils.training  # noqa: F401

SERVER = os.getpid()


def _begin() -> None:
    if os.getppid() == SERVER:  # later, a worker's own forks come here too
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        np.random.seed()  # else all workers would draw the same numbers; Python sees to its own
        torch.seed()


os.register_at_fork(after_in_child=_begin)
