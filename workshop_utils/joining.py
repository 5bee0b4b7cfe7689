"""Join a running cluster, if it answers, has workers, and has the versions of this process."""

import asyncio
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distributed import Client
from distributed.core import rpc
from distributed.security import Security
from distributed.versions import VersionMismatchWarning

from daskrun.errors import check_client
from workshop_utils.progress import waiting

TLS_FILES = "CA_FILE", "CLIENT__CERT", "CLIENT__KEY"
# Other versions of these on client and workers would fail late and far away, so they are refused at once.
SAME_ON_SCHEDULER = ("python", "dask", "distributed", "cloudpickle", "workshop-dask-pytorch")
SAME_ON_WORKERS = (*SAME_ON_SCHEDULER, "numpy", "pandas", "torch", "torchvision")


ANSWER_S = 30  # time limit for the versions of all workers


class ClusterError(RuntimeError):
    """A cluster could not be started or joined; the message says why and what to do."""


def join(address: str, timeout_s: float, wait_for_workers: float) -> Client:
    """Return a client of the running cluster whose scheduler is at `address`.

    timeout_s: seconds to wait for the scheduler. wait_for_workers: seconds to wait for its first worker.
    Raises ClusterError where no scheduler answers, no worker comes, or their versions differ from this process's.
    """
    _ask(address, timeout_s)
    with warnings.catch_warnings(action="ignore", category=VersionMismatchWarning):  # refused below, with the cure
        client = Client(address, timeout=timeout_s)
    refuse_other_versions(client)
    if not client.nthreads():
        _await_worker(client, wait_for_workers)
        refuse_other_versions(client)
    return client


def _ask(address, timeout_s):
    """Raise ClusterError unless a scheduler answers at `address`."""
    try:
        with ThreadPoolExecutor(1) as pool:  # a notebook's own thread already runs an event loop
            pool.submit(asyncio.run, _identity(address, timeout_s)).result()
    except (ValueError, TypeError) as error:
        if "ssl_context" in str(error):  # what Dask says where the certificate's files are not set
            names = ", ".join(f"DASK_DISTRIBUTED__COMM__TLS__{name}" for name in TLS_FILES)
            raise ClusterError(
                f"{address!r} asks for a certificate, and Dask's settings name none: set {names} to the "
                "paths of its files before Python starts."
            ) from error
        raise ClusterError(f"{address!r} is not a scheduler's address ({error}): write tcp://HOST:PORT.") from error
    except OSError as error:  # also TimeoutError
        cause: BaseException = error
        while cause.__cause__:  # the first cause says most, such as a certificate that is not trusted
            cause = cause.__cause__
        why = f" ({cause})" if str(cause) else ""
        raise ClusterError(
            f"No Dask scheduler answered at {address!r} within {timeout_s} s{why}. Check that it runs, "
            "that it is tcp:// or tls:// as you write, and that this is the scheduler's port, not the "
            "dashboard's; or unset DASK_SCHEDULER_ADDRESS to start a cluster on this machine."
        ) from error


async def _identity(address, timeout_s):
    # Client's own timeout never ends a connection to something that listens but is no scheduler.
    security = Security().get_connection_args("client")
    async with asyncio.timeout(timeout_s), rpc(address, connection_args=security) as scheduler:
        return await scheduler.identity()


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


def refuse_other_versions(client: Client) -> None:
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
    ]
    if others:
        client.close()
        raise ClusterError(
            "The cluster's versions differ from this process's:\n"
            + "\n".join(others)
            + "\nInstall the same on both sides, with the same Python, in a copy of the workshop's folder: "
            "pip install -r requirements.txt && pip install --no-deps . Then start the scheduler and the workers again."
        )


def _version(answer, name):
    # Python 3.11.2 and 3.11.9 may meet, and so may torch 2.15.0+cpu and 2.15.0+cu130.
    version = answer["packages"].get(name) or "missing"
    return ".".join(version.split(".")[:2]) if name == "python" else version.split("+")[0]
