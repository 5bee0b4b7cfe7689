"""Run a job's function under Horovod, as `launch` does with backend="horovod"; `make horovod` builds it."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import Any

from daskrun.child.context import Context
from daskrun.child.process_group import connect
from daskrun.errors import JobError

LEAVE_S = 5  # for the other ranks to leave Horovod, before the server through which they met is closed
NOT_BUILT = "Horovod is not built here. To build it, on Linux with a C++ compiler: make horovod"


def available() -> bool:
    """Return whether Horovod is built here, for the PyTorch that is installed."""
    try:
        import horovod.torch  # noqa: F401
    except Exception:  # built for another version, its library lacks a symbol
        return False
    return True


def check_built() -> None:
    """Raise JobError where Horovod is not built."""
    if not available():
        raise JobError(NOT_BUILT)


def in_horovod(call: Callable[[Any], None], here: Context) -> None:
    """Run `call`, which gets the ranks' store, after `hvd.init()` and before `hvd.shutdown()`."""
    import horovod.torch as hvd
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    rank, ranks, store = here.mine.rank, range(here.mine.world_size), connect(here)
    store.set(f"host-{rank}", here.host)
    hosts = [store.get(f"host-{other}").decode() for other in ranks]  # once all ranks have imported it
    slots = get_host_assignments([HostInfo(host, len(list(same))) for host, same in groupby(hosts)], len(hosts))
    server = _rendezvous(hosts[0], slots) if rank == 0 else None
    try:
        if server:
            store.set("rendezvous", str(server.server_address[1]))
        os.environ.update(_settings(slots[rank], hosts[0], store.get("rendezvous").decode()))
        hvd.init()
        try:
            call(store)
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
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME")
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
