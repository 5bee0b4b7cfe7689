"""Which rank this process is, and its connection to its worker."""

import os
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from daskrun.protocol import Assignment

RANK_PID = "DASKRUN_RANK_PID"  # names the process of the rank, also to what that starts


class Context:
    """This process as a rank. What's sent goes to the worker, from any thread."""

    def __init__(self, connection: Connection, mine: Assignment, host: str, port: int, is_script: bool) -> None:
        self.mine, self.host, self.port, self.is_script = mine, host, port, is_script
        self.requests: SimpleQueue[tuple[int, bytes]] = SimpleQueue()  # of a client to a rank that stays
        self.lines: SimpleQueue[str | None] = SimpleQueue()  # for the debugger; None if nobody answers it
        self.is_idle = False  # a rank that stays, and waits for a request
        self.stopped_at = ""  # where the debugger waits for a line
        self._connection, self._sending = connection, threading.Lock()
        self._socket = os.fstat(connection.fileno())

    def send(self, kind: str, *about: Any) -> None:
        """Send a message. Raises OSError if the program has closed the connection."""
        with self._sending:
            if not os.path.samestat(os.fstat(self._connection.fileno()), self._socket):  # a file of the program's
                raise OSError("the connection to the worker is closed")
            self._connection.send((kind, *about))


_context: Context | None = None


def enter(context: Context) -> None:
    """Make this process a rank, for good."""
    global _context
    _context = context
    os.environ[RANK_PID] = str(os.getpid())


def current() -> Context | None:
    """Return this rank's context; None outside of a job, and in a process that a rank has started."""
    return None if is_started_by_a_rank() else _context


def is_started_by_a_rank() -> bool:
    """Return whether a rank, or something that it started, has started this process."""
    return os.environ.get(RANK_PID, str(os.getpid())) != str(os.getpid())
