"""What travels between the client, the workers and the ranks' processes: plain data, without Dask or torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

TOPIC = "daskrun-"  # of Dask's events: the id of a job follows; a message is (Event, …)


class JobState(StrEnum):
    """What a job does, or has come to."""

    WAITING = "waiting for workers"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending its ranks"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"


class RankState(StrEnum):
    """What a rank does, or has come to."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    DEAD = "dead"
    STOPPED = "stopped"


class Event(StrEnum):
    """What a message about a job says. Those of a rank begin with (attempt, rank)."""

    BEGAN = "began"  # (attempt, rank, address; of rank 0, host and port of the store): it has started
    FAILED = "failed"  # (attempt, rank, Failure's fields): its code raised an error
    DIED = "died"  # (attempt, rank, its last lines, Ended's fields): its process was killed, or crashed
    ROW = "row"  # (row,) of metrics
    OUTPUT = "output"  # (attempt, rank, [(is_error, line), …])
    USAGE = "usage"  # (attempt, rank, CPU cores in use, bytes of memory)
    NOTICE = "notice"  # (text,): a warning for whoever launched the job
    REPLY = "reply"  # (attempt, rank, number of the request, pickled answer): of a rank that stays
    PROMPT = "prompt"  # (attempt, rank, place, text): its debugger waits for a line
    RESUMED = "resumed"  # (attempt, rank, text): its debugger lets it go on
    GONE = "gone"  # (id of a worker's process,): the worker has died, or is being closed
    CLOSED = "closed"  # (id of a worker's process,): its rank has ended, and nothing of it follows


class AttemptId(NamedTuple):
    """One start of a job's program on all ranks. number: from 0."""

    job: str
    number: int


class Place(NamedTuple):
    """Where a rank is among all hosts, by the names of torchrun's variables. A group is a host."""

    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int


def places(hosts: Sequence[str]) -> list[Place]:
    """Return each rank's place.

    Args:
        hosts: Of the ranks, in rank order; those of one host are neighbors.

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
    """Which rank of which attempt a worker runs.

    Attributes:
        process: The id of the worker's process, which its successor doesn't share.
        starts_fresh: Whether the rank's process is a new interpreter, and no fork of the template.
        debug_timeout: Seconds that its debugger waits for the client.
        debug_errors: Whether the debugger opens where the program raises an error.
    """

    attempt: AttemptId
    rank: int
    world_size: int
    max_restarts: int
    process: str
    place: Place
    starts_fresh: bool = False
    debug_timeout: float = 0
    debug_errors: bool = False


@dataclass(frozen=True)
class Function:
    """A function to run on each rank.

    Attributes:
        call: ``(fn, args, kwargs)``, pickled.
        backend: Of the process group that's made before it runs, None for no group; see ``daskrun.launch``.
        cells: The sources of a notebook's cells, by the names of their files, which are nowhere.
    """

    call: bytes
    backend: str | None
    cells: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Script:
    """A script to run on each rank.

    Attributes:
        path: A file, relative to the folder, or with is_module a module.
        folder: Where to run it.
        archive: What's in that folder, as a tar file, for workers that don't have it.
        environment: Variables to add to those of its worker.
    """

    path: str
    is_module: bool
    arguments: tuple[str, ...]
    folder: str
    archive: bytes | None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Store:
    """Serve the ranks' ``TCPStore`` on a socket that listens already, until the worker closes the connection."""

    host: str
    port: int


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet, and what they run. gpus: CUDA_VISIBLE_DEVICES of each rank, None to leave it as it is."""

    host: str
    port: int
    program: Function | Script
    gpus: tuple[str | None, ...]


@dataclass(frozen=True)
class Order:
    """What a rank's process is told first.

    Attributes:
        program: What to run.
        sys_path: The worker's, for a function; None for a script, which gets Python's own.
        folder: The working directory.
        beside: The folder from which a script imports first.
        host: By which the other ranks reach this one.
    """

    program: Function | Script | Store
    mine: Assignment | None = None
    sys_path: tuple[str, ...] | None = None
    folder: str = "."
    beside: str = ""
    host: str = ""
    port: int = 0


class Failure(NamedTuple):
    """What a rank failed with.

    Attributes:
        error: The exception with its traceback and its causes, pickled.
        text: The same as Python prints it, for a client that lacks the exception's module.
        may_follow: Whether it may come of another rank's death or failure, as an error of gloo or NCCL.
        last_collective: Such as "all_reduce of [10]", "" for none.
        returned: Ranks whose function had returned by then.
    """

    error: bytes
    text: str
    may_follow: bool
    last_collective: str
    returned: Sequence[int]


class Ended(NamedTuple):
    """How a rank's process ended.

    Attributes:
        code: Its exit code, or minus the signal that ended it.
        peak_bytes: The most memory that it had.
        out_of_memory: Whether the kernel killed a process of this control group for want of memory meanwhile.
        limit_bytes: The worker's memory limit, if the rank was ended because of it, else 0.
        stacks: What faulthandler wrote.
    """

    code: int
    peak_bytes: int = 0
    out_of_memory: bool = False
    limit_bytes: int = 0
    stacks: str = ""


class Snapshot(NamedTuple):
    """What a rank's process answers when it's asked where it is.

    Attributes:
        frames: (file, line number, function, line) of the main thread's stack, outermost first.
        others: The stacks of the program's other threads.
        groups: The names of its process groups.
        collectives: What the flight recorders have of each collective.
        stopped_at: Where its debugger waits for the client, "" if it doesn't.
        is_idle: Whether it's a rank that stays, and waits for a cell.
    """

    frames: list[tuple[str, int, str, str]]
    others: list[list[tuple[str, int, str, str]]]
    groups: list[str]
    collectives: list[dict[str, Any]]
    stopped_at: str = ""
    is_idle: bool = False
