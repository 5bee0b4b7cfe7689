"""What the process imports that local workers are forked from: see `local`.

Nothing else may import this, as it has the process ignore signals.
"""

# ruff: noqa: E402
import os
import signal
import traceback
from importlib import import_module

# Jupyter's stop button, Slurm and a terminal that closes signal all processes of a group; without this one, nannies
# would take their workers for dead.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)

import distributed.nanny  # noqa: F401

from daskrun.local import ALSO

for also in filter(None, os.environ.pop(ALSO, "").split(",")):
    try:
        import_module(also)
    except (Exception, SystemExit):  # would end the server, and who asks it for a process would wait for ever
        traceback.print_exc()
