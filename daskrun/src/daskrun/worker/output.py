"""What a rank prints, on its way to the client: read on its worker, and sent in batches."""

import fcntl
import os
import selectors
import struct
import termios
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

BATCH_S = 0.1  # between two batches, which a rank's loop does not wait for
FULL = 64 * 1024  # bytes, as many as a pipe holds
BUSY_S = 0.01  # between two batches of a script that prints much; with none, a scheduler and a screen would fall behind
REST_S = 1  # after which what has no newline is shown
BAR_S = 5  # between two states of a progress bar that are shown
LONGEST = 2**20  # bytes of a line, after which it goes on as another one

ANSWERS = "reply", "prompt", "resumed"  # messages before which a line is shown though it has no end

Lines = list[tuple[bool, bytes]]  # of each line: whether it was printed as an error, and what


def pump(
    out: int,
    err: int,
    messages: Connection,
    ends: int,
    has_ended: Callable[[Callable[[], bool]], bool],
    send: Callable[[Lines], None],
    receive: Callable[[tuple], None],
) -> None:
    """Pass on what a process writes to two pipes, and its messages, until it has ended.

    What it has started may hold the pipes open: after the end, only what they hold then is read.

    Args:
        ends: A descriptor that's readable at the process's end, -1 for none.
        has_ended: Whether the process has ended; asked in each turn, with a
            function that tells whether all messages have been received.
        send: Takes lines of output.
        receive: Takes a message.
    """
    streams, watched = {out: _Stream(), err: _Stream()}, [out, err, messages.fileno(), *[ends] * (ends >= 0)]
    with selectors.DefaultSelector() as selector:
        for file in watched:
            selector.register(file, selectors.EVENT_READ)
        over, is_open = False, True
        while not over:
            over = has_ended(lambda: not is_open or not messages.poll())  # noqa: B023  # it's called at once
            began, n_bytes, lines, message = time.monotonic(), 0, [], None
            ready = {key.fd for key, _ in selector.select(0 if over else BATCH_S)}
            if ends in ready:
                selector.unregister(ends)
            if is_open and messages.poll():
                try:
                    message = messages.recv()
                except (EOFError, OSError):  # also in the midst of a message
                    is_open = False
                    selector.unregister(messages.fileno())
            for file, stream in streams.items():  # what was printed before the message comes before it
                n_waiting = _n_waiting(file)
                data = os.read(file, n_waiting) if n_waiting or file in ready else b""
                if file in ready and not data:  # whoever could write has closed it
                    selector.unregister(file)
                n_bytes += len(data)
                is_last = over or (message is not None and message[0] in ANSWERS)
                lines += [(file == err, line) for line in stream.lines(data, is_last)]
            if lines:
                send(lines)
            if message is not None:
                receive(message)
            elif not over and n_bytes:
                rest_s = max(0, began + (BUSY_S if n_bytes > FULL / 4 else BATCH_S) - time.monotonic())
                wait([messages] if is_open else [], rest_s)


def _n_waiting(pipe: int) -> int:
    """Return how many bytes a pipe holds."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


class _Stream:
    """One of a process's streams, made into lines; of the states of a progress bar, the last one."""

    def __init__(self) -> None:
        self._rest = b""  # after the last newline
        self._began = self._heard = 0.0  # of the rest, and of its last bytes

    def lines(self, data: bytes, is_last: bool) -> list[bytes]:
        """Return the lines that are complete with this, or wait for their end too long; all if it is the last."""
        *whole, rest = (self._rest + data).split(b"\n")
        now = time.monotonic()
        self._heard = now if data else self._heard
        self._began = now if whole or not self._rest else self._began
        is_late = now > self._began + BAR_S if b"\r" in rest else now > self._heard + REST_S
        if rest and (is_last or is_late or len(rest) > LONGEST):
            whole, rest = [*whole, rest], b""
        self._rest = rest
        return [line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole]
