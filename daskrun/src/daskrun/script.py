"""Run a script for torchrun as a rank, in a process of its own: a child of the rank's worker.

In the worker's own process a script would have no main thread, so no signal handlers; and what it leaves behind, such
as global state or a default device, would meet the next job. What it prints goes to the client as rows with a `line`.
"""

import ast
import io
import os
import signal
import subprocess
import sys
import tarfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from select import select
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, NamedTuple

from distributed import get_worker

from daskrun import rank
from daskrun.errors import JobError
from daskrun.metrics import log_metrics
from daskrun.private import send_all
from daskrun.why import look

ANSWER_S = 3  # time limit for a script's answer to how it looks
DRAIN_S = 0.5  # wait for more output of a script that has ended: its children may hold the pipe open
FLUSH_S = 5  # time limit for sending that output
MOST_SHIPPED = 64 * 2**20  # bytes
MOST_LINES = 40  # the last ones of a script that failed, which the error repeats

_processes: list[subprocess.Popen[bytes]] = []  # the one of the script that this worker runs


class Script(NamedTuple):
    """What each rank runs. path: a file, from the folder, or with is_module a module.

    folder: where to run it. archive: what is in that folder, as a tar file, for workers that do not have it.
    """

    path: str
    is_module: bool
    arguments: tuple[str, ...]
    folder: str
    archive: bytes | None

    def beside(self, folder: str) -> str:
        """Return the folder from which the script imports first."""
        return folder if self.is_module else str(Path(folder, self.path).parent)


def script_here(path: str, is_module: bool, arguments: tuple[str, ...], ship: bool) -> Script:
    """Return the script at a path from the working folder. ship: send its folder along, without hidden files.

    Raises JobError where that is too large to send.
    """
    if not ship:
        return Script(path, is_module, arguments, str(Path.cwd()), None)
    folder = Path.cwd() if is_module else Path(path).absolute().parent
    target = io.BytesIO()

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if target.tell() + entry.size > MOST_SHIPPED:
            raise JobError(f"{folder} has more than {MOST_SHIPPED >> 20} MiB: ship a folder of code alone.")
        name = Path(entry.name).name
        return None if name.startswith(".") or name == "__pycache__" else entry

    with tarfile.open(fileobj=target, mode="w:gz", dereference=True) as archive:
        archive.add(folder, "", filter=wanted)
    return Script(path if is_module else Path(path).name, is_module, arguments, str(folder), target.getvalue())


def run_script(script: Script) -> None:
    """Run the script as this rank. Raises JobError with its last lines where it ends with an error.

    Where a signal ends it, this worker ends in the same way: the job then meets a death as any other.
    """
    worker, mine = get_worker(), rank.assignment()
    assert mine
    last: deque[str] = deque(maxlen=MOST_LINES)
    ours, theirs = Pipe()
    with _unpacked(script) as folder:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "daskrun.script_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            cwd=folder,
            start_new_session=True,  # Ctrl-C is for the command, which ends the ranks
        )
        theirs.close()
        ours.send((mine, script))
        output: Any = process.stdout
        printing = Thread(target=_send_output, args=(output, mine.rank, last), daemon=True)
        printing.start()
        look.ask_script = lambda: _ask(ours, mine.rank)
        _processes.append(process)
        try:
            code = process.wait()
            printing.join(DRAIN_S)
            while printing.is_alive() and select([output], [], [], 0)[0]:
                printing.join(DRAIN_S)
        finally:
            _processes.clear()
            look.ask_script = None
    if code < 0 and code != -signal.SIGTERM:
        with suppress(Exception):  # the scheduler is lost, or busy
            send_all(worker, FLUSH_S)
        os.kill(os.getpid(), -code)
    if code:
        how = "SIGTERM" if code < 0 else f"exit code {code}"
        said = "\n".join(last)
        raise JobError(f"Rank {mine.rank}, on worker {worker.address}: {script.path} ended with {how}.\n\n{said}")


def terminate() -> int:
    """Send SIGTERM to the script that this worker runs; return how many there were."""
    for process in _processes:
        process.terminate()
    return len(_processes)


def lacks(script: Script) -> str:
    """Return what this worker lacks to run the script; empty for nothing."""
    with _unpacked(script) as folder:
        file = Path(folder, script.path)
        if not script.is_module and not file.is_file():
            return f"has no file {file}"
        try:
            names = {script.path.partition(".")[0]} if script.is_module else _imports(file)
            for name in sorted(names):
                if not PathFinder.find_spec(name, [script.beside(folder)]) and not find_spec(name):
                    return f"has no module {name!r}, which the script needs"
        except (SyntaxError, ValueError) as error:
            return f"cannot read {file} as Python ({error})"
    return ""


def _imports(file: Path) -> set[str]:
    """Return what a script imports first of all: not in a `try`, an `if` or a function."""
    found = set()
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found} - {"__main__"}


@contextmanager
def _unpacked(script: Script) -> Iterator[str]:
    """Yield the folder to run in; one that was sent along exists for the block."""
    if script.archive is None:
        yield script.folder if Path(script.folder).is_dir() else str(Path.cwd())
        return
    with TemporaryDirectory(prefix="daskrun-") as folder:
        with tarfile.open(fileobj=io.BytesIO(script.archive)) as archive:
            archive.extractall(folder, filter="data")
        yield folder


def _send_output(output: Any, number: int, last: deque[str]) -> None:
    for text in io.TextIOWrapper(output, errors="replace", newline="\n"):
        line = text.rstrip("\r\n").rpartition("\r")[2]  # of a progress bar, as it stands at last
        line = line.removeprefix(f"[rank{number}]: ")  # PyTorch writes it before the lines of an error
        last.append(line)
        log_metrics(line=line)


def _ask(connection: Connection, number: int) -> look.Look:
    """Return how the script's process looks."""
    with suppress(OSError, EOFError):
        while connection.poll():  # an answer that came too late
            connection.recv()
        connection.send("look")
        if connection.poll(ANSWER_S):
            return connection.recv()
    return look.Look(number, trouble="its script's process is stopped, in native code that holds Python, or at its end")
