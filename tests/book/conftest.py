"""One build of the book for all tests, its pages taken apart, and a server."""

from http.server import SimpleHTTPRequestHandler

import pytest
from built import Page, build
from samples import http_server


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

    class OfTheBook(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=book)

    with http_server(OfTheBook) as server:
        yield server.url
