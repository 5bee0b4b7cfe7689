"""One build of the book for all tests, its pages taken apart, and a server."""

import functools
import http.server
import threading

import pytest
from built import Page, build


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    return build(tmp_path_factory.mktemp("book"), "-W", "--keep-going")


@pytest.fixture(scope="session")
def pages(book):
    """Every page of the book under its path, such as docs/glossary.html."""
    paths = [path for path in book.rglob("*.html") if "_static" not in path.parts]
    return {path.relative_to(book).as_posix(): Page(path.read_text()) for path in sorted(paths)}


@pytest.fixture(scope="session")
def site(book):
    """The address under which this machine serves the book."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=book)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
