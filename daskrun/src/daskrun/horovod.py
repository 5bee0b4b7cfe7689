"""Run a Horovod function on Dask workers as the ranks of one job, where Horovod is built (`make horovod`)."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import Any

from distributed import Client

from daskrun.as_found import environment
from daskrun.call import check_call
from daskrun.errors import JobError
from daskrun.job import Job
from daskrun.limits import limits
from daskrun.rank import network_interface

LEAVE_S = 5  # for the other ranks to leave Horovod, before the server through which they met is closed
NOT_BUILT = "Horovod is not built here. To build it, on Linux with a C++ compiler: make horovod"


def launch(
    client: Client,
    fn: Callable,
    /,
    *args: Any,
    n_workers: int | tuple[int, int] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
    wait_for_workers: float = 0,
    wait_for_successors: float = 30,
    stall_after: float | None = None,
    **kwargs: Any,
) -> Job:
    """Start `fn(*args, **kwargs)` as one Horovod rank per worker process, and return the `Job` at once.

    `hvd.init()` has been called before the function runs, and `hvd.shutdown()` is after it. All else is as in
    `daskrun.launch`. Raises JobError where Horovod is not built.
    """
    if not available():
        raise JobError(NOT_BUILT)
    settings: dict[str, Any] = {
        "n_workers": n_workers,
        "timeout": timeout,
        "max_restarts": max_restarts,
        "wait_for_workers": wait_for_workers,
        "wait_for_successors": wait_for_successors,
        "stall_after": stall_after,
    }
    check_call(launch, settings, fn, args, kwargs)
    return Job(client, _in_horovod, fn, args, kwargs, limits(**settings))


def run(client: Client, fn: Callable, /, *args: Any, **kwargs: Any) -> list[Any]:
    """Return `launch(...).result()`: what each rank returned, in rank order."""
    return launch(client, fn, *args, **kwargs).result()


def available() -> bool:
    """Return whether Horovod is built here, for the PyTorch that is installed."""
    try:
        import horovod.torch  # noqa: F401
    except Exception:  # built for another version, its library lacks a symbol
        return False
    return True


def _in_horovod(run, store, mine):
    """Return `run()` of this rank, which finds the others through `store`, a TCPStore."""
    import horovod.torch as hvd
    from distributed import get_worker
    from distributed.comm import get_address_host
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    rank, ranks = mine.rank, range(mine.world_size)
    store.set(f"host-{rank}", get_address_host(get_worker().address))
    hosts = [store.get(f"host-{other}").decode() for other in ranks]  # once all ranks have imported it
    slots = get_host_assignments([HostInfo(host, len(list(same))) for host, same in groupby(hosts)], len(hosts))
    server = _rendezvous(hosts[0], slots) if rank == 0 else None
    try:
        if server:
            store.set("rendezvous", str(server.server_address[1]))
        with environment(_settings(slots[rank], hosts[0], store.get("rendezvous").decode())):
            hvd.init()
            try:
                return run()
            finally:
                hvd.shutdown()
                store.set(f"left-{rank}", "")
    finally:
        if server:
            with suppress(Exception):  # a rank is gone, and the job about to end
                store.wait([f"left-{other}" for other in ranks], timedelta(seconds=LEAVE_S))
            server.shutdown()
            server.server_close()


def _rendezvous(host, slots):
    # Not Horovod's RendezvousServer, which listens on all interfaces.
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((host, 0), RendezvousHandler, verbose=0)
    server.init(slots)
    # 0.02: seconds until it notices that it shall end.
    threading.Thread(target=server.serve_forever, args=[0.02], name="horovod-rendezvous", daemon=True).start()
    return server


def _settings(slot, address, port):
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or network_interface()
    log_level = os.environ.get("HOROVOD_LOG_LEVEL", "fatal")  # a death is reported by the job already
    values = {
        "controller": "gloo",
        "cpu_operations": "gloo",
        "gloo_iface": interface,
        "log_level": log_level,
        "gloo_rendezvous_addr": address,
        "gloo_rendezvous_port": port,
        **vars(slot),
    }  # hostname, rank, size, …
    return {f"HOROVOD_{name.upper()}": str(value) for name, value in values.items() if value is not None}
