"""Start or join a Dask cluster whose workers suit PyTorch."""

import asyncio
import builtins
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import socket
import sys
import tempfile
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import current_process
from pathlib import Path

import dask
import pandas as pd
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster
from distributed.comm import get_address_host
from distributed.core import Status, rpc
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin
from distributed.security import Security
from distributed.versions import VersionMismatchWarning

from workshop_utils.object_store import LOOPBACK  # which runs also where this package cannot be imported
from workshop_utils.progress import waiting

PACKAGE = Path(__file__).parent
DASHBOARD_PORT = 8787
VENDOR_TIMEOUT_S = 600
TLS_FILES = "CA_FILE", "CLIENT__CERT", "CLIENT__KEY"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # PyTorch goes by the least of them
# Different versions of these on client and workers fail late and far away, so they are refused at once.
SAME_ON_WORKERS = ("python", "dask", "distributed", "cloudpickle", "numpy", "torch", "torchvision", "dask-pytorch-ddp",
                   "fsspec", "pandas", "pillow", "platformdirs", "s3fs")
SAME_ON_SCHEDULER = ("python", "dask", "distributed", "cloudpickle")
_started: list[Client] = []  # by start_cluster, in a notebook


class ClusterError(RuntimeError):
    """A cluster could not be started or joined; the message says why and what to do."""


def start_cluster(n_workers: int | None = None, *, threads_per_worker: int = 1, address: str | None = None,
                  timeout_s: float = 15, wait_for_workers: float = 60) -> Client:
    """Return a `Client` of the first cluster that applies.

    In order: `address`; Dask's own setting `scheduler-address` (`DASK_SCHEDULER_ADDRESS`); a vendor's cluster where its
    environment variables say so; one worker per GPU; else one local process per core, up to four, which share the
    cores. What is started here listens on loopback only. Its dashboard has the port of Dask's setting
    `workshop.dashboard-port` (`DASK_WORKSHOP__DASHBOARD_PORT`), 8787 unless set, 0 for any that is free. A notebook
    starts one at a time on its machine: the one that it started before is closed, and a line says so.

    n_workers: how many workers to start; None for the default above. Ignored where a running cluster is joined.
    threads_per_worker: tasks that one local worker runs at a time.
    timeout_s: seconds to wait for a running scheduler. wait_for_workers: and for its first worker, which an adaptive
    cluster or a batch system may be about to start.
    Raises ClusterError where no scheduler or no worker comes, where n_workers cannot be had, and where the versions of
    the scheduler or of a worker differ from this process's. Warns of joined workers that do not suit PyTorch, with the
    lines of `worker_environment`.
    """
    for name, value in (("n_workers", n_workers), ("threads_per_worker", threads_per_worker)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ClusterError(f"{name} is {value!r}: give a whole number of at least 1, or None for the default.")
    if address := address or dask.config.get("scheduler-address", None):
        client = _join(address, timeout_s, wait_for_workers)
    elif importlib.util.find_spec("dask_saturn") and "SATURN_BASE_URL" in os.environ:
        from dask_saturn import SaturnCluster

        client = Client(SaturnCluster(**({} if n_workers is None else {"n_workers": n_workers})))
        client.wait_for_workers(1, timeout=VENDOR_TIMEOUT_S)  # machines may have to start
        _refuse_other_versions(client)
    else:
        client = _start_local(n_workers, threads_per_worker)
    _ensure_importable(client)
    if address:
        wrong, cores = unfit_for_pytorch(client)
        if wrong:
            warnings.warn(f"Workers do not suit PyTorch: {'; '.join(wrong)}. Start them after these lines:\n"
                          f"{worker_environment(cores)}", stacklevel=2)
    return client


def worker_settings(torch_threads: int) -> dict[str, str]:
    """Return the environment variables under which `dask worker` starts workers that suit PyTorch.

    torch_threads: cores that one PyTorch operation may use.
    """
    # Dask's own value freezes glibc's mmap threshold at 128 KiB, and each large tensor is then mapped and faulted in
    # anew: training steps took 1.6 times as long. Settings are merged, so that only None takes it away.
    before: dict[str, int | None] = {"MALLOC_TRIM_THRESHOLD_": None} | dict.fromkeys(THREADS, torch_threads)
    return {"DASK_DISTRIBUTED__WORKER__DAEMON": "False",  # or DataLoader could have no children
            "DASK_DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON": str(before).replace("'", '"')}  # easier to quote


def worker_environment(torch_threads: int) -> str:
    """Return `worker_settings` as lines for a shell, to be typed before `dask worker` on each machine."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in worker_settings(torch_threads).items())


def unfit_for_pytorch(client: Client) -> tuple[list[str], int]:
    """Return (what is wrong with how a cluster's workers were started, cores that one of them could use)."""
    found = client.run(_how_started, on_error="ignore")
    hosts = Counter(get_address_host(worker) for worker in found)
    wrong, cores = set(), 1
    for worker, (trim, daemonic, threads, all_cores) in found.items():
        share = max(1, all_cores // hosts[get_address_host(worker)])
        cores = max(cores, share)
        wrong |= {f"MALLOC_TRIM_THRESHOLD_ is {trim}, which makes training slower"} if trim else set()
        wrong |= {"they are daemonic, so that a DataLoader can have no children"} if daemonic else set()
        few = threads < share and trim  # Dask's default; threads alone may be few because others are still to come
        wrong |= {f"PyTorch uses {threads} of the {share} cores that each could have"} if few else set()
    return sorted(wrong), cores


def describe_workers(client: Client) -> pd.DataFrame:
    """Return one row per worker: name, host, pid, threads, torch_threads, memory_gib, device, python, torch.

    device: "cpu", or the GPU's name. torch_threads: cores that one PyTorch operation may use.
    """
    about, rows = client.run(_describe_this_worker), []
    for address, info in client.scheduler_info(n_workers=-1)["workers"].items():
        memory_gib = round((info["memory_limit"] or float("nan")) / 2**30, 1)  # NaN: no limit
        known = {"worker": str(info["name"]), "host": info["host"], "threads": info["nthreads"]}
        rows.append(known | {"memory_gib": memory_gib} | about[address])
    columns = ["worker", "host", "pid", "threads", "torch_threads", "memory_gib", "device", "python", "torch"]
    return pd.DataFrame(rows, columns=columns).sort_values("worker", ignore_index=True)


def n_gpus() -> int:
    """Return how many CUDA devices PyTorch sees in this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _start_local(n_workers, threads_per_worker):
    gpus = n_gpus()
    n_workers = n_workers or gpus or min(4, CPU_COUNT)
    if gpus and n_workers > gpus:
        raise ClusterError(f"n_workers is {n_workers}, but this machine has {gpus} GPU(s) and each worker needs one of "
                           f"its own: call start_cluster({gpus}), or hide the GPUs with CUDA_VISIBLE_DEVICES='' to "
                           "work on the CPU.")
    _set_worker_environment(torch_threads=max(1, CPU_COUNT // n_workers))
    Cluster = LocalCluster
    if gpus:
        from dask_cuda import LocalCUDACluster as Cluster
    port = dask.config.get("workshop.dashboard-port", DASHBOARD_PORT)
    if not isinstance(port, int) or not 0 <= port < 2**16:
        raise ClusterError(f"Dask's setting workshop.dashboard-port is {port!r}: give DASK_WORKSHOP__DASHBOARD_PORT a "
                           "port's number, 0 for any that is free, or unset it.")
    _close_earlier()
    busy = not port_is_free(port)
    # Logs are silenced: a failed task's error waits in its future; get_worker_logs() has the rest.
    with waiting(f"starting {n_workers} worker{'s'[: n_workers > 1]}"):
        client = Client(Cluster(n_workers=n_workers, threads_per_worker=threads_per_worker, host=LOOPBACK,
                                silence_logs=logging.CRITICAL, worker_dashboard_address=f"{LOOPBACK}:0",
                                dashboard_address=f"{LOOPBACK}:{0 if busy else port}"))
    if busy:
        warnings.warn(f"Port {port} is busy, probably with the cluster of another notebook, so this one's dashboard "
                      f"is at {client.dashboard_link}. To free port and memory, shut the other notebook's kernel down "
                      "and restart this one.", stacklevel=3)
    if hasattr(builtins, "__IPYTHON__"):  # a program may want two clusters side by side
        _started.append(client)
    return client


def _close_earlier():
    while _started:
        earlier = _started.pop()
        if earlier.cluster.status == Status.running:
            earlier.shutdown() if earlier.status == "running" else earlier.cluster.close()
            print("The cluster that this notebook started before is closed.")


def _set_worker_environment(torch_threads):
    # Nannies read these settings at every (re)start of a worker, so they are set for the process, not for a block.
    # Left out on purpose: MALLOC_TRIM_THRESHOLD_, Dask's default; see worker_settings.
    os.environ.pop("MALLOC_TRIM_THRESHOLD_", None)
    for name, value in dask.config.get("distributed.nanny.pre-spawn-environ").items():
        if os.environ.get(name) == str(value):
            del os.environ[name]  # an earlier cluster's nannies left it here, and it would win over what follows
    dask.config.set({
        # When a rank dies, the others' C++ parts would print a page of stack each; the error itself reaches the client.
        "distributed.nanny.pre-spawn-environ": dict.fromkeys(THREADS, torch_threads) | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        "distributed.worker.daemon": False,  # daemonic processes may not have children, and DataLoader needs some
        # A nanny replaces its worker. After this time LocalCluster ends the nanny itself if there is no worker at that
        # moment, such as one that died for the second time.
        "distributed.deploy.lost-worker-timeout": "1 day",
    })


def port_is_free(port: int) -> bool:
    """Return whether a server could listen on this port of the loopback address."""
    try:
        socket.create_server((LOOPBACK, port)).close()
        return True
    except OSError:
        return False


def _join(address, timeout_s, wait_for_workers):
    try:
        with ThreadPoolExecutor(1) as pool:  # a notebook's own thread already runs an event loop
            identity = pool.submit(asyncio.run, _identity(address, timeout_s)).result()
    except (ValueError, TypeError) as error:
        if "ssl_context" in str(error):  # Dask has none without these
            names = ", ".join(f"DASK_DISTRIBUTED__COMM__TLS__{name}" for name in TLS_FILES)
            raise ClusterError(f"{address!r} asks for a certificate, and Dask's settings name none: set {names} to the "
                               "paths of its files before Python starts.") from error
        raise ClusterError(f"{address!r} is not a scheduler's address ({error}): write tcp://HOST:PORT.") from error
    except OSError as error:  # TimeoutError is one
        cause: BaseException = error
        while cause.__cause__:  # such as a certificate that is not trusted
            cause = cause.__cause__
        why = f" ({cause})" if str(cause) else ""
        raise ClusterError(f"No Dask scheduler answered at {address!r} within {timeout_s} s{why}. Check that it runs, "
                           "that it is tcp:// or tls:// as you write, and that this is the scheduler's port, not the "
                           "dashboard's; or unset DASK_SCHEDULER_ADDRESS to start a cluster on this machine."
                           ) from error
    with warnings.catch_warnings(action="ignore", category=VersionMismatchWarning):  # said below with the cure
        client = Client(address, timeout=timeout_s)
    if not identity["workers"]:
        _refuse_other_versions(client)  # the scheduler's
        _await_worker(client, wait_for_workers)
    _refuse_other_versions(client)
    return client


def _await_worker(client, timeout_s):
    print(f"{client.scheduler.address} has no workers yet; waiting for one, up to {timeout_s} s.")
    work = client.submit(int, pure=False)  # for which an adaptive cluster starts a worker
    try:
        with waiting("waiting for a worker"):
            client.wait_for_workers(1, timeout=timeout_s)
    except TimeoutError as error:
        raise ClusterError(f"The cluster at {client.scheduler.address!r} has no workers, and none came within "
                           f"{timeout_s} s. Start one with: workshop join {client.scheduler.address}") from error
    finally:
        work.cancel()
        if not client.nthreads():
            client.close()


async def _identity(address, timeout_s):
    # Client's own timeout does not end a connection to something that listens but is no scheduler.
    security = Security().get_connection_args("client")
    async with asyncio.timeout(timeout_s), rpc(address, connection_args=security) as scheduler:
        return await scheduler.identity()


def _refuse_other_versions(client):
    # Asked without sending code: a function pickled by one version of Python can crash the interpreter of another.
    answers = client.get_versions(packages=SAME_ON_WORKERS[1:])
    theirs = {("the scheduler", name): _version(answers["scheduler"], name) for name in SAME_ON_SCHEDULER}
    for worker, answer in answers["workers"].items():
        theirs |= {(worker, name): _version(answer, name) for name in SAME_ON_WORKERS}
    mine = {name: _version(answers["client"], name) for name in SAME_ON_WORKERS}
    others = [f"  {who}: {name} {version}, here {mine[name]}" for (who, name), version in theirs.items()
              if version != mine[name]]
    if others:
        client.close()
        raise ClusterError("The cluster's versions differ from this process's:\n" + "\n".join(others) +
                           "\nInstall the same on both sides: pip install -r requirements.txt")


def _version(answer, name):
    # Python 3.11.2 and 3.11.9 may meet, and so may torch 2.15.0+cpu and 2.15.0+cu130.
    version = answer["packages"].get(name) or "missing"
    return ".".join(version.split(".")[:2]) if name == "python" else version.split("+")[0]


def _ensure_importable(client):
    # Not with distributed's UploadDirectory: that unpacks into a folder which all clusters of a machine share, and
    # leaves it there, where the next cluster imports it. A worker's own folder goes with the worker.
    def lacks():
        return importlib.util.find_spec("workshop_utils") is None

    def unpack(folder):
        for path, content in files.items():
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        if folder not in sys.path:
            sys.path.insert(0, folder)

    class SendToScheduler(SchedulerPlugin):  # these are pickled by value: who has to load them cannot import this
        name = "workshop-utils"

        def start(self, scheduler):
            self.folder = tempfile.mkdtemp()
            unpack(self.folder)

        async def close(self):
            shutil.rmtree(self.folder)

    class SendToWorkers(WorkerPlugin):
        name = "workshop-utils"

        def setup(self, worker):
            unpack(worker.local_directory)

    files = {str(file.relative_to(PACKAGE.parent)): file.read_bytes() for file in PACKAGE.rglob("*")
             if file.is_file() and "__pycache__" not in file.parts}
    if client.run_on_scheduler(lacks):  # it unpickles the functions of tasks, too
        client.register_plugin(SendToScheduler())
    if any(client.run(lacks).values()):
        client.register_plugin(SendToWorkers())


def _how_started():
    threads = min((int(os.environ[name]) for name in THREADS if os.environ.get(name, "").isdigit()), default=CPU_COUNT)
    return os.environ.get("MALLOC_TRIM_THRESHOLD_"), current_process().daemon, threads, CPU_COUNT


def _describe_this_worker():
    import torch

    return {"pid": os.getpid(), "torch_threads": torch.get_num_threads(), "torch": torch.__version__,
            "device": torch.cuda.get_device_name(0) if n_gpus() else "cpu", "python": platform.python_version()}
