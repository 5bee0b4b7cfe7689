"""Tell the instructor's board what a check said of an exercise, where WORKSHOP_ROOM asks for it; never wait for it."""

import atexit
import json
import os
import sys
import time
from contextlib import suppress
from functools import cache
from http.client import HTTPConnection, HTTPException
from queue import Full, Queue
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

FORM = "http://NICKNAME:TOKEN@HOST:PORT"
LONGEST_NICKNAME = 20  # characters
MOST_WAITING = 50  # reports in the queue; while it is full, more are dropped
TIMEOUT_S = 2.0  # time limit of a connection, and of its answer
PAUSES_S = (0, 3, 30)  # pause before each try to send a report: a laptop's network comes and goes
LAST_MOMENT_S = 0.5  # time that a process at its end leaves to reports on their way
_said: set[str] = set()  # complaints that were printed, each once


class Room(NamedTuple):
    """Where to report, and as whom: what WORKSHOP_ROOM says."""

    nickname: str
    token: str
    host: str
    port: int


def report(notebook: str, exercise: str, state: str) -> None:
    """Queue a report for the room that WORKSHOP_ROOM names: an exercise is now in a state. Return at once.

    notebook: the module of its check, such as "dask_basics". state: "passed", "not yet" or "solution".
    Complains on stderr, once, about a wrong variable and about a room that refused a report.
    """
    try:
        room = read_room(os.environ.get("WORKSHOP_ROOM", ""))
    except ValueError as error:
        _say_once(f"{error} Set it to {FORM}, as your instructor gave it, or unset it.")
        return
    if room is None:
        return
    waiting, refusals = _sender()
    with suppress(Full):
        said = {"nickname": room.nickname, "notebook": notebook, "exercise": exercise, "state": state}
        waiting.put_nowait((room, said))
    if room in refusals:
        _say_once(f"WORKSHOP_ROOM: the room at {room.host}:{room.port} {refusals[room]}.")


def read_room(text: str) -> Room | None:
    """Return the Room that a value of WORKSHOP_ROOM names, None for an empty one.

    Raises ValueError, with the reason and without the token, for anything but http://NICKNAME:TOKEN@HOST:PORT.

    >>> read_room("http://Ada:secret@192.168.1.5:8800")
    Room(nickname='Ada', token='secret', host='192.168.1.5', port=8800)
    """
    if not text.strip():
        return None
    try:
        parts = urlsplit(text.strip())
        nickname, port = unquote(parts.username or "").strip(), parts.port
    except ValueError as error:
        raise ValueError("WORKSHOP_ROOM is no address.") from error
    if parts.scheme != "http" or not (parts.hostname and port and parts.password and parts.password.isascii()):
        raise ValueError("WORKSHOP_ROOM lacks a part of its address.")
    if nickname == "NICKNAME" or not is_nickname(nickname):
        raise ValueError(f"WORKSHOP_ROOM needs a nickname of your own, of 1 to {LONGEST_NICKNAME} characters.")
    return Room(nickname, parts.password, parts.hostname, port)


def is_nickname(text: Any) -> bool:
    """Return whether `text` may stand on the board: 1 to 20 printable characters, no blank at either end."""
    return isinstance(text, str) and 0 < len(text) <= LONGEST_NICKNAME and text.isprintable() and text == text.strip()


@cache
def _sender():
    """Return the queue of reports and what rooms refused; the first call starts the thread that sends."""
    waiting: Queue = Queue(MOST_WAITING)
    refusals: dict[Room, str] = {}
    Thread(target=_send_all, args=(waiting, refusals), name="workshop-room", daemon=True).start()
    atexit.register(_wait_a_moment, waiting)
    return waiting, refusals


def _send_all(waiting, refusals):
    while True:
        room, said = waiting.get()
        for pause_s in PAUSES_S:
            time.sleep(pause_s)
            try:
                status = _send(room, said)
            except (OSError, HTTPException, ValueError):  # nobody answers, or not in time, or not HTTP; no such host
                continue
            if status == 403:
                refusals[room] = "does not know your token: set today's, as your instructor gave it, or unset it"
            elif status != 204:
                refusals[room] = f"refused a report ({status}): tell your instructor, or unset it"
            break
        waiting.task_done()


def _send(room, said):
    connection = HTTPConnection(room.host, room.port, timeout=TIMEOUT_S)
    try:
        headers = {"Authorization": f"Bearer {room.token}", "Content-Type": "application/json"}
        connection.request("POST", "/report", json.dumps(said), headers)
        return connection.getresponse().status
    finally:
        connection.close()


def _wait_a_moment(waiting):
    with waiting.all_tasks_done:
        waiting.all_tasks_done.wait_for(lambda: not waiting.unfinished_tasks, LAST_MOMENT_S)


def _say_once(text):
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr)
