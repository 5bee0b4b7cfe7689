"""Local workers that suit PyTorch, for a machine with or without GPUs."""

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import current_process, forkserver, set_forkserver_preload, set_start_method
from pathlib import Path
from threading import Lock
from typing import Any

import dask
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster, Nanny
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin

from daskrun import dashboard
from daskrun.child.context import current
from daskrun.errors import ClusterError, warn
from daskrun.settings import THREADS, given_threads, gpu_ids, n_gpus
from daskrun.worker.template import ADDRESS, own_template

LOOPBACK = "127.0.0.1"
DRIVER = Path("/dev/nvidiactl")  # which NVIDIA's driver makes
ALSO = "DASKRUN_WORKER_PRELOAD"  # names, with commas between them, the modules that `preloaded` imports, too
METHOD = "distributed.worker.multiprocessing-method"
OF_DASK: dict[str, Any] = {
    "distributed.worker.daemon": False,  # daemonic processes may have no children
    # After this time LocalCluster ends a nanny whose worker is gone, such as one that has just died twice.
    "distributed.deploy.lost-worker-timeout": "1 day",
    # Dask looks 100 times a second what tasks do, and 50 times how late it is: 4 % of a core for each worker.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1 s",
}
_starting = Lock()
_forking: list[int] = []  # one for each worker that is being forked


def start_local(
    n_workers: int | None = None,
    *,
    threads_per_worker: int = 1,
    memory_limit: str | int | float | None = "auto",
    dashboard_port: int = 0,
    preload: Sequence[str] = (),
    worker_preload: Sequence[str] = ("torch",),
) -> Client:
    """Return a `Client` of a new local cluster of processes.

    It has one worker per GPU, else one per core, up to four, which share the cores. It listens on loopback only. On
    Linux without a GPU, workers are forked from a process that has imported PyTorch, so that one that died is back in a
    second, and ranks from another one, which hasn't imported Dask. Workers find the environment variables of their
    cluster's start. With Dask's setting ``daskrun.fork-workers`` (``DASK_DASKRUN__FORK_WORKERS``) False, each worker
    starts a new interpreter.

    Dask's settings for workers stay set in this process, also for other clusters that it starts. Its statistical
    profiler is off.

    Args:
        n_workers: None for the default above.
        threads_per_worker: Tasks that one worker runs at a time.
        memory_limit: Of one worker with its rank, as ``LocalCluster`` takes it: such as "2 GiB", bytes, or "auto" for a
            share of this machine's. Dask ends a worker that comes to 95 % of it, and starts it again; a rank that makes
            the two come to it is ended.
        dashboard_port: 0 for any that's free.
        preload: Installed modules to import before ranks and workers are forked, too, such as ``["transformers"]``; the
            error of one that can't be imported is printed. One that starts a thread keeps ranks from being forked.
        worker_preload: Modules that are imported before workers are forked, for tasks of Dask.

    Raises:
        ClusterError: If this machine has fewer GPUs than n_workers, a script calls it while it's imported, or a worker
            with a GPU doesn't start.

    >>> client = start_local(2)
    >>> len(client.nthreads())
    2
    >>> client.shutdown()
    """
    # Without this, each rank that loses a peer prints a page of C++ stack. The error itself reaches the client.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    settings = threads_per_worker, memory_limit, dashboard_port
    return _start(n_workers, *settings, preload=preload, worker_preload=worker_preload, defaults=quiet)


def start_for_scripts(n_workers: int | None) -> Client:
    """Return `start_local`'s client for scripts, which print all that they print under torchrun."""
    return _start(n_workers, 1, "auto", 0, preload=(), worker_preload=(), defaults={})


def _start(
    n_workers: int | None,
    threads_per_worker: int,
    memory_limit: str | int | float | None,
    dashboard_port: int,
    *,
    preload: Sequence[str],
    worker_preload: Sequence[str],
    defaults: dict[str, str],
) -> Client:
    for name, value in (("n_workers", n_workers), ("threads_per_worker", threads_per_worker)):
        if value is not None and (not isinstance(value, int) or value is True or value < 1):
            raise ClusterError(f"{name} is {value!r}: give a whole number of at least 1, or None for the default.")
    if getattr(current_process(), "_inheriting", False):
        raise ClusterError(
            "Each new worker imports this program again, which would start another cluster: put the call that starts "
            "it, and what comes after it, below the line if __name__ == '__main__':"
        )
    if current():
        raise ClusterError(
            "start_local was called in a rank, so each rank would start a cluster: call it in the program that "
            "launches the job, or run a script that starts its own cluster with python."
        )
    n_workers, Cluster = _choose(n_workers)
    threads = str(given_threads() or max(1, CPU_COUNT // n_workers))
    variables = dict.fromkeys(THREADS, threads) | defaults | os.environ
    settings: dict[str, Any] = {
        "n_workers": n_workers,
        "threads_per_worker": threads_per_worker,
        "memory_limit": memory_limit,
        "host": LOOPBACK,
        "silence_logs": logging.CRITICAL,  # a failed task's error waits in its future
        "worker_dashboard_address": f"{LOOPBACK}:0",
        "dashboard_address": f"{LOOPBACK}:{dashboard_port}",
        "env": variables,
    }
    with _starting:
        if Cluster is not LocalCluster:
            settings["CUDA_VISIBLE_DEVICES"] = gpu_ids()  # dask-cuda would also take what CUDA doesn't read
        elif sys.platform == "linux" and dask.config.get("daskrun.fork-workers", True):
            _start_fork_server([*worker_preload, *preload], variables)
            settings["worker_class"] = _ForkingNanny
        if sys.platform == "linux":  # one for all workers, which imports PyTorch while they start
            variables[ADDRESS] = own_template(preload, variables).address
        # Dask would set variables that name threads, MALLOC_TRIM_THRESHOLD_ and another seed in this process, too.
        seed = {"PYTHONHASHSEED": os.environ["PYTHONHASHSEED"]} if "PYTHONHASHSEED" in os.environ else {}
        dask.config.set(OF_DASK | {"distributed.nanny.pre-spawn-environ": seed})
        return _start_to_its_end(Cluster, settings)


class _ForkingNanny(Nanny):
    """Has its worker forked, whatever Dask's setting says for those of other clusters."""

    async def instantiate(self) -> Status:
        _forking.append(1)
        dask.config.set({METHOD: "forkserver"})
        try:
            return await super().instantiate()
        finally:
            _forking.pop()
            if not _forking:
                dask.config.set({METHOD: "spawn"})


class _LocalWorker(WorkerPlugin):
    """Keeps a worker when the stop button is pressed, and makes a forked one as a new one in what matters to a task."""

    def setup(self, worker: Any) -> None:
        # Jupyter signals all processes of the kernel's group, as a terminal, or timeout, does those of its own.
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the fork server ignores
        # A process starts children as it was started. Those of a fork server, as a DataLoader has, would outlive it.
        set_start_method("spawn", force=True)
        if torch := sys.modules.get("torch"):  # as it was imported, before the fork
            torch.set_num_threads(given_threads() or CPU_COUNT)
            torch.seed()
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()


def _choose(n_workers: int | None) -> tuple[int, type]:
    """Return (number of workers, class of cluster) for this machine."""
    gpus = n_gpus()
    if gpus == 1:  # of the slices of a GPU (MIG), a process sees the first alone
        gpus = max(1, sum(gpu.startswith("MIG-") for gpu in gpu_ids()))
    if not gpus:
        is_hidden = "CUDA_VISIBLE_DEVICES" in os.environ and not gpu_ids()
        if DRIVER.exists() and not is_hidden:
            warn(
                "This machine has an NVIDIA GPU, but PyTorch sees none, so workers use the CPU: nvidia-smi names the "
                "CUDA that the driver supports, and torch.version.cuda PyTorch's. CUDA_VISIBLE_DEVICES='' hides the "
                "GPU, and this warning."
            )
        return n_workers or min(4, CPU_COUNT), LocalCluster
    hide = "hide the GPUs with CUDA_VISIBLE_DEVICES='' to work on the CPU"
    if n_workers and n_workers > gpus:
        raise ClusterError(
            f"n_workers is {n_workers}, but this machine has {gpus} GPU(s) and each worker needs one of its own: give "
            f"n_workers={gpus}, or {hide}."
        )
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise ClusterError(f"This machine has {gpus} GPU(s): pip install dask-cuda, or {hide}.") from error
    return n_workers or gpus, LocalCUDACluster


def _start_fork_server(modules: Sequence[str], variables: Mapping[str, str]) -> None:
    """Have this process's fork server import modules, before Dask would start it with others; it keeps what it has."""
    set_forkserver_preload(["daskrun.preloaded"])
    before = dict(os.environ)
    os.environ.update(
        {**variables, ALSO: ",".join([*modules, os.environ.get(ALSO, "")])}
    )  # NumPy's threads are what they are at its import
    try:
        forkserver.ensure_running()
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _start_to_its_end(Cluster: type, settings: dict[str, Any]) -> Client:
    """Return a client of a new cluster; if the stop button is pressed meanwhile, shut down what has been started.

    Dask closes no cluster that's half started, and what nobody closes keeps its workers and its port.
    """

    def start() -> Client:
        cluster = Cluster(**settings)
        try:
            if any(worker.status is not Status.running for worker in cluster.workers.values()):  # as of dask-cuda
                raise RuntimeError("a worker is not there")
            client = Client(cluster)
            client.register_plugin(_LocalWorker())
            client.run_on_scheduler(dashboard.show)
            return client
        except BaseException:
            cluster.close()
            raise

    with ThreadPoolExecutor(1) as elsewhere:  # the stop button reaches the main thread alone, also when pressed twice
        starting = elsewhere.submit(start)
        try:
            return starting.result()
        except KeyboardInterrupt:
            starting.add_done_callback(lambda started: started.exception() or started.result().shutdown())
            raise
        except RuntimeError as error:
            raise ClusterError(
                "Workers didn't start: what they printed says why. Each one imports the program again, so put the call "
                "that starts them, and what comes after it, below the line if __name__ == '__main__': in a file."
            ) from error
