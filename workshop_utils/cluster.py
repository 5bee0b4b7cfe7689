"""Start or join a Dask cluster whose workers suit PyTorch."""

import builtins
import importlib.util
import logging
import os
import platform
import shlex
import signal
import socket
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import current_process, set_start_method
from threading import Lock

import dask
import pandas as pd
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster
from distributed.comm import get_address_host
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin

from daskrun import children
from daskrun.by_value import send_by_value
from daskrun.forking import METHOD, ForkingNanny, start_method
from daskrun.errors import check_client
from workshop_utils.joining import ClusterError, join, refuse_other_versions
from workshop_utils.object_store import LOOPBACK, spare_loopback_the_proxy
from workshop_utils.progress import waiting

DASHBOARD_PORT = 8787
VENDOR_TIMEOUT_S = 600  # a vendor's machines may have to start first
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # PyTorch uses the smallest of them
_starting = Lock()
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
    cores. A local cluster listens on loopback only. Its dashboard has the port of Dask's setting
    `workshop.dashboard-port` (`DASK_WORKSHOP__DASHBOARD_PORT`), 8787 unless set, and any free port for 0. A notebook
    has one local cluster at a time: starting another closes the one before, and a line says so.

    On Linux without a GPU, local workers are forked from a process that has imported PyTorch, so that one that died is
    back in a second (in six where the environment variables of this process have changed). With Dask's setting
    `workshop.fork-workers` (`DASK_WORKSHOP__FORK_WORKERS`) False, each starts Python anew, as Dask has it.

    n_workers: how many workers to start; None for the default above. Ignored where a running cluster is joined.
    threads_per_worker: tasks that one local worker runs at a time.
    memory_limit: of one local worker, as `LocalCluster` takes it: such as "2 GiB", bytes, or "auto" for a share of this
    machine's. Dask ends a worker whose process comes to 95 % of it, and starts it again. Ignored as n_workers is.
    timeout_s: seconds to wait for a running scheduler. wait_for_workers: seconds to wait for its first worker, which an
    adaptive cluster or a batch system may be about to start.
    Raises ClusterError where no scheduler answers, no worker comes, this machine has fewer GPUs than n_workers, the
    versions of the scheduler or of a worker differ from this process's, or a script calls it while it is imported.
    Warns of joined workers that do not suit PyTorch, with the lines of `worker_environment`.
    """
    for name, value in (("n_workers", n_workers), ("threads_per_worker", threads_per_worker)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ClusterError(f"{name} is {value!r}: give a whole number of at least 1, or None for the default.")
    if address := address or dask.config.get("scheduler-address", None):
        client = join(address, timeout_s, wait_for_workers)
        _warn_of_unfit_workers(client)
        return client
    if importlib.util.find_spec("dask_saturn") and "SATURN_BASE_URL" in os.environ:
        from dask_saturn import SaturnCluster

        client = Client(SaturnCluster(**({} if n_workers is None else {"n_workers": n_workers})))
        client.wait_for_workers(1, timeout=VENDOR_TIMEOUT_S)
        refuse_other_versions(client)
        return client
    return _start_local(n_workers, threads_per_worker, memory_limit)


def worker_settings(torch_threads: int) -> dict[str, str]:
    """Return the environment variables under which `dask worker` starts workers that suit PyTorch.

    torch_threads: cores that one PyTorch operation may use.
    """
    # Dask's own MALLOC_TRIM_THRESHOLD_ freezes glibc's mmap threshold at 128 KiB. Each large tensor is then mapped and
    # faulted in anew, and training steps took 1.6 times as long. Dask merges settings: only None removes its value.
    before: dict[str, int | None] = {"MALLOC_TRIM_THRESHOLD_": None} | dict.fromkeys(THREADS, torch_threads)
    return {
        "DASK_DISTRIBUTED__WORKER__DAEMON": "False",  # a daemonic worker's DataLoader could have no children
        "DASK_DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON": str(before).replace("'", '"'),  # easier to quote in a shell
    }


def worker_environment(torch_threads: int) -> str:
    """Return `worker_settings` as lines to type in a shell before `dask worker`."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in worker_settings(torch_threads).items())


def unfit_for_pytorch(client: Client) -> tuple[list[str], int]:
    """Return (what is wrong with how a cluster's workers were started, cores that one of them could use)."""
    check_client(client)
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


def known_workers(client: Client) -> dict[str, dict]:
    """Return what the scheduler knows of each worker, by address.

    `Client.scheduler_info` may answer without any worker: a periodic call, which asks for none, overwrites its answer.
    """
    check_client(client)
    return client.sync(client.scheduler.identity, n_workers=-1)["workers"]  # type: ignore[union-attr]


def n_gpus() -> int:
    """Return how many CUDA devices PyTorch sees in this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_gpu_first(position: int) -> dict[str, str]:
    """Return the variable under which each process of a machine has another GPU as cuda:0; nothing without a GPU.

    Every process still sees all of them, as a worker of dask-cuda does: NCCL needs that to copy between GPUs directly.
    position: of the process among those of this machine, from 0. Where they are more than the GPUs, some share one.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Slurm, or the user, may have chosen some of this machine's GPUs: their numbers have to stay.
    gpus = [str(i) for i in range(n_gpus())] if seen is None else seen.split(",") if seen else []
    if not gpus:
        return {}
    first = position % len(gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first:] + gpus[:first])}


def _start_local(n_workers, threads_per_worker, memory_limit):
    children.refuse_if_imported_again()
    n_workers, Cluster = _choose_local(n_workers)
    port = _dashboard_port()
    about = f"starting {n_workers} workers" if n_workers > 1 else "starting a worker"
    with _starting, waiting(about):  # nannies read, when they are made, settings that hold for the process
        _set_worker_environment(torch_threads=max(1, CPU_COUNT // n_workers))
        _close_earlier()
        busy = not port_is_free(port)
        children.prepare()
        client = _start_to_its_end(
            Cluster,
            n_workers=n_workers,
            threads_per_worker=threads_per_worker,
            memory_limit=memory_limit,
            host=LOOPBACK,
            silence_logs=logging.CRITICAL,  # a failed task's error waits in its future
            worker_dashboard_address=f"{LOOPBACK}:0",
            dashboard_address=f"{LOOPBACK}:{0 if busy else port}",
        )
        if hasattr(builtins, "__IPYTHON__"):  # a program may want two clusters side by side
            _started.append(client)
    if busy:
        warnings.warn(
            f"Port {port} is busy, probably with the cluster of another notebook, so this one's dashboard "
            f"is at {client.dashboard_link}; panes beside the notebook show the other one. To free port and memory, "
            "shut the other notebook's kernel down (Kernel > Shut Down Kernel there) and restart this one.",
            stacklevel=3,
        )
    return client


def _start_to_its_end(Cluster, **settings):
    """Return a client of a new cluster; where the stop button is pressed meanwhile, shut down what has been started.

    Dask closes no cluster that is half started, and what nobody closes keeps its workers and its port.
    """

    def start():
        client = Client(Cluster(**settings))
        client.register_plugin(_LocalWorker())
        return client

    with ThreadPoolExecutor(1) as elsewhere:  # the stop button reaches the main thread alone, also when pressed twice
        starting = elsewhere.submit(start)
        try:
            return starting.result()
        except KeyboardInterrupt:
            starting.add_done_callback(lambda started: started.exception() or started.result().shutdown())
            raise
        except RuntimeError:
            children.explain_failure()
            raise


class _LocalWorker(WorkerPlugin):
    """Keeps a worker when the stop button is pressed, and has a forked one start its own children as others do."""

    def __init__(self):
        self.method = start_method()

    def setup(self, worker):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter signals all processes of the kernel's group
        # A process starts children as it was started. Those of a fork server, as a DataLoader has, would outlive it.
        set_start_method(self.method, force=True)
        dask.config.set({METHOD: self.method})
        send_by_value()


def _choose_local(n_workers):
    """Return (number of workers, class of cluster) for this machine."""
    gpus = n_gpus()
    if not gpus:
        forks = sys.platform == "linux" and dask.config.get("workshop.fork-workers", True)
        Cluster = partial(LocalCluster, worker_class=ForkingNanny) if forks else LocalCluster
        return n_workers or min(4, CPU_COUNT), Cluster
    hide = "hide the GPUs with CUDA_VISIBLE_DEVICES='' to work on the CPU"
    if n_workers and n_workers > gpus:
        raise ClusterError(
            f"n_workers is {n_workers}, but this machine has {gpus} GPU(s) and each worker needs one of "
            f"its own: call start_cluster({gpus}), or {hide}."
        )
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise ClusterError(f"This machine has {gpus} GPU(s): pip install dask-cuda, or {hide}.") from error
    return n_workers or gpus, LocalCUDACluster


def _dashboard_port():
    port = dask.config.get("workshop.dashboard-port", DASHBOARD_PORT)
    if not isinstance(port, int) or not 0 <= port < 2**16:
        raise ClusterError(
            f"Dask's setting workshop.dashboard-port is {port!r}: give DASK_WORKSHOP__DASHBOARD_PORT a "
            "port's number, 0 for any that is free, or unset it."
        )
    return port


def _close_earlier():
    while _started:
        earlier = _started.pop()
        if earlier.cluster.status == Status.running:
            earlier.shutdown() if earlier.status == "running" else earlier.cluster.close()
            print("The cluster that this notebook started before is closed.")


def _set_worker_environment(torch_threads):
    spare_loopback_the_proxy()
    # Nannies read these settings whenever they start a worker again, so they hold for the process, not for a block.
    # MALLOC_TRIM_THRESHOLD_, Dask's default, is left out on purpose: see worker_settings.
    os.environ.pop("MALLOC_TRIM_THRESHOLD_", None)
    for name, value in dask.config.get("distributed.nanny.pre-spawn-environ").items():
        if os.environ.get(name) == str(value):
            del os.environ[name]  # the nannies of an earlier cluster left it here, and it would win over the next value
    # Without ERROR, each rank that loses a peer prints a page of C++ stack. The error itself reaches the client.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    dask.config.set(
        {
            "distributed.nanny.pre-spawn-environ": dict.fromkeys(THREADS, torch_threads) | quiet,
            "distributed.worker.daemon": False,  # daemonic processes may have no children, and DataLoader needs some
            # After this time LocalCluster ends a nanny whose worker is gone, such as one that has just died twice.
            "distributed.deploy.lost-worker-timeout": "1 day",
        }
    )


def port_is_free(port: int) -> bool:
    """Return whether a server could listen on this port of the loopback address."""
    try:
        socket.create_server((LOOPBACK, port)).close()
        return True
    except OSError:
        return False


def _warn_of_unfit_workers(client):
    wrong, cores = unfit_for_pytorch(client)
    if wrong:
        warnings.warn(
            f"Workers do not suit PyTorch: {'; '.join(wrong)}. Start them after these lines:\n"
            f"{worker_environment(cores)}",
            stacklevel=3,
        )


def _how_started():
    given = [int(os.environ[name]) for name in THREADS if os.environ.get(name, "").isdigit()]
    trim = os.environ.get("MALLOC_TRIM_THRESHOLD_")
    return trim, current_process().daemon, min(given, default=CPU_COUNT), CPU_COUNT


def _describe_this_worker():
    import torch

    return {
        "pid": os.getpid(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0) if n_gpus() else "cpu",
        "python": platform.python_version(),
    }
