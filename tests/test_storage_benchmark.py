"""The storage benchmark holds back each request once, changes nothing, and compares readers of the same bytes."""

import http.client
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from workshop_utils.data import list_photos

DELAY_S = 0.4
BODY = os.urandom(2**22)  # many packets
ROOT = Path(__file__).parents[1]


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps its connections

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def address(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from latency import hold_back_requests

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever).start()
    with hold_back_requests(f"http://127.0.0.1:{server.server_port}", DELAY_S) as address:
        yield address.removeprefix("http://")
    server.shutdown()
    server.server_close()


def seconds_for(address, *bodies):
    """Return the seconds of each request, one after the other on one connection."""
    connection, seconds = http.client.HTTPConnection(address, timeout=30), []
    for body in bodies:
        start = time.perf_counter()
        connection.request("POST", "/", body)
        assert connection.getresponse().read() == body
        seconds.append(time.perf_counter() - start)
    connection.close()
    return seconds


def test_each_request_of_a_connection_is_held_back_once_and_bytes_pass_unchanged(address):
    for seconds in seconds_for(address, b"small", BODY, BODY):
        assert DELAY_S <= seconds < 2 * DELAY_S


def test_an_interrupt_of_the_process_group_leaves_the_proxy_running():
    """Jupyter's stop button sends one."""
    code = (
        "import http.server, os, signal, sys, threading, urllib.request\n"
        "sys.path.append('benchmarks')\n"
        "from latency import hold_back_requests\n"
        "server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
        "with hold_back_requests(f'http://127.0.0.1:{server.server_port}', 0) as address:\n"
        "    try: os.killpg(0, signal.SIGINT); signal.pause()\n"
        "    except KeyboardInterrupt: print(urllib.request.urlopen(address, timeout=20).status)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, start_new_session=True, timeout=60)
    assert done.stdout == "200\n", done.stderr


def test_connections_do_not_wait_for_each_other(address):
    start = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: seconds_for(address, b"%d" % n), range(16)))
    assert time.perf_counter() - start < 4 * DELAY_S


def test_all_readers_give_the_same_bytes_in_the_same_order(monkeypatch, s3):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import storage

    paths = list_photos("s3://workshop/served/dogs", storage_options=s3)[::-1]
    photos = {name: read(paths, s3) for name, read in storage.READERS.items()}
    assert all(found == photos["read_files"] for found in photos.values())
    assert len(set(photos["read_files"])) == len(paths) == 12
