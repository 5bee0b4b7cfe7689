"""What runs on a worker that is a rank: meet the others, call the function, report how it went."""

import errno
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
from distributed import Worker, get_worker
from distributed.comm import get_address_host

from daskrun.errors import JobError, Stopped, WorkerDied
from daskrun.failure import failure
from daskrun.family import known_to_children
from daskrun.pickling import packed, send_by_value
from daskrun.private import forget_collectives
from daskrun.restore import settings_as_found
from daskrun.why.look import write_stacks

if TYPE_CHECKING:
    from torch.distributed import TCPStore

REACH_S = 20  # time limit for connecting to the store of rank 0, which serves already; PyTorch may take twice as long
STOPPED_AFTER_S = 1.0  # so that whoever looks at the futures alone meets the cause before a Stopped
JOIN_S = 300  # time limit for all ranks to arrive: each imports and unpickles at its own speed
TOPIC = "daskrun-"  # the topic of a client, whose id follows; a message is (kind, job, …)


class Meeting(NamedTuple):
    """Where the ranks meet, and what they run: (function, args, kwargs), pickled."""

    host: str
    port: int
    call: bytes


class AttemptId(NamedTuple):
    """One start of a job's function on all ranks. number: from 0."""

    job: str
    number: int


class Place(NamedTuple):
    """Where a rank is among all hosts, by torchrun's names of the variables. A group is a host."""

    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int


def places(hosts: Sequence[str]) -> list[Place]:
    """Return each rank's place. hosts: of the ranks, in rank order; those of one host are neighbours.

    >>> places(["a", "a", "b"])[1:]
    [Place(local_rank=1, local_world_size=2, group_rank=0, group_world_size=2), \
Place(local_rank=0, local_world_size=1, group_rank=1, group_world_size=2)]
    """
    groups = list(dict.fromkeys(hosts))
    return [
        Place(hosts[:rank].count(host), hosts.count(host), groups.index(host), len(groups))
        for rank, host in enumerate(hosts)
    ]


@dataclass(frozen=True)
class Assignment:
    """Which rank of which attempt a worker is. client: its id. process: the worker's id, which no successor shares."""

    attempt: AttemptId
    client: str
    rank: int
    world_size: int
    max_restarts: int
    process: str
    place: Place


# While this process runs a rank, else None. A process runs one rank at a time, and the rank's function may log from any
# of its threads, so this belongs to the process and not to a context.
_running: "tuple[Worker, Assignment, TCPStore] | None" = None

_older: set[threading.Thread] = set()  # that an earlier job, or the worker, has started

_begins: dict[AttemptId, bool] = {}  # False where `leave` came before the rank
_mail: dict[AttemptId, SimpleQueue] = {}  # holds the Meeting, once the client has sent it
_listening: dict[AttemptId, socket.socket] = {}  # of rank 0, until its store has it
_stores: "dict[AttemptId, TCPStore]" = {}  # that rank 0 serves to the others, who may need it longer than rank 0


def assignment() -> Assignment | None:
    """Return the assignment of the rank that this process runs, None outside a job."""
    return _running[1] if _running else None


def send_row(row: Mapping[str, object]) -> None:
    """Send a row of metrics to the client, with what `log_metrics` adds. Only for a process that runs a rank.

    Nothing happens in a plain task of Dask beside the rank. Raises ValueError in a thread that is older than the job.
    """
    assert _running
    task = _running[0].active_threads.get(threading.get_ident())
    if task is not None and not (isinstance(task, tuple) and task[:2] == _running[1].attempt):
        return
    if (thread := threading.current_thread()) in _older:
        raise ValueError(
            f"Thread {thread.name} is older than this job, so its row may belong to an earlier one: start threads that "
            "log in the function, and end them there."
        )
    worker, mine, _ = _running
    begin = {"rank": mine.rank, "attempt": mine.attempt.number, "time": time.time()}
    _log(worker, mine, "row", {**begin, **row, "worker": worker.address})


def tell_ranks(name: str, value: str) -> None:
    """Let the other ranks know a value, which `told_by` waits for. Only for a process that runs a rank."""
    assert _running
    _, mine, store = _running
    store.set(f"{name}-{mine.rank}", value)


def told_by(ranks: Iterable[int], name: str) -> list[str]:
    """Return the value that each of these ranks has told, once it has. Only for a process that runs a rank."""
    assert _running
    return [_running[2].get(f"{name}-{rank}").decode() for rank in ranks]


def _log(worker: Worker, mine: Assignment, kind: str, *about: Any) -> None:
    """Send a message about this rank's job to its client."""
    worker.log_event(TOPIC + mine.client, (kind, mine.attempt.job, *about))


@cache
def process_id() -> str:
    """Return an id of this process, also where two machines or containers have the same host name and pid."""
    return uuid.uuid4().hex


def at_work(dask_worker: Any = None) -> tuple[str, list[Any]]:
    """Return (id of this worker's process, keys of the tasks that it runs or is about to).

    The scheduler does not know of a cancelled task whose thread still runs.
    """
    state = dask_worker.state
    return process_id(), [task.key for task in (*state.executing, *state.long_running, *state.ready)]


def network_interface() -> str | None:
    """Return the network interface by which other hosts reach this worker; None where no address of this host fits.

    It is that of the worker's own address, which may be a name; behind NAT, that of the way to it. gloo and NCCL would
    go by what the host's name means, or by the first interface they find.
    """
    import psutil
    from distributed.utils import get_ip

    host = get_address_host(get_worker().address)
    mine = get_ip(host)
    interfaces = {a.address.partition("%")[0]: name for name, all in psutil.net_if_addrs().items() for a in all}
    return interfaces.get(mine)


def deliver(attempt: AttemptId, meeting: Meeting) -> None:
    """Let the rank of this attempt in this process go on: it waits until it knows where to meet the others."""
    if _begins.get(attempt) is not False:  # a large call may come after `leave`
        _mail.setdefault(attempt, SimpleQueue()).put(meeting)


def leave(attempt: AttemptId) -> bool:
    """Return whether a rank of this attempt has begun in this process; if not, it never will.

    The attempt is over: what was sent for it, and a store that is served for it, go. A rank that still waits to hear
    where to meet ends.
    """
    if waited_for := _mail.pop(attempt, None):
        waited_for.put(None)
    if unused := _listening.pop(attempt, None):
        unused.close()
    _stores.pop(attempt, None)
    return _begins.setdefault(attempt, False)


def listen(attempt: AttemptId, dask_worker: Any = None) -> tuple[str, int, str]:
    """Open a port for the store of the ranks, on this worker's address alone; return (host, port, what went wrong).

    It takes milliseconds, where importing PyTorch takes seconds. Who connects before the store serves waits.
    """
    host = get_address_host(dask_worker.address)
    if _begins.get(attempt) is False:
        return host, 0, "the job is over"
    try:
        _listening[attempt] = listening = open_port(host)
    except OSError as error:
        return host, 0, str(error)
    return host, listening.getsockname()[1], ""


def open_port(host: str) -> socket.socket:
    """Return a socket that listens on any free port of this address; of all, where the address is not this host's."""
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", 0))  # behind NAT our address is not local: listen on all interfaces


def run_rank(bootstrap: Callable, mine: Assignment) -> bytes:
    """Return what the function returned, pickled. The first rank of a job to fail tells the client at once.

    It depends on no other task, so that it begins before any that is submitted later; the client then sends what it
    needs. bootstrap: as in `Job`.
    """
    global _running, _older
    worker = get_worker()
    if worker.id != mine.process:
        raise Stopped(
            f"Rank {mine.rank} was started a second time by Dask, on a successor of its worker: a job's ranks start "
            "together or not at all."
        )
    if not _begins.setdefault(mine.attempt, True):
        raise Stopped(f"Rank {mine.rank} did not begin, as its job was over.")
    with suppress(OSError):  # the disk is full, or somebody removed the folder: only explanations need the file
        write_stacks(worker.local_directory)
    forget_collectives()
    _log(worker, mine, "began", mine.attempt.number, mine.rank, worker.address)
    store, call = _meet(mine)
    told: list[Exception] = []
    _older = _other_threads()

    def run() -> bytes:
        try:
            send_by_value()
            fn, args, kwargs = cloudpickle.loads(call)
            result = packed(fn(*args, **kwargs))
        except BaseException as error:  # told while the process group is there: its end may block or kill this process
            told.append(_tell(store, mine, error))
            raise
        store.add(f"returned-{mine.rank}", 1)
        return result

    _running = worker, mine, store
    try:
        with settings_as_found(), known_to_children():
            return bootstrap(run, store, mine)
    except BaseException as error:
        if not told:
            told.append(_tell(store, mine, error))
    finally:
        _running = None
    # Outside `except`, so that Stopped has no __context__: that error may not pickle.
    if isinstance(told[0], Stopped):
        time.sleep(STOPPED_AFTER_S)
    raise told[0]


def _other_threads() -> set[threading.Thread]:
    """Return the threads of this process that Python code has started, but for the current one.

    PyTorch's own, such as autograd's, serve all jobs: to Python they are dummies.
    """
    others = set(threading.enumerate()) - {threading.current_thread()}
    return {thread for thread in others if not thread.name.startswith("Dummy-")}


def _meet(mine: Assignment) -> "tuple[TCPStore, bytes]":
    """Return (the ranks' common store, the pickled call), once the client has sent where to meet."""
    import torch.distributed as dist  # takes seconds in a new process, on all ranks at once

    try:
        meeting = _mail.setdefault(mine.attempt, SimpleQueue()).get(timeout=JOIN_S)
    except Empty:
        raise JobError(f"Rank {mine.rank} has waited {JOIN_S} s to hear where rank 0 is.") from None
    if meeting is None:
        raise Stopped(f"Rank {mine.rank} ended, as its job was over.")
    store = _serve(dist.TCPStore, meeting, mine) if mine.rank == 0 else _reach(dist.TCPStore, meeting, mine)
    store.set_timeout(timedelta(seconds=JOIN_S))
    return store, meeting.call


def _serve(make: "type[TCPStore]", meeting: Meeting, mine: Assignment) -> "TCPStore":
    """Return the ranks' common store, which this process serves until `leave`."""
    listening = _listening.pop(mine.attempt)
    fd = listening.detach()
    store = make(meeting.host, meeting.port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    _stores[mine.attempt] = store
    return store


def _reach(make: "type[TCPStore]", meeting: Meeting, mine: Assignment) -> "TCPStore":
    """Return a client of rank 0's store. Raises JobError."""
    try:
        soon = timedelta(seconds=REACH_S)
        return make(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=soon)
    except Exception as error:
        where, why = f"{meeting.host}:{meeting.port}", [*str(error).splitlines(), type(error).__name__][0]
        raise JobError(
            f"Rank {mine.rank}, on worker {get_worker().address}, could not connect to rank 0 at {where} ({why}): let "
            "the workers' hosts reach each other on all TCP ports, as PyTorch chooses any (a firewall, or the rules of "
            "a network), or start the workers with a --host that the others reach."
        ) from None


def _tell(store: "TCPStore", mine: Assignment, error: BaseException) -> Exception:
    """Return the error that this rank ends with; tell the client of it, if no other rank has failed before."""
    ended, about = failure(store, mine.rank, mine.world_size, error)
    if about:
        _log(get_worker(), mine, "failed", mine.attempt.number, mine.rank, *about)
        if isinstance(error, WorkerDied):  # of its script's process
            _log(get_worker(), mine, "died", mine.attempt.number, mine.rank)
    return ended
