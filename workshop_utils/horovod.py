"""Run a function under Horovod on ranks of `daskrun`, or of torchrun; `make horovod` builds it."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from itertools import groupby
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
LEAVE_S = 5  # for the other ranks to leave Horovod, before the server through which they met is closed
JOIN_S = 300  # for all ranks to import it
NOT_BUILT = "Horovod is not built here. To build it, on Linux with a C++ compiler: make horovod"


def available() -> bool:
    """Return whether Horovod is built here, for the PyTorch that is installed."""
    try:
        import horovod.torch  # noqa: F401
    except Exception:  # built for another version, its library lacks a symbol
        return False
    return True


def with_horovod(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs another one after ``hvd.init()``, and ``hvd.shutdown()`` after it.

    Launch it with ``backend=None``. Under Horovod, ``hvd.rank()`` is the job's rank.

    Raises:
        RuntimeError: Where Horovod isn't built.
    """
    if not available():
        raise RuntimeError(NOT_BUILT)

    @wraps(function)
    def in_horovod(*args: P.args, **kwargs: P.kwargs) -> T:
        import horovod.torch as hvd
        import torch.distributed as dist
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

        host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
        ranks, limit = range(int(os.environ["WORLD_SIZE"])), timedelta(seconds=JOIN_S)
        served = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        store = dist.PrefixStore(f"horovod-{os.environ['TORCHELASTIC_RESTART_COUNT']}", served)
        store.set(f"host-{rank}", os.environ["GROUP_RANK"])
        hosts = [store.get(f"host-{other}").decode() for other in ranks]  # once all ranks have imported it
        slots = get_host_assignments([HostInfo(one, len(list(same))) for one, same in groupby(hosts)], len(hosts))
        server = _rendezvous(host, slots) if rank == 0 else None
        try:
            if server:
                store.set("rendezvous", str(server.server_address[1]))
            os.environ.update(_settings(slots[rank], host, store.get("rendezvous").decode()))
            hvd.init()
            try:
                return function(*args, **kwargs)
            finally:
                hvd.shutdown()
                store.set(f"left-{rank}", "")
        finally:
            if server:
                with suppress(Exception):  # a rank is gone, and the job about to end
                    store.wait([f"left-{other}" for other in ranks], timedelta(seconds=LEAVE_S))
                server.shutdown()
                server.server_close()

    return in_horovod


def _rendezvous(host: str, slots: list[Any]) -> Any:
    # Not Horovod's RendezvousServer, which listens on all interfaces.
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((host, 0), RendezvousHandler, verbose=0)
    server.init(slots)
    # 0.02: seconds until it notices that it shall end.
    threading.Thread(target=server.serve_forever, args=[0.02], name="horovod-rendezvous", daemon=True).start()
    return server


def _settings(slot: Any, host: str, port: str) -> dict[str, str]:
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME")
    log_level = os.environ.get("HOROVOD_LOG_LEVEL", "fatal")  # a death is reported by the job already
    values = {
        "controller": "gloo",
        "cpu_operations": "gloo",
        "gloo_iface": interface,
        "log_level": log_level,
        "gloo_rendezvous_addr": host,
        "gloo_rendezvous_port": port,
        **vars(slot),
    }  # hostname, rank, size, …
    return {f"HOROVOD_{name.upper()}": str(value) for name, value in values.items() if value is not None}
