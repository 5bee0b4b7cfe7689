"""What runs on a worker that is a rank: meet the others, call the function, report how it went."""

import errno
import io
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import cloudpickle
from distributed import get_worker
from distributed.comm import get_address_host
from distributed.core import error_message

from workshop_utils.job.errors import JobError, Stopped
from workshop_utils.job.workers import listed
from workshop_utils.results import reporting

if TYPE_CHECKING:
    from torch.distributed import TCPStore

REACH_S = 30  # for the store to answer, of which rank 0's worker has told before
JOIN_S = 300  # for all ranks to be there: they import and unpickle, each at its own speed
MAX_FRAMES = 30  # the innermost ones of a traceback that travels; Dask drops one of over 10 kB
SETTLE_S = 1.0  # after a rank failed: another one may have died first; give its death time to be noticed


@dataclass(frozen=True)
class Place:
    """Which rank of which attempt of a job a worker process is.

    process: see `workers.process_of`. host, port: where the store is through which the ranks meet.
    """

    job: str
    rank: int
    world_size: int
    attempt: int
    max_restarts: int
    process: str
    host: str
    port: int


def network_interface() -> str | None:
    """Return the network interface by which other hosts reach this worker; None where no address of this host fits.

    It is that of the worker's own address, which may be a name; behind address translation, that of the way to it.
    gloo and NCCL would go by what the host's name means, or by the first interface they find.
    """
    import psutil
    from distributed.utils import get_ip, get_ipv6

    host = get_address_host(get_worker().address)
    mine = get_ipv6(host) if ":" in host else get_ip(host)
    interfaces = {a.address.partition("%")[0]: name for name, all in psutil.net_if_addrs().items() for a in all}
    return interfaces.get(mine)


def serve_store(host: str) -> "TCPStore":
    """Return a store for the ranks of a job, which listens on this worker's address alone, until it is released."""
    import torch.distributed as dist

    try:
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        listening = socket.create_server(("", 0))  # behind address translation, others know it by a foreign address
    port = listening.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def run_rank(bootstrap: Callable, call: bytes, place: Place) -> bytes:
    """Return what the function returned, pickled. The first rank of a job to fail tells the client at once.

    bootstrap: as in `Job`. call: (function, args, kwargs), pickled.
    """
    import torch.distributed as dist

    if get_worker().local_directory != place.process:
        raise Stopped(f"Rank {place.rank} was started a second time by Dask, on a successor of its worker: a job's "
                      "ranks start together or not at all.")  # fmt: skip
    soon = timedelta(seconds=REACH_S)
    store = dist.TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=soon)
    store.set_timeout(timedelta(seconds=JOIN_S))

    reported: list[Exception] = []

    def run() -> bytes:
        try:
            fn, args, kwargs = cloudpickle.loads(call)
            result = packed(fn(*args, **kwargs))
        except BaseException as error:  # told while the process group is there: its end may block or kill this process
            reported.append(_report(store, place, error))
            raise
        store.add(f"returned-{place.rank}", 1)
        return result

    try:
        with reporting(place.job, rank=place.rank, attempt=place.attempt):
            return bootstrap(run, store, place)
    except BaseException as error:
        if not reported:
            reported.append(_report(store, place, error))
    # Out of the `except`: a Stopped would travel with the other error as its context, and fail to where that cannot.
    if isinstance(reported[0], Stopped):
        time.sleep(SETTLE_S)  # so that who looks at the futures alone meets the cause before this
    raise reported[0]


def packed(value: object) -> bytes:
    """Return a result as it travels: pickled here, with every tensor on the CPU. Raises TypeError."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:  # pickling raises many kinds
        raise TypeError("What the function returned cannot be sent back: return numbers, text, tensors or a state_dict "
                        "instead of generators, files, locks or DataLoaders.") from error  # fmt: skip
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:  # the client may have no GPU
        import torch

        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            on_cpu = value.detach().cpu()
            if isinstance(value, torch.nn.Parameter):
                on_cpu = torch.nn.Parameter(on_cpu, value.requires_grad)
            return on_cpu.__reduce_ex__(self.proto)
        return super().reducer_override(value)


def _report(store: "TCPStore", place: Place, error: BaseException) -> Exception:
    """Return the error that this rank ends with: its own, of which the client is told, or Stopped if not the first."""
    first = place.rank
    with suppress(Exception):  # rank 0's process is gone, and the store with it
        first = int(store.compare_set("failed", "", str(place.rank)))
    if first != place.rank:
        return Stopped(f"Rank {place.rank} ended because rank {first} failed first.")
    if not isinstance(error, Exception):  # a worker would take SystemExit for its own end
        ended = JobError(f"Rank {place.rank} called for the end of its process: {error!r}.")
        error = ended.with_traceback(error.__traceback__)
    error.add_note(_about(store, place))
    at, depth = error.__traceback__, len(list(traceback.walk_tb(error.__traceback__)))
    for _ in range(depth - MAX_FRAMES):  # an endless recursion's could not be unpickled: the client would wait for ever
        at = at.tb_next if at else None
    error = error.with_traceback(at)
    try:
        raise error  # for error_message takes the traceback of what is being handled
    except Exception:
        message = error_message(error)
    sent = {name: getattr(message[name], "data", None) for name in ("exception", "traceback")}
    get_worker().log_event(place.job, {"failed": place.rank, "attempt": place.attempt, **sent})
    return error


def _about(store: "TCPStore", place: Place) -> str:
    note = f"Raised by rank {place.rank} of {place.world_size}, on worker {get_worker().address}."
    with suppress(Exception):  # rank 0's process may be gone, and the store with it
        if returned := [other for other in range(place.world_size) if store.check([f"returned-{other}"])]:
            note += f" Rank {listed(returned)} had returned by then, and was in no collective any more."
    return note
