"""The proxy in front of notebook 05's storage holds back each request once, and changes nothing."""

import http.client
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import pytest
from samples import http_server

from workshop_utils.reading.latency import hold_back_requests

DELAY_S = 0.4
BODY = os.urandom(2**22)  # many packets
N_CONNECTIONS = 16


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps its connections
    everybody = threading.Barrier(N_CONNECTIONS, timeout=240)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/together":
            self.everybody.wait()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def address():
    with http_server(Echo) as server, hold_back_requests(server.url, DELAY_S) as address:
        yield address.removeprefix("http://")


def seconds_for(address, *bodies, path="/"):
    """Return the seconds of each request, one after the other on one connection."""
    connection, seconds = http.client.HTTPConnection(address, timeout=240), []
    for body in bodies:
        start = time.perf_counter()
        connection.request("POST", path, body)
        assert connection.getresponse().read() == body
        seconds.append(time.perf_counter() - start)
    connection.close()
    return seconds


@pytest.mark.timing
def test_each_request_of_a_connection_is_held_back_once_and_bytes_pass_unchanged(address):
    for seconds in seconds_for(address, b"small", BODY, BODY):
        assert DELAY_S <= seconds < 2 * DELAY_S


@pytest.mark.timing
def test_connections_do_not_wait_for_each_other(address):
    start = time.perf_counter()
    with ThreadPoolExecutor(N_CONNECTIONS) as pool:  # the server answers none before it has heard all
        list(pool.map(lambda n: seconds_for(address, b"%d" % n, path="/together"), range(N_CONNECTIONS)))
    assert time.perf_counter() - start < N_CONNECTIONS * DELAY_S / 2  # one after the other, twice as long
