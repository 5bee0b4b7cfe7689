"""obstore asks S3 for what s3fs would ask for, in the same name; where it cannot, s3fs does."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from samples import http_server

from workshop_utils import photos
from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.photos import list_photos, read_files
from workshop_utils.reading import s3 as module
from workshop_utils.reading.s3 import FAILURES, PAUSE_S

REGION = "eu-west-9"
FOLDER, OTHER = (breed.folder for breed in BREEDS[:2])


class Answers(BaseHTTPRequestHandler):
    """A bucket whose every key holds what the request said of itself: path, access key, region, token."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.agents.append(self.headers["User-Agent"].partition("/")[0])
        signed = re.search("Credential=([^/]+)/[^/]+/([^/]+)", self.headers.get("Authorization", ""))
        if self.server.only_region and (not signed or signed[2] != self.server.only_region):
            return self.answer(301, b"", {"x-amz-bucket-region": self.server.only_region})
        said = [self.path, *(signed.groups() if signed else ()), self.headers.get("x-amz-security-token")]
        headers = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "x-amz-bucket-region": self.server.only_region}
        self.answer(200, repr(said).encode(), headers)

    do_HEAD = do_GET

    def answer(self, status, body, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


class ListedAnswers(Answers):
    """The same, which lists `keys` as S3 does; the server of the fixture `s3` makes one slash of several."""

    def do_GET(self):
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        if "list-type" not in query:
            return super().do_GET()
        self.server.agents.append(self.headers["User-Agent"].partition("/")[0])
        prefix = query.get("prefix", "")
        below = [key.removeprefix(prefix) for key in self.server.keys if key.startswith(prefix)]
        folders = sorted({key.partition("/")[0] for key in below if "/" in key})
        said = "".join(f"<CommonPrefixes><Prefix>{prefix}{name}/</Prefix></CommonPrefixes>" for name in folders)
        about = "<Size>9</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        files = [key for key in below if "/" not in key]
        said += "".join(f"<Contents><Key>{prefix}{name}</Key>{about}</Contents>" for name in files)
        self.answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{said}</ListBucketResult>".encode(), {})


@pytest.fixture
def server(monkeypatch, tmp_path):
    """It says in `agents` who asked."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_S3"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with http_server(ListedAnswers, agents=[], only_region=None, keys=[]) as server:
        yield server


def read_by_each(server, options, request):
    """Return what obstore reads, and what s3fs does."""
    paths = ["s3://bucket/a b.jpg", "s3://bucket/deep/50%.jpg"]
    by_obstore = read_files(paths, options)
    assert set(server.agents) == {"object_store"}, by_obstore
    request.getfixturevalue("without_obstore")
    server.agents.clear()
    by_s3fs = read_files(paths, options)
    assert set(server.agents) == {"aiobotocore"}, by_s3fs
    return by_obstore, by_s3fs


@pytest.mark.parametrize(
    "options",
    [
        {"anon": True},
        {"key": "me", "secret": "hush", "token": "today's"},
        {"key": "me", "secret": "hush", "region_name": REGION},
    ],
    ids=str,
)
def test_options_mean_to_obstore_what_they_mean_to_s3fs(options, server, request):
    options = dict(options)
    region = {"region_name": options.pop("region_name")} if "region_name" in options else {}
    by_obstore, by_s3fs = read_by_each(
        server, {**options, "client_kwargs": {"endpoint_url": server.url, **region}}, request
    )
    assert by_obstore == by_s3fs and (b"'me'" in by_s3fs[0]) == ("anon" not in options)
    assert (REGION.encode() in by_s3fs[0]) == bool(region)


def test_the_environment_signs_for_obstore_as_for_s3fs(server, request, monkeypatch):
    settings = {"ENDPOINT_URL": server.url, "ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "hush", "SESSION_TOKEN": "it"}
    for name, value in {**settings, "DEFAULT_REGION": REGION}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    by_obstore, by_s3fs = read_by_each(server, None, request)
    assert by_obstore == by_s3fs and all(word in by_s3fs[0] for word in (b"'me'", b"'it'", REGION.encode()))


def test_a_profile_is_left_to_s3fs(server, monkeypatch, tmp_path):
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text("[work]\naws_access_key_id = me\naws_secret_access_key = hush\n")
    (folder / "config").write_text(f"[profile work]\nregion = {REGION}\nendpoint_url = {server.url}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    (content,) = read_files(["s3://bucket/1.jpg"])
    assert b"'me'" in content and REGION.encode() in content and set(server.agents) == {"aiobotocore"}


@pytest.mark.parametrize(
    "options",
    [{"requester_pays": True}, {"config_kwargs": {"s3": {"addressing_style": "path"}}}, {"version_aware": True}],
    ids=str,
)
def test_what_obstore_would_take_otherwise_is_left_to_s3fs(options, server):
    options = {"anon": True, "client_kwargs": {"endpoint_url": server.url}, **options}
    assert b"/bucket/1.jpg" in read_files(["s3://bucket/1.jpg"], options)[0]
    assert set(server.agents) == {"aiobotocore"}


def test_an_endpoint_that_only_obstore_would_obey_is_not_asked(server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert b"/bucket/1.jpg" in read_files(["s3://bucket/1.jpg"], {"anon": True})[0]
    assert set(server.agents) == {"aiobotocore"}


@pytest.mark.parametrize("key", ["twice//1.jpg", "up/../1.jpg", "here/./1.jpg", "folder/", "/1.jpg"])
def test_a_key_that_obstore_would_change_is_left_to_s3fs_and_no_other_key(key, server):
    options = {"anon": True, "client_kwargs": {"endpoint_url": server.url}}
    contents = read_files([f"s3://bucket/{key}"] * 4 + ["s3://bucket/1.jpg"], options)
    assert all(f"/bucket/{key}".encode() in content for content in contents[:4])
    assert sorted(server.agents) == ["aiobotocore"] * 4 + ["object_store"]


@pytest.mark.parametrize("odd", [f"{FOLDER}//2.jpg", f"/{FOLDER}/2.jpg", f"{FOLDER}//", f"{FOLDER}/./2.jpg"])
def test_a_listing_with_a_key_that_obstore_refuses_costs_one_question_to_s3fs_and_ends_nothing(odd, server, capsys):
    server.keys = [f"dogs/{FOLDER}/1.jpg", f"dogs/{odd}", f"dogs/{OTHER}/1.jpg"]
    photos._say.cache_clear()
    root, options = "s3://bucket/dogs", {"anon": True, "client_kwargs": {"endpoint_url": server.url}}
    for _ in range(FAILURES + 1):
        server.agents.clear()
        assert list_photos(root, storage_options=options) == [f"{root}/{FOLDER}/1.jpg", f"{root}/{OTHER}/1.jpg"]
        assert sorted(server.agents) == ["aiobotocore", *["object_store"] * 3]
    said = capsys.readouterr().out
    if "//" in f"dogs/{odd}":
        assert f"'{'dogs' if odd.startswith('/') else FOLDER}//'" in said and "(1)" in said
    server.agents.clear()
    read_files([f"{root}/{FOLDER}/1.jpg"], options)
    assert server.agents == ["object_store"]


def test_an_address_that_obstore_refuses_is_left_to_s3fs_and_ends_nothing(server):
    server.keys = [f"all//dogs/{FOLDER}/1.jpg"]
    options = {"anon": True, "client_kwargs": {"endpoint_url": server.url}}
    for _ in range(FAILURES + 1):
        (path,) = list_photos("s3://bucket/all//dogs", storage_options=options)
    assert path == f"s3://bucket/all//dogs/{FOLDER}/1.jpg" and set(server.agents) == {"aiobotocore"}
    read_files(["s3://bucket/1.jpg"], options)
    assert server.agents[-1] == "object_store"


@pytest.mark.parametrize("without", [None, "without_obstore"])
def test_the_empty_object_that_makes_a_folder_does_not_count_as_a_file(without, server, request, capsys):
    if without:
        request.getfixturevalue(without)
    photos._say.cache_clear()
    server.keys = ["dogs/", f"dogs/{FOLDER}/", f"dogs/{FOLDER}/1.jpg"]
    options = {"anon": True, "client_kwargs": {"endpoint_url": server.url}}
    assert len(list_photos("s3://bucket/dogs", storage_options=options)) == 1
    assert capsys.readouterr().out == ""


def test_a_folder_is_no_object_of_its_name(s3, s3_admin):
    s3_admin.pipe_file("workshop/folder", b"the object")
    folder, there = read_files(["s3://workshop/folder/", "s3://workshop/folder"], s3)
    assert there == b"the object" and folder != b"the object"
    s3_admin.rm_file("workshop/folder")


def test_after_some_failures_s3fs_reads_for_a_time_and_a_warning_says_so_once(server, monkeypatch):
    from obstore.store import S3Store

    now, get, failing = [1000.0], S3Store.get, [False]

    def failed(store, key):
        if failing[0]:
            raise TimeoutError("the network is away")
        return get(store, key)

    monkeypatch.setattr(S3Store, "get", failed)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    options = {"anon": True, "client_kwargs": {"endpoint_url": server.url}}

    def who_reads():
        assert b"/bucket/1.jpg" in read_files(["s3://bucket/1.jpg"], options)[0]
        return server.agents[-1]

    failing[0] = True
    assert [who_reads() for _ in range(FAILURES - 1)] == ["aiobotocore"] * (FAILURES - 1)
    failing[0] = False
    assert who_reads() == "object_store"  # fewer failures change nothing
    failing[0] = True
    with pytest.warns(UserWarning, match=f"reads s3://bucket for {PAUSE_S} s .*network is away") as said:
        for _ in range(FAILURES):
            who_reads()
    failing[0] = False
    assert who_reads() == "aiobotocore" and len(said) == 1
    now[0] += PAUSE_S
    assert who_reads() == "object_store"


def test_failures_during_the_pause_do_not_count(monkeypatch):
    now, bucket = [1000.0], module._Bucket("bucket", {}, {})
    bucket.store = object()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.warns(UserWarning, match="obstore failed") as said:
        for _ in range(10 * FAILURES):  # that were asked for at the same time
            bucket._note_failure(OSError())
    assert len(said) == 1
    now[0] += PAUSE_S
    bucket._note_failure(OSError())
    assert bucket.ask(lambda store: store) is bucket.store, "one failure is none in a row"


def test_failures_with_a_success_between_are_none_in_a_row():
    bucket = module._Bucket("bucket", {}, {})
    bucket.store = object()
    for _ in range(2 * FAILURES):
        bucket._note_failure(OSError())
        assert bucket.ask(lambda store: store) is bucket.store


def test_a_bucket_in_another_region_is_found_there(server):
    server.only_region = REGION
    options = {"key": "me", "secret": "hush", "client_kwargs": {"endpoint_url": server.url}}
    for _ in range(2):
        assert REGION.encode() in read_files(["s3://bucket/1.jpg"], options)[0]
        assert server.agents[-1] == "aiobotocore"


def test_missing_files_are_s3fs_errors_and_do_not_end_the_use_of_obstore(s3, s3_admin):
    s3_admin.pipe_file("workshop/one.jpg", b"1")
    there, gone = "s3://workshop/one.jpg", "s3://workshop/gone.jpg"
    for paths in ([gone], [gone, there, gone]):
        for content, path in zip(read_files(paths, s3), paths, strict=True):
            assert content == b"1" if path == there else isinstance(content, FileNotFoundError)
    s3_admin.rm_file("workshop/one.jpg")


def test_who_must_not_read_gets_s3fs_error(s3):
    wrong = {"key": "nobody", "secret": "wrong", "client_kwargs": s3["client_kwargs"]}
    (error,) = read_files(["s3://workshop/served/none.jpg"], wrong)
    assert isinstance(error, PermissionError)


def test_a_forked_process_reads_after_its_parent_has_read(s3):
    paths = list_photos("s3://workshop/served/dogs", storage_options=s3)
    expected = read_files(paths, s3)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        reading = [pool.apply_async(read_files, (paths, s3)) for _ in range(4)]
        listing = pool.apply_async(list_photos, ("s3://workshop/served/dogs",), {"storage_options": s3})
        assert [read.get(240) for read in reading] == [expected] * 4 and listing.get(240) == paths


@pytest.mark.weekly
def test_a_program_that_is_interrupted_while_it_reads_ends():
    code = "import sys; from workshop_utils.photos import read_files; print('reads', flush=True)\n"
    code += "read_files(['s3://bucket/1.jpg'], {'anon': True, 'client_kwargs': {'endpoint_url': sys.argv[1]}})"
    with socket.create_server(("127.0.0.1", 0)) as slow:
        url = f"http://127.0.0.1:{slow.getsockname()[1]}"
        running = subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert running.stdout.readline()
        asks, _ = slow.accept()
        asks.recv(1000)
        asks.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n")
        trickle(asks, running)
        time.sleep(1)
        running.send_signal(signal.SIGINT)
        assert running.wait(240)
        running.stdout.close()


def trickle(asks, running):
    """Send a byte each second while a process runs."""

    def send():
        with asks, suppress(OSError):
            while running.poll() is None:
                asks.sendall(b"x")
                time.sleep(1)

    threading.Thread(target=send).start()
