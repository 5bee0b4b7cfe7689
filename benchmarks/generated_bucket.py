"""An S3 bucket of any number of photos that exist only as a listing: a server that answers ListObjectsV2."""

import subprocess
import sys
import time
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

LOOPBACK = "127.0.0.1"
PAGE = 1000  # S3's own most
ROOT = "dogs/"
HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'


@contextmanager
def generated_bucket(folders, n_keys, delay_s):
    """Yield the endpoint of a server, in a process of its own, whose every bucket has `n_keys` JPEGs below ROOT.

    folders: names to spread them over. delay_s: how long each request takes to arrive.
    """
    command = [sys.executable, "-I", __file__, str(n_keys), str(delay_s), *folders]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield f"http://{LOOPBACK}:{server.stdout.readline().strip()}"
        finally:
            server.kill()


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that may wait; with Python's own 5, others come again after a second


class Bucket(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps its connections
    disable_nagle_algorithm = True
    wbufsize = -1  # or headers and body would leave as two packets, and the second wait for an answer to the first

    def do_GET(self):
        time.sleep(self.server.delay_s)
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        body = self.server.page(query["prefix"], int(query.get("continuation-token", 0))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def pages_of(folders, n_keys):
    """Return a function that gives the listing of a prefix with the delimiter "/", from its key number `start` on."""
    share, rest = divmod(n_keys, len(folders))
    sizes = {f"{ROOT}{folder}/": share + (number < rest) for number, folder in enumerate(folders)}

    @cache  # the client's seconds are what is measured
    def page(prefix, start):
        if prefix == ROOT:
            names = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sizes)
            return f"{HEAD}{names}<IsTruncated>false</IsTruncated></ListBucketResult>"
        wnid, end = prefix.removeprefix(ROOT).partition("-")[0], min(start + PAGE, sizes.get(prefix, 0))
        keys = "".join(
            f"<Contents><Key>{prefix}{wnid}_{number:07}.jpg</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{number:032x}&quot;</ETag><Size>20480</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for number in range(start, end)
        )
        more = end < sizes.get(prefix, 0)
        token = f"<NextContinuationToken>{end}</NextContinuationToken>" if more else ""
        return f"{HEAD}{keys}<IsTruncated>{str(more).lower()}</IsTruncated>{token}</ListBucketResult>"

    return page


def serve(n_keys, delay_s, folders):
    with Server((LOOPBACK, 0), Bucket) as server:
        server.page, server.delay_s = pages_of(folders, n_keys), delay_s
        for prefix in (ROOT, *(f"{ROOT}{folder}/" for folder in folders)):
            for start in range(0, n_keys // len(folders) + 1, PAGE):
                server.page(prefix, start)
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
