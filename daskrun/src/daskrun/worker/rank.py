"""The task of a rank on its worker: it meets the others, runs the rank's process, and passes on what that sends."""

import asyncio
import errno
import io
import logging
import os
import signal
import socket
import sys
import tarfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import dask
from distributed import Worker, get_worker
from distributed.comm import get_address_host
from distributed.diagnostics.plugin import WorkerPlugin

from daskrun.child.failure import COMMUNICATION
from daskrun.errors import JobError, ScriptFailed
from daskrun.private import RECORDER
from daskrun.protocol import (
    TOPIC,
    Assignment,
    AttemptId,
    Ended,
    Event,
    Failure,
    Function,
    Meeting,
    Order,
    Script,
    Store,
)
from daskrun.settings import THREADS, n_gpus
from daskrun.why.look import Look
from daskrun.worker.output import Lines
from daskrun.worker.process import ENDS, Process, new_store
from daskrun.worker.template import without_dasks

logger = logging.getLogger("distributed.worker.daskrun")  # as loud as the worker

CLOSE_S = 5  # that a rank has to end when its worker is closed
JOIN_S = 300  # time limit for all ranks to hear where rank 0 is
MOST_LINES, MOST_SAID = 40, 8_000  # the last lines, and characters, that the error of a rank repeats

Key = tuple[AttemptId, str]  # of an attempt on the worker at an address: a process may have several workers

_begins: dict[Key, bool] = {}  # False where `end` came before the rank
_mail: dict[Key, SimpleQueue] = {}  # holds the Meeting, once the client has sent it
_stores: dict[Key, ExitStack] = {}  # which ranks may need longer than rank 0 runs
_processes: dict[Key, Process] = {}
_signals: dict[Key, int] = {}  # for processes that are still to start
_closing: set[Key] = set()  # whose worker is being closed, which is how they end


def at_work(dask_worker: Any = None) -> tuple[list[Any], str]:
    """Return (keys of the tasks that this worker runs or is about to, the GPUs that it sees).

    The scheduler does not know of a cancelled task whose thread still runs.
    """
    state = dask_worker.state
    keys = [task.key for task in (*state.executing, *state.long_running, *state.ready)]
    return keys, os.environ.get("CUDA_VISIBLE_DEVICES", "")


def deliver(attempt: AttemptId, meeting: Meeting, dask_worker: Any = None) -> None:
    """Let the rank of this attempt on this worker go on: it waits until it knows where to meet the others."""
    key = attempt, dask_worker.address
    if _begins.get(key) is not False:  # a large call may come after `end`
        _mail.setdefault(key, SimpleQueue()).put(meeting)


def open_port(host: str) -> socket.socket:
    """Return a socket that listens on any free port of this address; of all, where the address is not this host's."""
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", 0))  # behind NAT our address is not local: listen on all interfaces


async def end(attempt: AttemptId, grace_s: float, dask_worker: Any = None) -> bool:
    """End the rank of this attempt on this worker, if there is one; return whether one had begun.

    It gets SIGTERM, and so many seconds; then it's killed. One that hasn't begun never will. What was sent for the
    attempt goes, and a store that is served for it. When this returns, the worker is free.
    """
    key = attempt, dask_worker.address
    has_begun = _begins.setdefault(key, False)
    if waited_for := _mail.pop(key, None):
        waited_for.put(None)
    late = time.monotonic() + grace_s
    if (process := _processes.get(key)) and grace_s:
        process.signal(signal.SIGTERM)
    while _is_at_work(dask_worker, attempt):
        if (process := _processes.get(key)) and time.monotonic() >= late:
            process.kill()
        await asyncio.sleep(0.01)
    if store := _stores.pop(key, None):
        await asyncio.to_thread(store.close)
    return has_begun


def _is_at_work(worker: Any, attempt: AttemptId) -> bool:
    tasks = (*worker.state.executing, *worker.state.long_running)
    return any(isinstance(task.key, tuple) and task.key[:2] == attempt for task in tasks)


def send_signal(attempt: AttemptId, number: int, dask_worker: Any = None) -> bool:
    """Send a signal to the rank's process on this worker, as soon as it has one; return whether there is a rank."""
    key = attempt, dask_worker.address
    if process := _processes.get(key):
        process.signal(number)
    elif is_starting := _begins.get(key, False) and _is_at_work(dask_worker, attempt):
        _signals[key] = number
    return process is not None or is_starting


async def tell(attempt: AttemptId, kind: str, *about: Any, dask_worker: Any = None) -> bool:
    """Send a message to the rank's process on this worker, as soon as it has one; return whether there is a rank."""
    if process := await _process_of(attempt, dask_worker):
        await asyncio.to_thread(process.tell, kind, *about)
    return process is not None


async def kill(attempt: AttemptId, dask_worker: Any = None) -> bool:
    """Kill the rank's process on this worker, as soon as it has one; return whether there is a rank."""
    if process := await _process_of(attempt, dask_worker):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return process is not None


async def _process_of(attempt: AttemptId, worker: Any) -> Process | None:
    key = attempt, worker.address
    while not (process := _processes.get(key)) and _is_at_work(worker, attempt):
        await asyncio.sleep(0.01)
    return process


async def look(attempt: AttemptId, dask_worker: Any = None) -> Look | None:
    """Return where the rank on this worker is; None where no such rank runs."""
    for task in dask_worker.state.executing:
        if isinstance(task.key, tuple) and task.key[:2] == attempt:
            if process := _processes.get((attempt, dask_worker.address)):
                return await asyncio.to_thread(process.look)
            return Look(task.key[2], trouble="has no process yet: it waits for the other workers")
    return None


class _EndsRanks(WorkerPlugin):
    """Ends the rank of a worker that Dask closes, as at the end of its lifetime: it may save, and its rows arrive."""

    async def teardown(self, worker: Any) -> None:
        late, here = time.monotonic() + CLOSE_S, [key for key in _processes if key[1] == worker.address]
        _closing.update(here)
        for key in here:
            _processes[key].signal(signal.SIGTERM)
        while any(key in _processes for key in here):
            for process in [_processes[key] for key in here if key in _processes and time.monotonic() >= late]:
                process.kill()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # what their threads have sent comes first
        for attempt, _ in here:
            worker.log_event(TOPIC + attempt.job, (str(Event.CLOSED), worker.id))
        _closing.difference_update(here)


def run_rank(mine: Assignment) -> bytes | None:
    """Run a rank until its process has ended; return the function's pickled result, None where it failed or died.

    It depends on no other task, so that it begins before any that is submitted later; the client then sends what it
    needs.
    """
    worker = get_worker()
    key = mine.attempt, worker.address
    worker.plugins.setdefault("daskrun", _EndsRanks())
    # Dask starts a task a second time on the successor of a worker; a job's ranks start together, or not at all.
    if worker.id != mine.process or not _begins.setdefault(key, True):
        return None
    log, host = _Log(worker, mine), get_address_host(worker.address)
    try:
        listening = open_port(host) if mine.rank == 0 else None  # for the ranks' store
    except OSError as error:
        log.fail(JobError(f"Worker {worker.address} of rank 0 cannot listen for the other ranks: {error}."))
        return None
    log(Event.BEGAN, worker.address, *[host, listening.getsockname()[1]] if listening else ())
    try:
        return _met(key, mine, log, listening)
    finally:
        if listening:
            listening.close()


def _met(key: Key, mine: Assignment, log: "_Log", listening: socket.socket | None) -> bytes | None:
    """Wait until it's known where the ranks meet, and run the rank."""
    try:
        meeting = _mail.setdefault(key, SimpleQueue()).get(timeout=JOIN_S)
    except Empty:
        log.fail(JobError(f"Rank {mine.rank} has waited {JOIN_S} s to hear where rank 0 is."))
        return None
    if meeting is None:
        return None
    try:
        with (
            _passes_sigterm_on(log.worker, key),
            _unpacked(meeting.program, log.worker) as folder,
            TemporaryDirectory(dir=log.worker.local_directory) as own,
        ):
            environment = _environment(mine, meeting, f"{own}/error.json")
            return _run(key, mine, meeting, folder, environment, log, listening)
    except (JobError, OSError) as error:
        log.fail(error)
        return None


class _Log:
    """Sends messages about a rank to its job's client, and to the scheduler."""

    def __init__(self, worker: Worker, mine: Assignment) -> None:
        self.worker, self.mine = worker, mine

    def __call__(self, kind: Event, *about: Any) -> None:
        """Send a message that begins with the attempt and the rank."""
        self.about_job(kind, self.mine.attempt.number, self.mine.rank, *about)

    def about_job(self, kind: Event, *about: Any) -> None:
        """Send a message."""
        self.worker.log_event(TOPIC + self.mine.attempt.job, (str(kind), *about))

    def fail(self, error: Exception, may_follow: bool = False) -> None:
        """Send an error that is raised here, not by the rank's program."""
        self(Event.FAILED, *Failure(cloudpickle.dumps(error), str(error), may_follow, "", []))


def _run(
    key: Key,
    mine: Assignment,
    meeting: Meeting,
    folder: str,
    environment: dict[str, str],
    log: _Log,
    listening: socket.socket | None,
) -> bytes | None:
    """Run the rank's process, and that of the ranks' store if this is rank 0."""
    program, worker = meeting.program, log.worker
    if listening:
        store = Store(meeting.host, meeting.port)
        _stores[key] = new_store(store, listening, environment, mine.starts_fresh)
    sys_path: tuple[str, ...] | None = tuple(sys.path)
    beside = ""
    if isinstance(program, Script):
        sys_path, beside = None, _beside(program, folder)
        if not program.is_module and not (file := Path(folder, program.path)).is_file():
            raise JobError(
                f"There is no file {file} on worker {worker.address}. Let all workers see the same files, or send the "
                "script's folder with --ship."
            )
    host = get_address_host(worker.address)
    order = Order(program, mine, sys_path, folder, beside, host, meeting.port)
    _processes[key] = process = Process(order, environment, mine.starts_fresh, _memory_limit(worker))
    if number := _signals.pop(key, 0):
        process.signal(number)
    if process.no_fork:
        log.about_job(Event.NOTICE, f"Rank {mine.rank} starts a new interpreter: {process.no_fork}.")
    heard = _Heard(program, log, lambda: key in _closing)
    try:
        ended = process.wait(heard.output, heard.message, lambda *usage: log(Event.USAGE, *usage), heard.exit)
    finally:
        del _processes[key]
    if isinstance(program, Script):
        return None if ended.code else cloudpickle.dumps(None)
    return heard.result


class _Heard:
    """Passes on what a rank's process sends, and how it ended; keeps its result and its last lines."""

    def __init__(self, program: Function | Script, log: _Log, is_closing: Callable[[], bool]) -> None:
        self.result: bytes | None = None
        self._program, self._log, self._is_closing = program, log, is_closing
        self._has_failed = False
        self._last: deque[str] = deque(maxlen=MOST_LINES)

    def output(self, lines: Lines) -> None:
        """Take lines that the process has printed."""
        # PyTorch begins lines of errors and warnings with the rank, as we do.
        prefix = b"[rank%d]:" % self._log.mine.rank
        lines = [(is_error, line.removeprefix(prefix + b" ").removeprefix(prefix)) for is_error, line in lines]
        self._last.extend(line.decode(errors="replace") for _, line in lines)
        self._log(Event.OUTPUT, lines)

    def message(self, kind: str, *about: Any) -> None:
        """Take a message of `child`."""
        worker = self._log.worker
        if kind == "row":
            self._log.about_job(Event.ROW, {**about[0], "worker": worker.address})
        elif kind == "returned":
            self.result = about[0]
        elif kind == "failed" and not self._is_closing():
            self._has_failed = True
            self._log(Event.FAILED, *about[0])
        elif kind in ("reply", "prompt", "resumed"):
            self._log(Event(kind), *about)
        elif kind == "event":
            worker.log_event(*about)

    def exit(self, ended: Ended) -> None:
        """Take the end of the process, which is a death if nothing was heard before."""
        if self.result is not None or self._has_failed or self._is_closing():
            return
        said = "\n".join(self._last)[-MOST_SAID:]
        was_killed = ended.code < 0 and -ended.code not in ENDS  # or it crashed
        if was_killed or isinstance(self._program, Function):
            logger.warning("Rank %s of %s died: %s", self._log.mine.rank, self._log.mine.attempt.job, ended)
            self._log(Event.DIED, said, *ended)
        elif ended.code:
            # gloo raises in a rank whose partner is gone.
            follows = ended.code > 0 and bool(COMMUNICATION.search(said.rpartition("Traceback ")[2]))
            rank, worker = self._log.mine.rank, self._log.worker.address
            self._log.fail(ScriptFailed(self._program.path, rank, worker, ended.code, said), follows)


def _memory_limit(worker: Worker) -> float:
    """Return the bytes at which Dask's nanny would end the worker, 0 for no limit."""
    limit, share = worker.memory_manager.memory_limit, dask.config.get("distributed.worker.memory.terminate")
    return limit * share if limit and share else 0


def _environment(mine: Assignment, meeting: Meeting, error_file: str) -> dict[str, str]:
    """Return all variables of a rank: its worker's, its script's, and torchrun's.

    Args:
        error_file: In which a script writes its error, if PyTorch's ``@record`` decorates its main function.
    """
    environment = without_dasks(os.environ)
    own = meeting.program.environment if isinstance(meeting.program, Script) else {}
    if threads := [own[name] for name in THREADS if name in own]:
        environment |= dict.fromkeys(THREADS, threads[0])  # PyTorch takes the smallest
    environment |= own
    defaults = RECORDER | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    gpus = meeting.gpus[mine.rank]
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    if not n_gpus():  # a plain Accelerator(), Fabric() or Trainer() would train alone on each rank
        devices, nodes = str(mine.place.local_world_size), str(mine.place.group_world_size)
        defaults |= {"ACCELERATE_USE_CPU": "true", "LT_DEVICES": devices, "LT_NUM_NODES": nodes}
        defaults |= {"PL_TRAINER_DEVICES": devices, "PL_TRAINER_NUM_NODES": nodes}
    if interface := network_interface():
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # NCCL takes a prefix
    rank, world_size = str(mine.rank), str(mine.world_size)
    place = {name.upper(): str(number) for name, number in mine.place._asdict().items()}
    torchruns = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
        **place,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RUN_ID": mine.attempt.job,
        "TORCHELASTIC_RESTART_COUNT": str(mine.attempt.number),
        "TORCHELASTIC_MAX_RESTARTS": str(mine.max_restarts),
        # The store at MASTER_ADDR is served already, as torchrun's agent serves its own: no port is guessed.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }
    return defaults | environment | torchruns


def network_interface() -> str | None:
    """Return the network interface by which other hosts reach this worker; None where no address of this host fits.

    It is that of the worker's own address, which may be a name; behind NAT, that of the way to it. gloo and NCCL would
    go by what the host's name means, or by the first interface they find.
    """
    import psutil
    from distributed.utils import get_ip

    mine = get_ip(get_address_host(get_worker().address))
    interfaces = {a.address.partition("%")[0]: name for name, all in psutil.net_if_addrs().items() for a in all}
    return interfaces.get(mine)


def _beside(script: Script, folder: str) -> str:
    """Return the folder from which a script imports first."""
    if script.is_module:
        return folder if script.archive else script.folder  # a worker that lacks it has another there
    return str(Path(folder, script.path).resolve().parent)


@contextmanager
def _unpacked(program: Function | Script, worker: Worker) -> Iterator[str]:
    """Yield the folder to run in; one that was sent along exists for the block."""
    if isinstance(program, Function):
        yield os.getcwd()
    elif program.archive is None:
        may_run_elsewhere = program.is_module or Path(program.path).is_absolute()
        yield str(Path.cwd()) if may_run_elsewhere and not Path(program.folder).is_dir() else program.folder
    else:
        with TemporaryDirectory(dir=worker.local_directory) as folder:
            with tarfile.open(fileobj=io.BytesIO(program.archive)) as archive:
                archive.extractall(folder, filter="data")
            yield folder


@contextmanager
def _passes_sigterm_on(worker: Worker, key: Key) -> Iterator[None]:
    """Send SIGTERM on to the rank, as torchrun does, so that it may save, and keep this process until the block ends.

    Then it comes again.
    """
    came, before, is_set = [], [], threading.Event()

    def handle(number: int, _: object) -> None:
        came.append(number)
        if process := _processes.get(key):
            process.signal(number)

    def begin() -> None:
        with suppress(ValueError):  # the worker is in somebody else's process, whose main thread is another
            before.append(signal.signal(signal.SIGTERM, handle))
        is_set.set()

    def finish() -> None:
        for handler in before:
            signal.signal(signal.SIGTERM, handler)
            if came:
                os.kill(os.getpid(), signal.SIGTERM)

    worker.loop.add_callback(begin)
    is_set.wait(1)
    try:
        yield
    finally:
        worker.loop.add_callback(finish)


def rank_pids(dask_worker: Any = None) -> dict[AttemptId, int]:
    """Return the process of each attempt's rank that runs on this worker."""
    here = dask_worker.address
    return {attempt: process.pid for (attempt, address), process in list(_processes.items()) if address == here}
