"""Local workers that suit PyTorch, for a machine with or without GPUs."""

import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, set_forkserver_preload, set_start_method
from pathlib import Path
from threading import Lock
from typing import Any

import dask
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster, Nanny
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin

from daskrun import dashboard, main_guard
from daskrun.child.context import current
from daskrun.errors import ClusterError, warn
from daskrun.pickling import send_by_value
from daskrun.settings import THREADS, given_threads, gpu_ids, n_gpus
from daskrun.worker.template import ADDRESS, own_template

LOOPBACK = "127.0.0.1"
ROOT = Path("/")  # below which NVIDIA's driver has its files
METHOD = "distributed.worker.multiprocessing-method"
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
PRELOAD = ["daskrun.preloaded"]  # what the fork server imports
ALSO = "DASKRUN_WORKER_PRELOAD"  # names, with commas between them, the modules that `preloaded` imports, too
_starting = Lock()
_setting = Lock()
_forking: list[int] = []  # one for each worker that is being forked
_before: list[str] = []  # Dask's own setting meanwhile
_given: set[tuple[str, str]] = set()  # the variables, with their values, that clusters of this process have set


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

    Dask's settings for workers stay set in this process, and so do the variables that name threads, as by Dask itself.

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
    # Before Dask's nannies leave variables here that name the threads of a worker: this process has its own.
    import torch  # noqa: F401

    return start_workers(
        n_workers,
        threads_per_worker=threads_per_worker,
        memory_limit=memory_limit,
        dashboard_port=dashboard_port,
        preload=preload,
        worker_preload=worker_preload,
    )


def start_workers(
    n_workers: int | None,
    *,
    threads_per_worker: int = 1,
    memory_limit: str | int | float | None = "auto",
    dashboard_port: int = 0,
    preload: Sequence[str] = (),
    worker_preload: Sequence[str] = ("torch",),
) -> Client:
    """Return what `start_local` does, for a program that needs no PyTorch itself: it is ready two seconds earlier."""
    for name, value in (("n_workers", n_workers), ("threads_per_worker", threads_per_worker)):
        if value is not None and (not isinstance(value, int) or value is True or value < 1):
            raise ClusterError(f"{name} is {value!r}: give a whole number of at least 1, or None for the default.")
    main_guard.refuse_if_imported_again()
    if current():
        raise ClusterError(
            "start_local was called in a rank, so each rank would start a cluster: call it in the program that "
            "launches the job, or run a script that starts its own cluster with python."
        )
    n_workers, Cluster = _choose(n_workers)
    settings: dict[str, Any] = {
        "n_workers": n_workers,
        "threads_per_worker": threads_per_worker,
        "memory_limit": memory_limit,
        "host": LOOPBACK,
        "silence_logs": logging.CRITICAL,  # a failed task's error waits in its future
        "worker_dashboard_address": f"{LOOPBACK}:0",
        "dashboard_address": f"{LOOPBACK}:{dashboard_port}",
    }
    if Cluster is not LocalCluster:
        settings["CUDA_VISIBLE_DEVICES"] = gpu_ids()  # dask-cuda would also take what CUDA does not read
    with _starting:  # nannies read settings that hold for the process
        variables = _set_worker_environment(torch_threads=_cores_of_a_worker(n_workers, Cluster))
        main_guard.prepare()
        if Cluster is LocalCluster and _forks():
            _start_fork_server([*worker_preload, *preload], variables)
            settings["worker_class"] = _ForkingNanny
        settings["env"] = {**os.environ, **variables}
        if sys.platform == "linux":  # one for all workers, which imports PyTorch while they start
            settings["env"][ADDRESS] = own_template(preload, settings["env"]).address
        return _start_to_its_end(Cluster, settings)


class _ForkingNanny(Nanny):
    """Has its worker forked, whatever Dask's setting says for those of other clusters."""

    async def instantiate(self) -> Status:
        with _workers_are_forked():
            return await super().instantiate()


@contextmanager
def _workers_are_forked() -> Iterator[None]:
    """Set Dask's setting for the block. Blocks overlap, also of several clusters, each of which has a thread."""
    with _setting:
        if not _forking:
            _before.append(dask.config.get(METHOD))
            dask.config.set({METHOD: "forkserver"})
        _forking.append(1)
    try:
        yield
    finally:
        with _setting:
            _forking.pop()
            if not _forking:
                dask.config.set({METHOD: _before.pop()})


class _LocalWorker(WorkerPlugin):
    """Keeps a worker when the stop button is pressed, and makes a forked one as a new one in what matters to a task."""

    def setup(self, worker: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter signals all processes of the kernel's group
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # and a terminal that closes, those of its foreground group
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # in case the fork server did not find `preloaded`
        if torch := sys.modules.get("torch"):  # as it was imported, before the fork
            torch.set_num_threads(given_threads() or CPU_COUNT)
            torch.seed()
        # A process starts children as it was started. Those of a fork server, as a DataLoader has, would outlive it.
        set_start_method("spawn", force=True)
        dask.config.set({METHOD: "spawn"})
        send_by_value()


def _choose(n_workers: int | None) -> tuple[int, type]:
    """Return (number of workers, class of cluster) for this machine."""
    gpus = n_gpus()
    if gpus == 1:  # of the slices of a GPU (MIG), a process sees the first alone
        gpus = max(1, sum(gpu.startswith("MIG-") for gpu in gpu_ids()))
    if not gpus:
        _warn_of_idle_gpus()
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


def _cores_of_a_worker(n_workers: int, Cluster: type) -> int:
    """Return how many cores each worker may use: its share of this machine's, and of those that dask-cuda gives it.

    That binds a worker to the cores of the socket to which its GPU is connected.
    """
    cores = CPU_COUNT // n_workers
    if Cluster is not LocalCluster:
        from dask_cuda.utils import get_cpu_affinity

        with suppress(Exception):  # NVML cannot say
            ids = sorted(int(gpu) if gpu.isdigit() else gpu for gpu in gpu_ids())[:n_workers]  # as dask-cuda takes them
            allowed = os.sched_getaffinity(0)  # type: ignore[attr-defined]
            sockets = [tuple(sorted(allowed & set(get_cpu_affinity(gpu)) or allowed)) for gpu in ids]
            cores = min(cores, *(len(socket) // sockets.count(socket) for socket in sockets))
    return max(1, cores)


def _warn_of_idle_gpus() -> None:
    """Warn of GPUs that PyTorch does not see, if nobody has hidden them."""
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ and not gpu_ids()
    if hidden or not (ROOT / "dev/nvidiactl").exists():  # a container may see the driver, and have no device
        return
    import torch

    with suppress(OSError):
        text = (ROOT / "proc/driver/nvidia/version").read_text(errors="replace")
        driver = (re.findall(r"\d+\.\d+[.\d]*", text) or ["of unknown version"])[0]
        cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        warn(
            f"This machine has an NVIDIA GPU with driver {driver}, but PyTorch sees none, so workers use the CPU. This "
            f"PyTorch is for {cuda}; one for CUDA 13 needs driver 580 or newer, and compute capability 7.5 or higher. "
            "CUDA_VISIBLE_DEVICES='' hides the GPU, and this warning."
        )


def _forks() -> bool:
    return sys.platform == "linux" and dask.config.get("daskrun.fork-workers", True)


def _start_fork_server(modules: Sequence[str], variables: Mapping[str, str]) -> None:
    """Have this process's fork server import modules, before Dask would start it with others; it keeps what it has."""
    set_forkserver_preload(PRELOAD)
    # The stop button could end a server that has just begun. Its first import, of `preloaded`, unblocks them.
    before, environment = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS), dict(os.environ)
    try:
        resource_tracker.ensure_running()  # it keeps SIGHUP blocked, and unblocks the others here, too
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        os.environ.update({**variables, ALSO: ",".join(modules)})  # NumPy's threads are what they are at its import
        forkserver.ensure_running()
    finally:
        os.environ.update(environment)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _set_worker_environment(torch_threads: int) -> dict[str, str]:
    """Set what nannies read when they start a worker, also again; return the variables of these workers.

    Variables that the user has set stay as they are.
    """
    before = dask.config.get("distributed.nanny.pre-spawn-environ")
    # MALLOC_TRIM_THRESHOLD_, Dask's default, is left out on purpose: see worker_settings. Where it is, so is the rest.
    left_by_dask = before if os.environ.pop("MALLOC_TRIM_THRESHOLD_", None) else {}
    for name, value in {*left_by_dask.items(), *_given}:
        if os.environ.get(name) == str(value):
            del os.environ[name]  # a nanny of an earlier cluster left it here, and it would win over the next value
    # Without ERROR, each rank that loses a peer prints a page of C++ stack. The error itself reaches the client.
    ours = dict.fromkeys(THREADS, str(given_threads() or torch_threads)) | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    # Of every cluster: one that still runs leaves its own value here again when it starts a worker again.
    _given.update((name, value) for name, value in ours.items() if name not in os.environ)
    variables = ours | {name: os.environ[name] for name in ours if name in os.environ}
    dask.config.set(
        {
            "distributed.nanny.pre-spawn-environ": {**before, "MALLOC_TRIM_THRESHOLD_": None, **variables},
            "distributed.worker.daemon": False,  # daemonic processes may have no children, and DataLoader needs some
            # After this time LocalCluster ends a nanny whose worker is gone, such as one that has just died twice.
            "distributed.deploy.lost-worker-timeout": "1 day",
        }
    )
    return variables


def _start_to_its_end(Cluster: type, settings: dict[str, Any]) -> Client:
    """Return a client of a new cluster; if the stop button is pressed meanwhile, shut down what has been started.

    Dask closes no cluster that is half started, and what nobody closes keeps its workers and its port.
    """

    def start() -> Client:
        cluster = Cluster(**settings)
        try:
            if any(
                worker.status is not Status.running for worker in cluster.workers.values()
            ):  # dask-cuda says nothing
                raise ClusterError("A worker did not start: what it printed says why.")
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
        except RuntimeError:
            main_guard.explain_failure()
            raise
