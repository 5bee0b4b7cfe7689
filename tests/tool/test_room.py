"""`workshop room` as an instructor starts it, with a room full of attendees, and its page in Chromium."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

from workshop_utils.tool.cli import main

PROJECT = Path(__file__).parents[2]
WORKSHOP = Path(sys.executable).parent / "workshop"
N = 30


class Served:
    def __init__(self, said, process):
        self.process, self.said = process, said
        self.page = re.search(r"http://\S+/#\S+", said).group()
        self.line = re.search(r"export WORKSHOP_ROOM=(\S+)", said).group(1)
        address = urlsplit(self.line)
        self.host, self.port, self.token = address.hostname, address.port, address.password

    def ask(self, method, path, token, body=None):
        """Return (status, body) of the answer; status None where the server closed the connection instead."""
        connection = HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except ConnectionError:
            return None, b""
        finally:
            connection.close()

    def report(self, **changed):
        said = {
            "nickname": "Eve",
            "notebook": "dask_basics",
            "exercise": "careful_counts",
            "state": "passed",
            **changed,
        }
        return self.ask("POST", "/report", self.token, json.dumps(said))[0]

    def attendees(self):
        return json.loads(self.ask("GET", "/board", urlsplit(self.page).fragment)[1])["attendees"]


@contextmanager
def served(*args):
    command = [WORKSHOP, "room", "--port", "0", *map(str, args)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = "".join(iter(process.stdout.readline, "Ctrl-C ends it.\n"))
            yield Served(said, process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def board():
    with served() as running:
        yield running


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(120_000)  # ends a hang; what a busy machine takes is no failure
    page.said = []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    yield page
    page.close()


def test_thirty_attendees_stand_on_the_page_and_a_cell_turns_green_before_ones_eyes(page):
    names = ["<script>alert(1)</s>", "Zoë", *(f"Attendee {number}" for number in range(N - 2))]
    with served() as room:
        page.goto(room.page)
        page.get_by_text("Nobody yet.").wait_for()
        for number, name in enumerate(names):
            assert room.report(nickname=name, state="not yet" if number % 2 else "passed") == 204
        page.locator(f"tbody tr:nth-child({N})").wait_for()
        assert sorted(page.locator("tbody th").all_inner_texts()) == sorted(names)  # <script> is text
        assert page.locator("#summary").inner_text() == f"{N} attendees, {N // 2} not yet; most are in 02 · dask basics"
        stuck_first = page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.className)")
        assert stuck_first == ["stuck"] * (N // 2) + [""] * (N // 2)
        red = page.locator("tbody tr", has_text="Zoë").locator("[data-state='not yet']")
        assert red.count() == 1 and re.match(r"not yet for .+ min, 1 try", red.inner_text())

        assert room.report(nickname="Zoë") == 204
        page.locator("tbody tr:not(.stuck)", has_text="Zoë").locator("[data-state=passed]").wait_for()
        count = page.locator("thead tr", has=page.locator("[data-state=passed]")).locator("td.here").all_inner_texts()
        assert count[0] == str(N // 2 + 1)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        assert page.locator("tbody tr:first-child td[data-notebook]:visible").count() == 2  # notebook 02 alone
        assert page.said == []
    page.get_by_text("`workshop room` does not answer").wait_for()


def test_the_page_runs_its_own_script_alone_and_no_other_page_frames_it(board):
    with urlopen(board.page.partition("#")[0], timeout=60) as answer:
        policy, text = answer.headers["Content-Security-Policy"], answer.read().decode()
    (nonce,) = set(re.findall(r'nonce="([^"]+)"', text))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'" and rules["script-src"] == f"'nonce-{nonce}'"
    with urlopen(board.page.partition("#")[0], timeout=60) as again:
        assert nonce not in again.read().decode()


@pytest.mark.weekly
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong(board, page, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    for nickname, state in (("Ada", "not yet"), ("Bob", "passed")):
        assert board.report(nickname=nickname, state=state) == 204
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.goto(board.page)
    page.locator("tbody tr", has_text="Bob").wait_for()
    assert axe.Axe().run(page).violations_count == 0


def test_attendees_cannot_read_the_board_and_strangers_can_do_nothing(board):
    instructors_token = urlsplit(board.page).fragment
    report = json.dumps({"nickname": "Eve", "notebook": "dask_basics", "exercise": "careful_counts", "state": "passed"})
    for method, path, tokens in (
        ("GET", "/board", (board.token, "", "ü", "x")),
        ("POST", "/report", (instructors_token, "", "x")),
    ):
        for token in tokens:
            assert board.ask(method, path, token, report if method == "POST" else None)[0] == 403
    assert "Eve" not in [row["nickname"] for row in board.attendees()]
    status, text = board.ask("GET", "/", "")
    assert status == 200 and board.token.encode() not in text and instructors_token.encode() not in text


def test_what_is_no_report_is_answered_with_400(board):
    turned = "E\u202eve"  # shows the text after it from right to left
    for nickname in (" Eve", turned, "x" * 21):
        assert board.report(nickname=nickname) == 400
    for changed in ({"state": "brilliant"}, {"exercise": "cats"}, {"notebook": ""}, {"exercise": []}):
        assert board.report(**changed) == 400
    for body in ("[]", "{}", "[" * 500, "\xff\x00"):
        assert board.ask("POST", "/report", board.token, body)[0] == 400
    assert not [row for row in board.attendees() if row["nickname"].strip()[:1] in ("E", "x")]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_it_ends_its_csv_has_every_report(ending, tmp_path):
    with served("--csv", tmp_path / "room.csv") as running:
        assert running.report(nickname="Ada", state="not yet") == 204
        assert running.report(nickname="Bob", state="x") == 400
        assert running.report(nickname="Ada", state="solution") == 204
        running.process.send_signal(ending)
        assert running.process.wait(60) == (-ending if ending == signal.SIGKILL else 0)
    header, *rows = csv.reader((tmp_path / "room.csv").open(encoding="utf-8"))
    ada = ["Ada", "02-dask-basics", "careful_counts"]
    assert header == ["nickname", "notebook", "exercise", "state", "tries"]
    assert rows == [[*ada, "not yet", "1"], [*ada, "solution", "2"]] and os.listdir(tmp_path) == ["room.csv"]


def test_a_busy_port_and_a_file_that_is_there_are_said_with_the_cure(board, tmp_path):
    (tmp_path / "old.csv").write_text("kept")
    for args, said in (
        (["--port", str(board.port)], "Choose another --port"),
        (["--host", "203.0.113.1"], "--host is an address of this machine"),
        (["--port", "0", "--csv", str(tmp_path / "old.csv")], "give --csv a new name"),
        (["--port", "0", "--csv", "/nowhere/room.csv"], "'/nowhere/room.csv'"),
        (["--port", "0", "--csv", "s3://bucket/room.csv"], "'s3://bucket/room.csv'"),
    ):
        result = CliRunner().invoke(main, ["room", *args])
        assert result.exit_code == 1 and said in result.output
    assert (tmp_path / "old.csv").read_text() == "kept"


def test_the_printed_lines_lead_where_others_reach_it(board):
    assert "workshop room --host 0.0.0.0" in board.said
    assert board.line.startswith("http://NICKNAME:") and f"%env WORKSHOP_ROOM={board.line}" in board.said
    for host in ("0.0.0.0", ""):
        with served("--host", host) as everywhere:
            assert "0.0.0.0" not in everywhere.said and urlsplit(everywhere.page).hostname == everywhere.host
            assert everywhere.report() == 204
