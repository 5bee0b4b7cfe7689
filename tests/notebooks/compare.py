"""Compare notebooks with their stored outputs, by nbval, and say on which cluster.

    python tests/notebooks/compare.py [--each-on-one-core | --every-cell-twice] [NN ...]

Notebooks NN, all where none is named, run one after the other on the cluster that `start_cluster` starts here. With
--each-on-one-core each runs on one core of its own, as many at a time as there are cores; where there is a GPU, or a
system that keeps no process on a core, they run on that cluster all the same. With --every-cell-twice each code cell
runs twice, as attendees run it.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import dask
from copies import copy_all, with_every_cell_twice, with_stub_checks
from lessons import NUMBERED, RENDERED, ROOT

from workshop_utils.cluster import describe_workers, n_gpus, start_cluster

SANITIZE = ROOT / "tests/notebooks/sanitize.cfg"
# A cell that computes in bf16 takes three minutes on one slow core that has no bf16.
NBVAL = ("--nbval", "--nbval-current-env", f"--nbval-sanitize-with={SANITIZE}", "--nbval-cell-timeout=290")
LONGEST = ("06", "09", "10", "05", "04")  # begin first, so that no core waits for them at the end
QUIET = {
    "DASK_WORKSHOP__DASHBOARD_PORT": "0",  # any: 8787 may belong to another notebook, and each would say so
    "TQDM_DISABLE": "1",  # a bar appears where something takes long, and the copies have none
    # On stderr in some containers, and no fault of a notebook: which cores are near the GPU is hidden from dask-cuda,
    # or PyTorch finds NVML's bindings in a package of an older name.
    "PYTHONWARNINGS": "ignore:Cannot get CPU affinity:UserWarning,ignore:The pynvml package:FutureWarning",
}


def nbval(*copies, **how):
    """Run nbval on the notebooks; return its CompletedProcess. how: more arguments of `subprocess.run`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *NBVAL, *map(str, copies)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, text=True, **how)


def each_on_one_core(copies, cores):
    """Run each notebook on one of the cores, one at a time on each; return whether all of them passed."""
    free = SimpleQueue()
    for core in cores:
        free.put(core)

    def passes(copy):
        start = time.monotonic()
        done = nbval(copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        verdict = "differs" if done.returncode else "passed"
        print(f"{copy.stem}, on one core: {verdict} after {time.monotonic() - start:.0f} s", flush=True)
        if done.returncode:
            print(done.stdout, flush=True)
        return not done.returncode

    def stay_on_a_core():
        os.sched_setaffinity(0, {free.get()})  # this thread, and all processes that it starts

    with ThreadPoolExecutor(len(cores), initializer=stay_on_a_core) as pool:
        return all(list(pool.map(passes, copies)))


def cluster():
    """Say what start_cluster starts here."""
    with dask.config.set({"workshop.dashboard-port": 0}), start_cluster() as client, client.cluster:
        workers = describe_workers(client)
        if set(workers.device) == {"cpu"}:
            return f"{len(workers)} local processes on {workers.torch_threads.sum()} cores"
        return f"{type(client.cluster).__name__} with {', '.join(workers.device)}"


def longest_first(names):
    return sorted(names, key=lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST))


def main(named, on_one_core, twice):
    known = [path.stem[:2] for path in sorted(RENDERED.glob(NUMBERED))]
    if missing := sorted(set(named) - set(known)):
        sys.exit(f"There is no notebook {', '.join(missing)}: choose among {', '.join(known)}.")
    names = named or known
    copies = copy_all(with_every_cell_twice if twice else with_stub_checks)
    if on_one_core and hasattr(os, "sched_setaffinity") and not n_gpus():
        passed = each_on_one_core([copies[name] for name in longest_first(names)], os.sched_getaffinity(0))
        where = "one core each"
    else:
        passed = not nbval(*[copies[name] for name in names]).returncode
        where = cluster()
    print("Compared on", where + (", every cell twice:" if twice else ":"), *names)
    sys.exit(not passed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--each-on-one-core", action="store_true")
    how.add_argument("--every-cell-twice", action="store_true")
    parser.add_argument("named", nargs="*", metavar="NN")
    arguments = parser.parse_args()
    main(arguments.named, arguments.each_on_one_core, arguments.every_cell_twice)
