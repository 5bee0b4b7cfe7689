"""An HTTP proxy before object storage that refuses some requests, cuts some answers short and answers some never."""

import http.client
import random
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from samples import http_server


@contextmanager
def faulty_storage(endpoint, shares, seed=0):
    """Yield (the proxy's address, a Counter of what happened to requests: "503", "cut", "stall" or "passed").

    shares: {fault: share of the requests, in [0, 1]}.
    """
    with http_server(Proxy) as server:
        server.upstream, server.over = endpoint.rpartition("/")[2], threading.Event()
        server.draw, server.happened = random.Random(seed), Counter()
        server.shares = {**shares, "passed": 1 - sum(shares.values())}
        try:
            yield server.url, server.happened
        finally:
            server.over.set()


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps its connections
    wbufsize = -1  # headers and body leave as one packet

    def do_GET(self):
        server = self.server
        (what,) = server.draw.choices(list(server.shares), server.shares.values())
        server.happened[what] += 1
        if what == "stall":
            server.over.wait()
            self.close_connection = True
            return
        status, headers, body = (503, [], b"") if what == "503" else self.ask()
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if what == "cut" else body)
        self.close_connection = what == "cut"

    def ask(self):
        connection = http.client.HTTPConnection(self.server.upstream)
        connection.request("GET", self.path, headers=dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), body
