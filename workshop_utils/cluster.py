"""Start or join a Dask cluster whose workers suit PyTorch."""

import builtins
import importlib.util
import json
import os
import platform
import warnings
from collections import Counter
from contextlib import suppress
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import dask
import pandas as pd
from dask.system import CPU_COUNT
from distributed import Client
from distributed.comm import get_address_host
from distributed.core import Status
from distributed.versions import VersionMismatchWarning
from tornado.web import RequestHandler

from daskrun import ClusterError, dashboard, reach, start_local, worker_environment
from daskrun.errors import check_client
from daskrun.settings import given_threads, n_gpus
from workshop_utils.object_store import spare_loopback_the_proxy
from workshop_utils.progress import waiting
from workshop_utils.sources import source_versions

DASHBOARD_PORT = 8787  # where people look for it; where it is taken, Dask chooses any
PANES = "WORKSHOP_PANES"  # names the file in which `workshop lab` reads which cluster its panes show
ID_PAGE = "workshop/scheduler-id"  # where the panes ask a scheduler whether it still is the one in that file
VENDOR_TIMEOUT_S = 600  # a vendor's machines may have to start first
# Other versions of these on client and workers would fail late and far away, so they are refused at once.
SAME_ON_SCHEDULER = ("python", "dask", "distributed", "cloudpickle", "daskrun", "workshop-dask-pytorch")
SAME_ON_WORKERS = (*SAME_ON_SCHEDULER, "numpy", "pandas", "torch", "torchvision")
ANSWER_S = 30  # time limit for the versions of all workers
_started: list = []  # clients of the local clusters that start_cluster started in this notebook


def start_cluster(
    n_workers: int | None = None,
    *,
    threads_per_worker: int = 1,
    memory_limit: str | int | float | None = "auto",
    address: str | None = None,
    timeout_s: float = 15,
    wait_for_workers: float = 60,
) -> Client:
    """Return a `Client` of the first cluster that applies.

    In order: `address`; Dask's own setting `scheduler-address` (`DASK_SCHEDULER_ADDRESS`); a vendor's cluster where its
    environment variables say so; one worker per GPU; else one local process per core, up to four, which share the
    cores. A local cluster listens on loopback only. Its dashboard has port 8787, or any if that is taken.

    A notebook has one local cluster at a time: starting another closes the one before, and a line says so. The panes of
    `workshop lab` show the cluster of the last call.

    Local workers are those of `daskrun.start_local`.

    n_workers: how many workers to start; None for the default above. Ignored where a running cluster is joined.
    threads_per_worker: tasks that one local worker runs at a time.
    memory_limit: of one local worker, as `LocalCluster` takes it: such as "2 GiB", bytes, or "auto" for a share of this
    machine's. Dask ends a worker whose process comes to 95 % of it, and starts it again. Ignored as n_workers is.
    timeout_s: seconds to wait for a running scheduler. wait_for_workers: seconds to wait for its first worker, which an
    adaptive cluster or a batch system may be about to start.
    Raises ClusterError where no scheduler answers, no worker comes, this machine has fewer GPUs than n_workers, the
    versions of the scheduler or of a worker, or the source files of our packages there, differ from this process's, or
    a script calls it while it is imported.
    Warns of joined workers that do not suit PyTorch, with the lines of `worker_environment`.
    """
    if joined := address or dask.config.get("scheduler-address", None):
        is_set = not address and joined == os.environ.get("DASK_SCHEDULER_ADDRESS")
        otherwise = "; or unset DASK_SCHEDULER_ADDRESS to start a cluster on this machine" if is_set else ""
        client = _join(joined, timeout_s, wait_for_workers, otherwise)
        _warn_of_unfit_workers(client)
    elif importlib.util.find_spec("dask_saturn") and "SATURN_BASE_URL" in os.environ:
        from dask_saturn import SaturnCluster

        client = Client(SaturnCluster(**({} if n_workers is None else {"n_workers": n_workers})))
        client.wait_for_workers(1, timeout=VENDOR_TIMEOUT_S)
        _refuse_other_versions(client)
    else:
        client = _start_local(n_workers, threads_per_worker, memory_limit)
    _show_in_panes(client)
    return client


def describe_workers(client: Client) -> pd.DataFrame:
    """Return one row per worker: name, host, pid, threads, torch_threads, memory_gib, device, python, torch.

    device: "cpu", or the GPU's name. torch_threads: cores that one PyTorch operation may use. A worker that is just
    being restarted is left out.
    """
    check_client(client)
    about, rows = client.run(_describe_this_worker, on_error="return"), []
    for address, info in known_workers(client).items():
        memory_gib = round((info["memory_limit"] or float("nan")) / 2**30, 1)  # NaN: no limit
        known = {"worker": str(info["name"]), "host": info["host"], "threads": info["nthreads"]}
        answer = about.get(address, OSError())
        if isinstance(answer, OSError):  # such as distributed's CommClosedError
            continue
        if isinstance(answer, Exception):
            raise answer
        rows.append(known | {"memory_gib": memory_gib} | answer)
    columns = ["worker", "host", "pid", "threads", "torch_threads", "memory_gib", "device", "python", "torch"]
    return pd.DataFrame(rows, columns=columns).sort_values("worker", ignore_index=True)


def _join(address: str, timeout_s: float, wait_for_workers: float, otherwise: str) -> Client:
    """Return a client of the running cluster whose scheduler is at `address`.

    timeout_s: seconds to wait for the scheduler. wait_for_workers: seconds to wait for its first worker.
    otherwise: as in `reach`.
    Raises ClusterError where no scheduler answers, no worker comes, or their versions differ from this process's.
    """
    reach(address, timeout_s, otherwise)
    with warnings.catch_warnings(action="ignore", category=VersionMismatchWarning):  # refused below, with the cure
        client = Client(address, timeout=timeout_s)
    _refuse_other_versions(client)
    if not client.nthreads():
        _await_worker(client, wait_for_workers)
        _refuse_other_versions(client)
    client.run_on_scheduler(dashboard.show)  # before the first job, for JupyterLab's pane
    return client


def _await_worker(client, timeout_s):
    print(f"{client.scheduler.address} has no workers yet; waiting for one, up to {timeout_s} s.")
    work = client.submit(int, pure=False)  # an adaptive cluster starts a worker only for a task
    try:
        with waiting("waiting for a worker"):
            client.wait_for_workers(1, timeout=timeout_s)
    except TimeoutError as error:
        raise ClusterError(
            f"The cluster at {client.scheduler.address!r} has no workers, and none came within "
            f"{timeout_s} s. Start one with: workshop join {client.scheduler.address}"
        ) from error
    finally:
        work.cancel()
        if not client.nthreads():
            client.close()


def _refuse_other_versions(client: Client) -> None:
    """Close the client and raise ClusterError if its scheduler or a worker has other versions than this process."""
    check_client(client)
    known = list(client.nthreads())
    # This sends no code: a function pickled by one version of Python can crash the interpreter of another.
    packages = [name for name in SAME_ON_WORKERS if name != "python"]
    try:
        answers: Any = client.sync(client.get_versions, packages=packages, callback_timeout=ANSWER_S)
    except TimeoutError as error:
        client.close()
        raise ClusterError(
            f"A worker of the cluster has not answered within {ANSWER_S} s; the scheduler knows {sorted(known)}. End "
            "the process that hangs, or start the cluster again."
        ) from error
    theirs = {("the scheduler", name): _version(answers["scheduler"], name) for name in SAME_ON_SCHEDULER}
    for worker, answer in answers["workers"].items():
        theirs |= {(worker, name): _version(answer, name) for name in SAME_ON_WORKERS}
    mine = {name: _version(answers["client"], name) for name in SAME_ON_WORKERS}
    others = [
        f"  {who}: {name} {version}, here {mine[name]}"
        for (who, name), version in theirs.items()
        if version != mine[name]
    ] or _other_sources(client)
    if others:
        client.close()
        raise ClusterError(
            "The cluster's versions differ from this process's:\n"
            + "\n".join(others)
            + "\nInstall this machine's checkout, or one of the same commit, on the others. There, in its folder and "
            "with the same Python: pip install -r requirements.txt && pip install --no-deps . ./daskrun\n"
            "Then start the scheduler and the workers again."
        )


def _other_sources(client):
    """Return a line for each process whose Python files of our packages differ from this one's."""
    mine, answers = source_versions(), client.run(source_versions, on_error="return")
    try:
        answers["the scheduler"] = client.run_on_scheduler(source_versions)
    except (ImportError, AttributeError) as error:
        answers["the scheduler"] = error
    lines = []
    for who, theirs in answers.items():
        if isinstance(theirs, OSError):  # it has ended in the meantime
            continue
        if isinstance(theirs, Exception):  # it has no such function
            theirs = {"workshop-dask-pytorch": f"of an older checkout ({theirs})"}
        lines += [f"  {who}: {name} {theirs[name]}, here {mine[name]}" for name in theirs if theirs[name] != mine[name]]
    return lines


def _version(answer, name):
    # Python 3.11.2 and 3.11.9 may meet, and so may torch 2.15.0+cpu and 2.15.0+cu130.
    version = answer["packages"].get(name) or "missing"
    return ".".join(version.split(".")[:2]) if name == "python" else version.split("+")[0]


def _start_local(n_workers, threads_per_worker, memory_limit):
    spare_loopback_the_proxy()
    _close_earlier()
    with waiting("starting a worker" if n_workers == 1 else "starting workers"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"Port {DASHBOARD_PORT} is already in use")
        client = start_local(
            n_workers,
            threads_per_worker=threads_per_worker,
            memory_limit=memory_limit,
            dashboard_port=DASHBOARD_PORT,
            preload=["torchvision"],
            worker_preload=["torch", "workshop_utils.classify"],
        )
    if hasattr(builtins, "__IPYTHON__"):  # a program may want two clusters side by side
        _started.append(client)
    return client


def _show_in_panes(client):
    if file := os.environ.get(PANES):
        scheduler = client.scheduler_info()
        port = scheduler["services"].get("dashboard", 0)  # 0: it has none
        client.run_on_scheduler(_serve_id)
        with suppress(OSError):  # that lab has been stopped
            Path(file).write_text(json.dumps([get_address_host(client.scheduler.address), port, scheduler["id"]]))


def _serve_id(dask_scheduler):
    """Have a scheduler's HTTP server say who it is.

    Dask's own pages say so, too, but each that it makes from a template empties Python's cache of source lines: in a
    kernel with a local cluster, tracebacks would have no code any more, and functions no source.
    """

    class Id(RequestHandler):
        def get(self):
            self.write(dask_scheduler.id)

    dask_scheduler.http_application.add_handlers(".*$", [(f"/{ID_PAGE}", Id)])


def _close_earlier():
    while _started:
        earlier = _started.pop()
        if earlier.cluster.status == Status.running:
            earlier.shutdown() if earlier.status == "running" else earlier.cluster.close()
            print("The cluster that this notebook started before is closed.")


def known_workers(client: Client) -> dict[str, dict]:
    """Return what the scheduler knows of each worker, by address.

    `Client.scheduler_info` may answer without any worker: a periodic call, which asks for none, overwrites its answer.
    """
    check_client(client)
    return client.sync(client.scheduler.identity, n_workers=-1)["workers"]  # type: ignore[union-attr]


def unfit_for_pytorch(client: Client) -> tuple[list[str], int]:
    """Return (what is wrong with how a cluster's workers were started, cores that one of them could use)."""
    found = client.run(_how_started, on_error="ignore")
    workers_on = Counter(get_address_host(worker) for worker in found)
    wrong, cores = set(), 1
    for worker, (trim, daemonic, threads, all_cores) in found.items():
        share = max(1, all_cores // workers_on[get_address_host(worker)])
        cores = max(cores, share)
        if trim:
            wrong.add(f"MALLOC_TRIM_THRESHOLD_ is {trim}, which makes training slower")
        if daemonic:
            wrong.add("they are daemonic, so that a DataLoader can have no children")
        if trim and threads < share:  # without Dask's trim, somebody chose the threads, for workers still to come
            wrong.add(f"PyTorch uses {threads} of the {share} cores that each could have")
    return sorted(wrong), cores


def _how_started():
    trim = os.environ.get("MALLOC_TRIM_THRESHOLD_")
    return trim, current_process().daemon, given_threads() or CPU_COUNT, CPU_COUNT


def _warn_of_unfit_workers(client):
    wrong, cores = unfit_for_pytorch(client)
    if wrong:
        warnings.warn(
            f"Workers do not suit PyTorch: {'; '.join(wrong)}. Start them after these lines:\n"
            f"{worker_environment(cores)}",
            stacklevel=3,
        )


def _describe_this_worker():
    import torch

    return {
        "pid": os.getpid(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0) if n_gpus() else "cpu",
        "python": platform.python_version(),
    }
