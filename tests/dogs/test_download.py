"""Photos are fetched from real servers and folders: resumed, checked, and kept inside their folder."""

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
from samples import http_server
from waiting import until

from workshop_utils.dogs import download
from workshop_utils.dogs.download import PhotosError, fetch_photos
from workshop_utils.object_store import local_object_store
from workshop_utils.photos import find_data

WORKSHOP = Path(sys.executable).parent / "workshop"
BREEDS = ("n02085620-Chihuahua", "n02086240-Shih-Tzu", "n02089078-black-and-tan_coonhound")
FILES = {f"{breed}/{breed[:9]}_{i}.jpg": os.urandom(30_000 + i) for breed in BREEDS for i in range(2)}


def tar_of(members):
    """Return the bytes of a .tar; a member is a name with bytes, or a TarInfo."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, content in members:
            if isinstance(content, bytes):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                tar.addfile(content)
    return target.getvalue()


ARCHIVE = tar_of([(f"Images/{name}", content) for name, content in FILES.items()])


@contextmanager
def serving(content, dies_at=None, pause=None):
    """One archive over HTTP. dies_at: byte at which it hangs up; pause: what later parts wait for."""
    with http_server(Handler, content=content, dies_at=dies_at, pause=pause, asked=[]) as server:
        server.url += "/images.tar"
        yield server


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):  # noqa: N802
        self.answer()

    def do_GET(self):  # noqa: N802
        server, (start, stop) = self.server, self.answer()
        server.asked.append(start)
        if server.pause and start:
            server.pause.wait(240)
        if server.dies_at is not None and stop > server.dies_at:
            self.wfile.write(server.content[start : max(start, server.dies_at)])
            self.close_connection = True
        else:
            self.wfile.write(server.content[start:stop])

    def answer(self):
        size, wanted = len(self.server.content), self.headers.get("Range")
        start, stop = 0, size
        if wanted:
            start, stop = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
            start, stop = start, min(stop + 1, size)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        return start, stop


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(download, "CHUNK_BYTES", 2**14)


@pytest.fixture
def source(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "source" / "README.txt").write_text("not a photo")
    return tmp_path / "source"


def written(folder):
    return {path.relative_to(folder / "Images").as_posix(): path.read_bytes() for path in folder.glob("Images/*/*")}


def test_a_folder_of_photos_is_copied_and_found_and_then_no_network_is_asked(source, tmp_path, monkeypatch):
    images = fetch_photos(str(source), n_photos=6)
    assert written(tmp_path / "cache" / "photos") == FILES
    assert (find_data().kind, find_data().url) == ("photos", str(images))
    assert fetch_photos("http://127.0.0.1:9/images.tar", n_photos=6) == images  # what is complete needs no network


def test_a_bucket_is_read_without_credentials(source, tmp_path, monkeypatch):
    with local_object_store(source) as options:
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["client_kwargs"]["endpoint_url"])
        fetch_photos("s3://workshop/source", tmp_path / "out", n_photos=6)
    assert written(tmp_path / "out") == FILES


def test_only_missing_and_short_files_are_fetched_again(source, tmp_path):
    fetch_photos(str(source), tmp_path, n_photos=6)
    kept, short, gone, *_ = sorted((tmp_path / "Images").glob("*/*"))
    os.utime(kept, (1, 1))
    short.write_bytes(b"cut off")
    gone.unlink()
    fetch_photos(str(source), tmp_path, n_photos=6)
    assert written(tmp_path) == FILES
    assert kept.stat().st_mtime == 1


def test_an_archive_goes_on_where_a_broken_transfer_stopped(tmp_path):
    with serving(ARCHIVE, dies_at=100_000) as server:
        with pytest.raises(PhotosError, match="Run the same command again"):
            fetch_photos(server.url, tmp_path, n_photos=6)
        (part,) = tmp_path.glob("*.part")
        arrived = part.stat().st_size
        assert 0 < arrived <= 100_000
        assert not (tmp_path / "complete").exists()
        server.dies_at, server.asked = None, []
        fetch_photos(server.url, tmp_path, n_photos=6)
        assert min(server.asked) == arrived
    assert written(tmp_path) == FILES
    assert not part.exists()


def test_a_part_that_is_longer_than_the_archive_starts_over(tmp_path):
    url = str(tmp_path / "dogs.tar")
    Path(url).write_bytes(ARCHIVE)
    part = tmp_path / f"{hashlib.sha256(url.encode()).hexdigest()[:8]}.tar.part"
    part.write_bytes(b"x" * (len(ARCHIVE) + 1))
    fetch_photos(url, tmp_path, n_photos=6)
    assert written(tmp_path) == FILES and not part.exists()


def test_a_wrong_checksum_deletes_the_archive(tmp_path, monkeypatch):
    with serving(ARCHIVE) as server:
        monkeypatch.setitem(download.SHA256, server.url, "0" * 64)
        with pytest.raises(PhotosError, match="SHA-256 .*0000"):
            fetch_photos(server.url, tmp_path, n_photos=6)
        assert (list(tmp_path.glob("*.part")), written(tmp_path)) == ([], {})
        monkeypatch.setitem(download.SHA256, server.url, hashlib.sha256(ARCHIVE).hexdigest())
        fetch_photos(server.url, tmp_path, n_photos=6)
    assert written(tmp_path) == FILES


def special(name, kind, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return name, member


@pytest.mark.parametrize(
    "evil",
    [
        ("Images/n02085620-Chihuahua/../../../evil.jpg", b"x"),
        ("/Images/n02085620-Chihuahua/evil.jpg", b"x"),
        special("Images/n02085620-Chihuahua/evil.jpg", tarfile.SYMTYPE, "/etc/passwd"),
        special("Images/n02085620-Chihuahua/evil.jpg", tarfile.LNKTYPE, "../../../etc/passwd"),
    ],
    ids=lambda evil: f"{evil[0]}-{getattr(evil[1], 'type', b'0').decode()}",
)
def test_an_archive_with_a_strange_member_is_refused_by_its_name(tmp_path, evil):
    archive = tmp_path / "evil.tar"
    archive.write_bytes(tar_of([(f"Images/{name}", content) for name, content in FILES.items()] + [evil]))
    before = set(tmp_path.rglob("*"))
    with pytest.raises(PhotosError) as caught:
        fetch_photos(str(archive), tmp_path / "a" / "b", n_photos=6)
    assert repr(evil[0]) in str(caught.value) and "nothing was unpacked" in str(caught.value)
    new = set(tmp_path.rglob("*")) - before
    assert {path.relative_to(tmp_path).as_posix() for path in new} == {"a", "a/b", "a/b/Images"}


def test_an_archive_may_name_its_folders(tmp_path):
    folders = [special(name, tarfile.DIRTYPE) for name in (".", "Images", f"Images/{BREEDS[0]}")]
    (tmp_path / "dogs.tar").write_bytes(tar_of(folders + [(f"./Images/{n}", c) for n, c in FILES.items()]))
    fetch_photos(str(tmp_path / "dogs.tar"), tmp_path / "out", n_photos=6)
    assert written(tmp_path / "out") == FILES


def test_a_file_that_is_no_archive_is_named(tmp_path):
    (tmp_path / "dogs.tar").write_bytes(b"<html>Not found</html>" * 100)
    with pytest.raises(PhotosError, match="dogs.tar"):
        fetch_photos(str(tmp_path / "dogs.tar"), tmp_path / "out", n_photos=6)


def test_a_set_that_is_being_mended_is_not_called_complete(source, tmp_path):
    folder = tmp_path / "out"
    next(fetch_photos(str(source), folder, n_photos=6).glob("*/*")).unlink()
    (tmp_path / "empty").mkdir()
    with pytest.raises(PhotosError, match="0 photos, not 6"):
        fetch_photos(str(tmp_path / "empty"), folder, n_photos=6)
    assert not (folder / "complete").exists()


def test_too_few_photos_are_not_called_complete(source, tmp_path):
    with pytest.raises(PhotosError, match="6 photos, not 20580"):
        fetch_photos(str(source), tmp_path / "out")
    assert not (tmp_path / "out" / "complete").exists()


def test_a_full_disk_is_said_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(PhotosError, match="GB free.*--folder"):
        fetch_photos(str(source), tmp_path / "out", n_photos=6)
    assert written(tmp_path / "out") == {}


def test_without_a_network_the_message_names_the_sketches(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(download, "ARCHIVE", "http://127.0.0.1:9/images.tar")
    monkeypatch.setattr(download, "ANSWER_S", 2)
    with pytest.raises(PhotosError) as caught:
        fetch_photos(folder=tmp_path)
    message = str(caught.value)
    assert download.BUCKET in message and download.ARCHIVE in message and "sketches" in message
    reasons = [line.partition(": ")[2] for line in message.splitlines() if line.startswith("  ")]
    assert len(reasons) == 2 and all(reasons), message


def test_an_interrupt_keeps_what_has_arrived(tmp_path):
    big, pause = ARCHIVE + bytes(2**25), threading.Event()
    with serving(big, pause=pause) as server:
        command = ["data", "photos", "--source", server.url, "--folder", str(tmp_path)]
        run = subprocess.Popen([WORKSHOP, *command], stderr=subprocess.PIPE, text=True)
        until(lambda: any(part.stat().st_size for part in tmp_path.glob("*.part")) or run.poll())
        run.send_signal(signal.SIGINT)
        rest = run.communicate(timeout=240)[1]
        pause.set()
    assert run.returncode == 1
    assert "what has arrived is kept" in rest and "Traceback" not in rest
    assert [path.stat().st_size > 0 for path in tmp_path.glob("*.part")] == [True]
