"""Run a script for torchrun as a rank, in a process of its own: a child of the rank's worker.

In the worker's own process a script would have no main thread, so no signal handlers; and what it leaves behind, such
as global state or a default device, would meet the next job. What it prints goes to the client as rows with a `line`.
"""

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple

from distributed import get_worker

from daskrun import rank
from daskrun.errors import ITS_LAST_LINES, LINES, JobError, WorkerDied
from daskrun.family import OF_RANK, ROWS
from daskrun.output import Lines, send_output
from daskrun.settings import THREADS
from daskrun.why import look
from daskrun.why.process import Death, End
from daskrun.why.verdict import how_it_ended

ANSWER_S = 3  # time limit for a script's answer to how it looks
FIRST_S = 1  # for another rank, whose failure may have broken the communication, to tell of it first
TIDY_S = 1.0  # for what a script has left behind to end by itself, such as a filter of its output
MOST_SHIPPED = 64 * 2**20  # bytes
MOST_LINES, MOST_SAID = 40, 8_000  # the last lines, and characters, that the error of a script repeats
PROCESS = str(Path(__file__).with_name("script_process.py"))

ENDS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)  # signals that ask for an end, which is no death; the command passes them on
CRASHES = signal.SIGABRT, signal.SIGSEGV
HASH_SEED = ("PYTHONHASHSEED", "6640")  # as Dask's nanny sets it where nobody has

_processes: list[subprocess.Popen[bytes]] = []  # that of the script which this worker runs, if it does
_signalled: list[int] = []  # the signal that it was sent


class Script(NamedTuple):
    """What each rank runs. path: a file, from the folder, or with is_module a module.

    folder: where to run it. archive: what is in that folder, as a tar file, for workers that do not have it.
    environment: variables that it finds beside its worker's. virtual_local_rank: whether each rank counts as a host of
    its own, whose GPU is cuda:0.
    """

    path: str
    is_module: bool
    arguments: tuple[str, ...]
    folder: str
    archive: bytes | None
    environment: Mapping[str, str] = MappingProxyType({})
    virtual_local_rank: bool = False

    def beside(self, folder: str) -> str:
        """Return the folder from which the script imports first."""
        if self.is_module:
            return folder if self.archive else self.folder  # a worker that lacks it has another there
        return str(Path(folder, self.path).resolve().parent)


def script_here(path: str, is_module: bool, arguments: tuple[str, ...], ship: bool) -> Script:
    """Return the script at a path from the working folder. ship: send its folder along, without hidden files and links.

    Raises JobError where there is no such file to send, or the folder is too large.
    """
    if not ship:
        return Script(path, is_module, arguments, str(Path.cwd()), None)
    if not is_module and not Path(path).is_file():
        raise JobError(f"There is no file {path} here to send.")
    folder = Path.cwd() if is_module else Path(path).resolve().parent
    target = io.BytesIO()

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if target.tell() + entry.size > MOST_SHIPPED:
            raise JobError(f"{folder} has more than {MOST_SHIPPED >> 20} MiB: ship a folder of code alone.")
        name = Path(entry.name).name
        is_left_out = name.startswith(".") or name == "__pycache__" or not (entry.isfile() or entry.isdir())
        return None if is_left_out else entry

    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        archive.add(folder, "", filter=wanted)
    return Script(
        path if is_module else Path(path).resolve().name, is_module, arguments, str(folder), target.getvalue()
    )


def run_script(script: Script) -> None:
    """Run the script as this rank.

    Raises WorkerDied where it is killed or crashes, and JobError where it ends with an error, each with its last lines;
    and JobError if the worker has no such file.
    """
    mine = rank.assignment()
    assert mine
    last: deque[str] = deque(maxlen=MOST_LINES)
    here = f"worker {get_worker().address}"
    with _unpacked(script) as folder:
        if not script.is_module and not (file := Path(folder, script.path)).is_file():
            raise JobError(
                f"There is no file {file} on {here}. Let all workers see the same files, or send the script's folder "
                "with --ship."
            )
        code, own = _run(script, folder, mine.rank, last)
    said = "\n".join(last)[-MOST_SAID:]
    repeated = f"{ITS_LAST_LINES}{LINES}{said}" if said else ""
    error = said.rpartition("Traceback ")[2]
    if -code in CRASHES:
        code = own or code
    if code == -signal.SIGABRT or (code > 0 and look.COMMUNICATION.search(error)):
        time.sleep(FIRST_S)  # NCCL aborts a rank, and gloo raises, where another one is gone
    if code < 0 and -code not in ENDS:
        how, cure = how_it_ended(Death(End(0, code, 0, None, "")))
        if own == 0 and -code in CRASHES:
            how = f"was ended by {signal.Signals(-code).name} after the script's last line"
            cure = "Threads of native code may still have run: end the script with destroy_process_group()."
        cure = f" {cure}" if cure and not mine.max_restarts else ""
        died = f"Rank {mine.rank} died: the process of {script.path} on {here} {how}.{cure}"
        raise WorkerDied(died + repeated)
    if code:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise JobError(f"{script.path} ended with {how}.{repeated}")


def _run(script: Script, folder: str, number: int, last: deque[str]) -> tuple[int, int | None]:
    """Run the script in a folder until it ends, and leave its last lines in `last`.

    Return the exit code of its process, and that with which the script's own code had ended before; None if it had not.
    They differ where the process crashes at its end, as native threads, such as gloo's, may still run then.
    """
    ours, theirs = Pipe()
    with ExitStack() as stack:
        (out, to_out), (err, to_err), (rows, to_rows), (end, to_end) = (os.pipe() for _ in range(4))
        for file in (out, err, rows, end):
            stack.callback(os.close, file)
        ours.send((script.is_module, script.beside(folder), OF_RANK, to_end))
        with theirs, ExitStack() as until_it_runs:
            for file in (to_out, to_err, to_rows, to_end):
                until_it_runs.callback(os.close, file)
            process = subprocess.Popen(
                # `ps` shows the script by its name and arguments.
                [sys.executable, "-u", PROCESS, str(theirs.fileno()), script.path, *script.arguments],
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                pass_fds=[theirs.fileno(), to_rows, to_end],
                cwd=folder,
                env=_environment(script) | {ROWS: str(to_rows)},
                start_new_session=True,  # Ctrl-C is for the command, which tells the ranks
            )
        _processes.append(process)
        look.ask_script = lambda: _ask(ours, number)

        try:
            has_ended = _Group(process).has_ended
            send_output(out, err, rows, has_ended, lambda lines: _send(lines, number, last), rank.send_row)
        finally:
            _processes.clear()
            _signalled.clear()
            look.ask_script = None
        os.set_blocking(end, False)
        with suppress(BlockingIOError):
            if own := os.read(end, 4):
                return process.returncode, int(own)
    return process.returncode, None


def _send(lines: Lines, number: int, last: deque[str]) -> None:
    """Send what the script has printed to the client as a row; keep the last lines."""
    # PyTorch begins an error's lines with the rank, as the command does.
    lines = [(is_error, line.removeprefix(f"[rank{number}]: ")) for is_error, line in lines]
    last.extend(line for _, line in lines)
    rank.send_row({"output": lines})


def _environment(script: Script) -> dict[str, str]:
    """Return the script's variables: its worker's, the user's, and those that tell its place, as torchrun does."""
    variables = {**os.environ, **script.environment}
    if threads := [script.environment[name] for name in THREADS if name in script.environment]:
        variables |= {**dict.fromkeys(THREADS, threads[0]), **script.environment}  # PyTorch takes the smallest
    if HASH_SEED in variables.items() - script.environment.items():
        del variables[HASH_SEED[0]]
    return variables | ({} if script.virtual_local_rank else _local_variables(variables))


def _local_variables(found: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell a script its place on its host, as torchrun does. found: those that it has.

    Its GPU is then cuda:LOCAL_RANK: where each worker of a host sees another GPU first, the script sees these, in the
    order of the ranks, and then what else its worker sees. Raises JobError if it has no such GPU.
    """
    mine = rank.assignment()
    assert mine
    place = mine.place
    variables = {name.upper(): str(number) for name, number in place._asdict().items()}
    visible = found.get("CUDA_VISIBLE_DEVICES", "")
    rank.tell_ranks("visible", visible)
    if not (seen := _gpus(visible)):
        return variables
    begin = mine.rank - place.local_rank
    all_seen = rank.told_by(range(begin, begin + place.local_world_size), "visible")
    own = [gpu for gpus in all_seen for gpu in _gpus(gpus)[:1]]
    if len(set(own)) == place.local_world_size:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys([*own, *seen]))
    elif len(seen) <= place.local_rank:
        raise JobError(
            f"Rank {mine.rank} has LOCAL_RANK {place.local_rank} on its host, and its worker sees only "
            f"CUDA_VISIBLE_DEVICES={','.join(seen)}, so it would have no GPU of its own: give --virtual-local-rank."
        )
    return variables


def _gpus(visible: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names; CUDA sees none after -1."""
    gpus = [gpu.strip() for gpu in visible.split(",")]
    return list(takewhile(lambda gpu: gpu not in ("", "-1", "NoDevFiles"), gpus))


class _Group:
    """A script's process, and what it has started in its group."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._late = process, 0.0

    def has_ended(self) -> bool:
        """Return whether the script has ended; what it leaves behind has TIDY_S to end, and is killed then.

        multiprocessing's own helper needs a moment to free memory.
        """
        if self._process.poll() is None:
            return False
        self._late = self._late or time.monotonic() + TIDY_S
        try:
            os.killpg(self._process.pid, 0 if time.monotonic() < self._late else signal.SIGKILL)
        except ProcessLookupError:
            return True
        return time.monotonic() >= self._late


def signal_script(number: int) -> bool:
    """Send a signal to the script that this worker runs; return whether there is one.

    It is sent one alone: another would meet it where it saves.
    """
    for process in _processes:
        if not _signalled:
            process.send_signal(number)
            _signalled.append(number)
    return bool(_processes)


@contextmanager
def _unpacked(script: Script) -> Iterator[str]:
    """Yield the folder to run in; one that was sent along exists for the block."""
    if script.archive is None:
        may_run_elsewhere = script.is_module or Path(script.path).is_absolute()
        yield str(Path.cwd()) if may_run_elsewhere and not Path(script.folder).is_dir() else script.folder
        return
    with TemporaryDirectory(dir=get_worker().local_directory) as folder:
        with tarfile.open(fileobj=io.BytesIO(script.archive)) as archive:
            archive.extractall(folder, filter="data")
        yield folder


def _ask(connection: Connection, number: int) -> look.Look:
    """Return how the script's process looks."""
    with suppress(OSError, EOFError):
        while connection.poll():  # an answer that came too late
            connection.recv()
        connection.send("look")
        if connection.poll(ANSWER_S):
            answer = connection.recv()
            if isinstance(answer, Exception):
                raise answer
            return look.look_at(number, *answer)
    return look.Look(number, trouble="does not answer: its script is stopped, or native code in it holds Python's lock")
