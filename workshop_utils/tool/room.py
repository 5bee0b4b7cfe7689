"""Serve a page on which the instructor sees who passed which exercise, and who did not yet.

Check cells post to /report with the attendees' token (`workshop_utils/exercises/reporting.py`); the page, `room.html`,
asks for /board with the instructor's. Both tokens are new at each start. Only a CSV is kept, if wanted.
"""

import asyncio
import errno
import json
import logging
import os
import secrets
import signal
from pathlib import Path

import click
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RequestHandler

from workshop_utils.exercises.reporting import FORM
from workshop_utils.storage import local_path
from workshop_utils.tool.board import Board, RoomIsFull, read_exercises

LONGEST_BODY_BYTES = 600  # a report is shorter, even if its nickname is 20 escaped emoji
PATIENCE_S = 10  # time limit of a request that has begun
READABLE = "abcdefghjkmnpqrstuvwxyz23456789"  # what nobody takes for another letter
EVERYWHERE = ("0.0.0.0", "")  # Tornado takes an empty host for all networks, too
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; script-src 'nonce-{0}'; style-src 'nonce-{0}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def serve_room(project: Path, host: str, port: int, csv: str | os.PathLike | None = None) -> None:
    """Serve the page for the notebooks of `project` until Ctrl-C; print its address and the attendees' line.

    SIGTERM and the end of its terminal end it as Ctrl-C does.

    port: 0 for any free one. csv: a new file, which gets a line for each report as it comes. Raises ClickException if
    it exists or cannot be written, if there are no exercises, and if nothing can listen at `host` and `port`.
    """
    if not (exercises := read_exercises(project / "notebooks")):
        raise click.ClickException(f"No notebook in {project / 'notebooks'} has a cell tagged `check`.")
    try:
        sockets = bind_sockets(port, host)
    except OSError as error:
        cure = "--host is an address of this machine, or 0.0.0.0 for all of them."
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            cure = f"Choose another --port, such as {port + 1}."
        raise click.ClickException(f"Cannot listen at {host}, port {port}: {error.strerror}. {cure}") from error
    board, instructors_token = Board(exercises, log=_new_file(csv) if csv else None), secrets.token_urlsafe(16)
    attendees_token = "".join(secrets.choice(READABLE) for _ in range(10))  # people copy it from a board, by hand
    _announce(host, sockets[0].getsockname()[1], attendees_token, instructors_token)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) != signal.SIG_IGN:  # under `nohup`, the end of the terminal means nothing
            signal.signal(ending, signal.default_int_handler)
    try:
        asyncio.run(_serve(make_app(board, attendees_token, instructors_token), sockets))
    except KeyboardInterrupt:
        click.echo(f"\nEnded; {csv} has what was reported." if csv else "\nEnded; nothing was kept.")


def make_app(board: Board, attendees_token: str, instructors_token: str) -> Application:
    """Return the server's application: attendees may report to `board`, and only the instructor may read it."""
    handlers: list = [
        ("/", _Page),
        ("/report", _Report, {"board": board, "token": attendees_token}),
        ("/board", _Rows, {"board": board, "token": instructors_token}),
    ]
    return Application(handlers, template_path=str(Path(__file__).parent))


async def _serve(app, sockets):
    logging.getLogger("tornado").setLevel(logging.ERROR)  # do not print each bad request of a stranger
    limits = {"max_body_size": LONGEST_BODY_BYTES, "max_header_size": 8192}
    server = HTTPServer(app, **limits, idle_connection_timeout=PATIENCE_S, body_timeout=PATIENCE_S)
    server.add_sockets(sockets)
    await asyncio.Event().wait()  # until Ctrl-C


def _announce(host, port, attendees_token, instructors_token):
    if host in EVERYWHERE:
        from distributed.utils import get_ip

        shown = get_ip()
    else:
        shown = f"[{host}]" if ":" in host else host
    line = "WORKSHOP_ROOM=" + FORM.replace("TOKEN", attendees_token).replace("HOST:PORT", f"{shown}:{port}")
    click.echo(
        f"Your page, for you alone:\n\n  http://{shown}:{port}/#{instructors_token}\n\n"
        "What attendees set, each with a NICKNAME of their own, in a terminal before `make lab`:\n\n"
        f"  export {line}\n\nor in a cell of a notebook:\n\n  %env {line}\n"
    )
    if host in ("127.0.0.1", "localhost", "::1"):
        click.echo("Only this machine reaches it. For others: workshop room --host 0.0.0.0\n")
    click.echo("Ctrl-C ends it.")


def _new_file(csv):
    try:
        return local_path(csv).open("x", buffering=1, newline="", encoding="utf-8")  # 1: each line is written at once
    except FileExistsError as error:
        raise click.ClickException(f"{csv} exists already: give --csv a new name.") from error
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--csv cannot be used ({error}): give it another name.") from error


class _Handler(RequestHandler):
    def initialize(self, board=None, token=None):
        self.board, self.token = board, token

    def set_default_headers(self):
        self.clear_header("Server")
        self.set_header("Cache-Control", "no-store")
        self.set_header("Content-Security-Policy", "default-src 'none'")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("X-Content-Type-Options", "nosniff")

    def prepare(self):
        given = self.request.headers.get("Authorization", "")
        if self.token and not secrets.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise HTTPError(403)


class _Report(_Handler):
    def post(self):
        try:
            said = json.loads(self.request.body)
            self.board.report(*(said[part] for part in ("nickname", "notebook", "exercise", "state")))
        except (ValueError, LookupError, TypeError, RecursionError):
            raise HTTPError(400) from None
        except RoomIsFull:
            raise HTTPError(429) from None
        self.set_status(204)


class _Rows(_Handler):
    def get(self):
        columns = [(one.notebook, one.name.replace("_", " ")) for one in self.board.exercises]
        self.write({"columns": columns, "attendees": self.board.rows()})


class _Page(_Handler):
    """The page without attendees. Its script reads the instructor's token behind the #, which no browser sends."""

    def get(self):
        nonce = secrets.token_urlsafe(16)
        self.set_header("Content-Security-Policy", POLICY.format(nonce))
        self.render("room.html", nonce=nonce)
