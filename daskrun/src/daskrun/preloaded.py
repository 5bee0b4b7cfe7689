"""What the process imports that local workers are forked from: see `local`.

Nothing else may import this, as it has the process ignore signals.
"""

# ruff: noqa: E402
import atexit
import gc
import os
import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing import util

gc.disable()  # nothing of what is imported is garbage, and to look for some takes a tenth of the time
sys.path[:] = filter(None, sys.path)  # without the working directory, whose files could be taken for libraries
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter's stop button signals the kernel's children, too
# Slurm signals all processes of a job. Without this one, nannies would take their workers for dead.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes signals its foreground group
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

import distributed.nanny  # noqa: F401
import numpy as np

from daskrun.local import ALSO

for also in filter(None, os.environ.pop(ALSO, "").split(",")):
    try:
        import_module(also)
    except (Exception, SystemExit):  # would end the server, and who asks it for a process would wait for ever
        traceback.print_exc()

gc.freeze()  # what is imported stays, so that workers need not look for garbage in it
atexit.register(gc.unfreeze)  # else C++ libraries would print what is left at the server's end
SERVER = os.getpid()


def _begin(server: int) -> None:
    if os.getppid() != server:  # a worker's own forks come here too
        return
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    np.random.seed()  # else all children would draw the same numbers; Python sees to its own
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with suppress(OSError):  # the folder's own
                os.set_inheritable(number, False)  # else a program that a task starts keeps the server alive
    # The child of a fork server ends without what `atexit` has.
    util.Finalize(None, atexit._run_exitfuncs, exitpriority=-1000)


util.register_after_fork(sys.modules[__name__], lambda here: _begin(here.SERVER))
