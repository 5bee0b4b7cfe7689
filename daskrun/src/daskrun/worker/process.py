"""A rank's process, as its worker sees it: what it sends, how it looks, how it ends."""

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import dask
import psutil
from dask.utils import parse_timedelta

from daskrun.protocol import Ended, Order, Snapshot, Store
from daskrun.why.look import Look, look_at, silent
from daskrun.worker.output import Lines, pump
from daskrun.worker.template import new_process

ANSWER_S = 3  # time limit for a process's answer to where it is
LOOK_S = 0.5  # over which CPU use is measured
USAGE_S = 1.0  # between two reports of its CPU and memory
TIDY_S, ASKED_S = 0.5, 1.5  # after its end: until what it has started gets SIGTERM, and until SIGKILL
ENDS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # which ask for an end, so that it's no death
MOST_WRITTEN = 100_000  # characters of stacks


class Process:
    """The process of one rank.

    Args:
        order: What it's told to do.
        environment: All of its variables.
        limit_bytes: The most memory that this process and the rank's may have together; 0 for no limit.
    """

    def __init__(self, order: Order, environment: Mapping[str, str], starts_fresh: bool, limit_bytes: float) -> None:
        ours, theirs = socket.socketpair()
        self._stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115  it's closed with the process
        (self._out, out), (self._err, err) = os.pipe(), os.pipe()
        try:
            fds = [theirs.fileno(), out, err, self._stacks.fileno()]
            self._process, self.no_fork = new_process(fds, environment, starts_fresh)
        finally:
            os.close(out)
            os.close(err)
            theirs.close()
        self.pid = self._process.pid
        self._messages = Connection(ours.detach())
        with suppress(OSError):  # it has ended already
            self._messages.send(order)
        self._rank = order.mine.rank if order.mine else 0
        self._limit, self._over_limit = limit_bytes, False
        self._look_s = parse_timedelta(dask.config.get("distributed.worker.memory.monitor-interval"))
        self._signalled, self._killed_before = 0, _killed_by_the_kernel()
        self._end: tuple[int, int] | None = None
        self._ended_at = 0.0
        self._is_told = False
        self._answer: list[Snapshot | str] = []
        self._answered, self._asking, self._telling = threading.Event(), threading.Lock(), threading.Lock()

    def wait(
        self,
        send: Callable[[Lines], None],
        receive: Callable[..., None],
        usage: Callable[[float, int], None],
        on_exit: Callable[[Ended], None],
    ) -> Ended:
        """Pass on what the process sends until it and all that it has started have ended.

        Args:
            send: Takes lines of its output.
            receive: Takes other messages.
            usage: Takes the cores that it uses, and bytes of memory.
            on_exit: Takes the end of the process itself, which comes first.
        """

        def heard(message: tuple) -> None:
            kind, *about = message
            if kind == "snapshot":
                self._answer[:] = about
                self._answered.set()
            else:
                receive(kind, *about)

        def has_ended(all_received: Callable[[], bool]) -> bool:
            if not self._end:
                self._end, self._ended_at = self._process.poll(), time.monotonic()
                return False  # what it had printed is read in this turn
            if not self._is_told and all_received():  # asked after its end
                self._is_told = True
                on_exit(self._ended())
            return self._is_told and self._group_has_ended()

        threading.Thread(target=self._watch, args=[usage], name="daskrun-watch", daemon=True).start()
        try:
            pump(self._out, self._err, self._messages, self._process.fileno(), has_ended, send, heard)
            return self._ended()
        finally:
            self._group_signal(signal.SIGKILL)
            self._process.close()
            self._messages.close()
            for fd in (self._out, self._err):
                os.close(fd)
            self._stacks.close()

    def signal(self, number: int) -> None:
        """Send a signal to the process alone, which may save and end. It's sent one: another could end it meanwhile."""
        if not self._signalled and not self._end:
            self._signalled = int(number)
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def tell(self, kind: str, *about: object) -> None:
        """Send the process a message, unless it has ended."""
        with self._telling, suppress(OSError):
            self._messages.send((kind, *about))

    def kill(self) -> None:
        """End the process and what it has started, at once."""
        self._group_signal(signal.SIGKILL)

    def look(self) -> Look:
        """Return where the process is; wait for its answer, and look at it from outside if it has none."""
        with self._asking:
            self._answered.clear()
            self.tell("look")
            if self._answered.wait(ANSWER_S):
                answer = self._answer.pop()
                if isinstance(answer, Snapshot):
                    return look_at(self._rank, answer)
                return Look(self._rank, trouble=f"could not be looked at: {answer}")
            return self._look_from_outside()

    def _look_from_outside(self) -> Look:
        try:
            process = psutil.Process(self.pid)
            status, before = process.status(), os.fstat(self._stacks.fileno()).st_size
            if status != psutil.STATUS_STOPPED and _handles_sigusr1(self.pid):
                os.kill(self.pid, signal.SIGUSR1)  # faulthandler writes also while native code holds Python's lock
            process.cpu_percent()
            time.sleep(LOOK_S)
            return silent(self._rank, self.pid, process.status(), process.cpu_percent() / 100, self._written(before))
        except (psutil.NoSuchProcess, OSError, ValueError):  # it has just ended
            return Look(self._rank, trouble="has no process any more")

    def _watch(self, usage: Callable[[float, int], None]) -> None:
        """Look at its CPU and memory until it has ended, and end it when that comes to the limit."""
        shown_at = time.monotonic()
        with suppress(psutil.Error):
            process, worker = psutil.Process(self.pid), psutil.Process()
            process.cpu_percent()
            while not self._end:
                time.sleep(self._look_s if self._limit else USAGE_S)
                ours, its = worker.memory_info().rss, process.memory_info().rss
                # A rank shares most of its pages with the template: its own count, when the cheap sum is too much.
                if 0 < self._limit < ours + its and self._limit < ours + process.memory_full_info().uss:
                    self._over_limit = True
                    self.kill()
                if time.monotonic() > shown_at + USAGE_S:
                    shown_at = time.monotonic()
                    usage(process.cpu_percent() / 100, its)

    def _ended(self) -> Ended:
        code, peak_bytes = self._end or (0, 0)
        return Ended(
            code,
            peak_bytes,
            _killed_by_the_kernel() > self._killed_before,
            int(self._limit) if self._over_limit else 0,
            self._written(0),
        )

    def _written(self, begin: int) -> str:
        with suppress(OSError, ValueError):
            return os.pread(self._stacks.fileno(), MOST_WRITTEN, begin).decode(errors="replace")
        return ""

    def _group_has_ended(self) -> bool:
        """Return whether what the process has started has ended, too; ask it to, and end it a moment later."""
        late_s = time.monotonic() - self._ended_at
        try:
            os.killpg(self.pid, 0)
            if late_s > ASKED_S:
                os.killpg(self.pid, signal.SIGKILL)
                return True
            if late_s > TIDY_S or self._end[0]:  # type: ignore[index]
                os.killpg(self.pid, signal.SIGTERM)
        except (ProcessLookupError, PermissionError):
            return True
        return False

    def _group_signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def new_store(store: Store, listening: socket.socket, environment: Mapping[str, str], starts_fresh: bool) -> ExitStack:
    """Return what ends the process that serves the ranks' store, which begins to serve in a moment."""
    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull, "w") as null:
        fds = [theirs.fileno(), null.fileno(), 2, null.fileno(), listening.fileno()]
        process, _ = new_process(fds, environment, starts_fresh)
    connection = Connection(ours.detach())
    with suppress(OSError):
        connection.send(Order(store))
    ends = ExitStack()
    ends.callback(process.close)
    ends.callback(connection.close)
    return ends


def _handles_sigusr1(pid: int) -> bool:
    """Return whether a process handles SIGUSR1, which would end it otherwise."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return True  # no Linux: faulthandler was set up before anything else ran


def _killed_by_the_kernel() -> int:
    """Return how many processes of our cgroup the kernel has killed for want of memory."""
    with suppress(OSError, KeyError, IndexError):  # no Linux, or cgroups of version 1
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        events = Path(f"/sys/fs/cgroup{group}/memory.events").read_text().splitlines()
        return int(dict(line.split() for line in events)["oom_kill"])
    return 0
