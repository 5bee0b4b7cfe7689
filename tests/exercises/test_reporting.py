"""Check cells report to the instructor's board where an attendee asks for it; nobody waits for it or fails by it."""

import importlib
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler
from queue import Queue

import pytest
from samples import http_server
from waiting import until

from workshop_utils.exercises import NotYet, exercise, expect, passed, reporting

A_CHECK = """
from workshop_utils.exercises import exercise, expect, passed

@exercise
def check_two(answer):
    expect(answer == 2, "add one and one.")
    passed("Two.")

check_two(2)
"""


@exercise
def check_two(answer):
    expect(answer == 2, "add one and one.")
    passed("Two.")


class Board(BaseHTTPRequestHandler):
    """It answers with the server's status, and puts what it was sent into the server's requests."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.put((self.path, dict(self.headers), json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()


@pytest.fixture
def serve():
    """A function that starts a board which answers with a status."""
    with ExitStack() as stack:

        def serve(status):
            board = stack.enter_context(http_server(Board, status=status, requests=Queue()))
            board.url = board.url.replace("http://", "http://Ada:secret@")
            return board

        yield serve


@pytest.fixture
def silent():
    """The address of a board that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://Ada:secret@127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(autouse=True)
def nothing_said_yet():
    importlib.reload(reporting)


def test_without_the_variable_nothing_is_imported_or_started():
    env = {name: value for name, value in os.environ.items() if name != "WORKSHOP_ROOM"}
    after = "\nimport sys, threading\n"
    after += (
        "print(threading.active_count(), 'workshop_utils.exercises.reporting' in sys.modules, 'http' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", A_CHECK + after], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("Correct. Two.\n1 False False\n", "")


def test_a_process_that_ends_after_a_check_sends_nickname_notebook_exercise_and_state_and_no_more(serve):
    board = serve(204)
    subprocess.run([sys.executable, "-c", A_CHECK], env={**os.environ, "WORKSHOP_ROOM": board.url}, check=True)
    path, headers, body = board.requests.get(timeout=120)
    assert body == {"nickname": "Ada", "notebook": "__main__", "exercise": "two", "state": "passed"}
    of_the_board = {"Host": f"127.0.0.1:{board.server_port}", "Authorization": "Bearer secret"}
    of_the_body = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    assert path == "/report" and headers == {**of_the_board, **of_the_body, "Content-Length": headers["Content-Length"]}


def test_the_state_says_how_a_check_ended(serve, monkeypatch):
    board = serve(204)
    monkeypatch.setenv("WORKSHOP_ROOM", board.url)
    failing = exercise(lambda answer: answer.mean())
    for check, answer in ((check_two, 2), (check_two, 3), (failing, 3)):
        with suppress(NotYet):
            check(answer)
    exec("check(None)", {"check": check_two, "our_answer": 2})
    assert [board.requests.get(timeout=120)[2]["state"] for _ in range(4)] == [
        "passed",
        "not yet",
        "not yet",
        "solution",
    ]


@pytest.mark.parametrize("room", ["silent", "nobody"])
def test_a_check_waits_for_no_board(room, silent, monkeypatch, capfd):
    monkeypatch.setattr(reporting, "TIMEOUT_S", 600)
    monkeypatch.setattr(reporting, "PAUSES_S", (0, 600))
    if room == "nobody":
        with socket.create_server(("127.0.0.1", 0)) as closed:
            silent = f"http://Ada:secret@127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("WORKSHOP_ROOM", silent)
    for _ in range(2 * reporting.MOST_WAITING):
        check_two(2)
        with pytest.raises(NotYet, match="^add one and one"):
            check_two(3)
    assert capfd.readouterr() == ("Correct. Two.\n" * 2 * reporting.MOST_WAITING, "")


@pytest.mark.parametrize(
    ("room", "what"),
    [
        ("http://127.0.0.1:8800", "lacks a part"),
        ("http://Ada:secret@127.0.0.1:port", "no address"),
        ("http://NICKNAME:secret@127.0.0.1:8800", "a nickname of your own"),
    ],
)
def test_a_wrong_variable_is_said_once_with_the_cure_and_without_the_token(room, what, monkeypatch, capsys):
    monkeypatch.setenv("WORKSHOP_ROOM", room)
    check_two(2)
    check_two(2)
    said = capsys.readouterr()
    assert said.out == "Correct. Two.\n" * 2
    (line,) = said.err.splitlines()
    assert line.startswith("WORKSHOP_ROOM") and what in line and "secret" not in line
    assert line.endswith("Set it to http://NICKNAME:TOKEN@HOST:PORT, as your instructor gave it, or unset it.")


@pytest.mark.parametrize(("status", "what"), [(403, "token"), (400, "400")])
def test_a_refusal_is_said_once_at_a_later_check(serve, monkeypatch, capsys, status, what):
    monkeypatch.setenv("WORKSHOP_ROOM", serve(status).url)
    said = until(lambda: check_two(2) or capsys.readouterr().err)
    check_two(2)
    assert capsys.readouterr() == ("Correct. Two.\n", "")
    assert len(said.splitlines()) == 1 and what in said and "unset it" in said and "secret" not in said


def test_a_process_that_ends_waits_for_no_board(silent):
    patient = "from workshop_utils.exercises import reporting\nreporting.TIMEOUT_S = 600\n"
    env, command = {**os.environ, "WORKSHOP_ROOM": silent}, [sys.executable, "-c", patient + A_CHECK]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Correct. Two.\n", "")
