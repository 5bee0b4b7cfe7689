"""Compare notebooks with their stored outputs, by nbval.

    python tests/notebooks/compare.py [--side-by-side] [--every-cell-twice] [--on-gpu] [NN ...]

Notebooks NN, all where none is named, run on clusters that `start_cluster` starts here, one after the other or, with
--side-by-side, two at a time. With --every-cell-twice each code cell runs twice, as attendees run it.
With --on-gpu, numbers of the notebooks that use GPUs are not compared: the stored ones are a CPU's.
"""

import argparse
import os
import subprocess
import sys

from copies import copy_all, with_every_cell_twice, with_stub_checks
from lessons import DEEP_DIVES, ROOT, SOURCES, name_of

SANITIZE, SANITIZE_ON_GPU = ROOT / "tests/notebooks/sanitize.cfg", ROOT / "tests/notebooks/sanitize_on_gpu.cfg"
USE_GPUS = (
    "03",
    "04",
    "06",
    "09",
    "11",
    "find-similar-dogs",
    "saving-in-parts",
)  # the others hide them; from 06 on, so do these if there is only one
# A cell that computes in bf16 takes three minutes on one slow core that has no bf16.
NBVAL = ("--nbval", "--nbval-current-env", "--nbval-cell-timeout=290")
SIDE_BY_SIDE = ("-n=2", "--dist=loadscope")  # each notebook in one process, as its cells need its kernel
QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait would keep another notebook's from working
    "TQDM_DISABLE": "1",  # a bar appears where something takes long, and the copies have none
    # On stderr in some containers, and no fault of a notebook: which cores are near the GPU is hidden from dask-cuda,
    # or PyTorch finds NVML's bindings in a package of an older name.
    "PYTHONWARNINGS": "ignore:Cannot get CPU affinity:UserWarning,ignore:The pynvml package:FutureWarning",
}


def nbval(*arguments, sanitize=SANITIZE, **how):
    """Run nbval with these notebooks and options; return its CompletedProcess.

    sanitize: the file that says what is blurred. how: more of `subprocess.run`.
    """
    options = [*NBVAL, f"--nbval-sanitize-with={sanitize}"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, text=True, **how)


def main(named, side_by_side, twice, on_gpu):
    known = [name_of(path) for path in (*SOURCES, *DEEP_DIVES)]
    if missing := sorted(set(named) - set(known)):
        sys.exit(f"There is no notebook {', '.join(missing)}: choose among {', '.join(known)}.")
    copies = copy_all(with_every_cell_twice if twice else with_stub_checks)
    options = SIDE_BY_SIDE if side_by_side else ()
    blurred = [name for name in named or known if on_gpu and name in USE_GPUS]
    exact = [name for name in named or known if name not in blurred]
    codes = [
        nbval(*options, *[copies[name] for name in names], sanitize=sanitize).returncode
        for names, sanitize in ((exact, SANITIZE), (blurred, SANITIZE_ON_GPU))
        if names
    ]
    sys.exit(any(codes))  # a code may be negative: a signal's


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--side-by-side", action="store_true")
    parser.add_argument("--every-cell-twice", action="store_true")
    parser.add_argument("--on-gpu", action="store_true")
    parser.add_argument("named", nargs="*", metavar="NN")
    arguments = parser.parse_args()
    main(arguments.named, arguments.side_by_side, arguments.every_cell_twice, arguments.on_gpu)
