"""Where files lie: the cache folder, a place for all workers, any address; and files written whole or not at all."""

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import platformdirs
from fsspec.implementations.local import LocalFileSystem

# Variables that name who asks S3, and lines of ~/.aws that do.
OF_SOMEBODY = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_WEB_IDENTITY",
    "AWS_CONTAINER_CREDENTIALS",
    "FSSPEC_S3_",
)
HOLDS_CREDENTIALS = re.compile(r"^\s*(aws_access_key_id|credential_process|role_arn|sso_|login_session)", re.MULTILINE)
S3_CONNECTIONS = 64  # botocore allows 10, so a batch of 32 would wait four times for storage far away


class NotShared(RuntimeError):
    """Some workers cannot reach a place that all of them need; the message says what to type."""


class CacheError(OSError):
    """The cache folder cannot be written; the message says why and what to type."""


def cache_folder() -> Path:
    """Return the folder for downloads and sketches: WORKSHOP_CACHE, else the user's cache folder.

    Raises CacheError where the user has no home.
    """
    try:
        return Path(os.environ.get("WORKSHOP_CACHE") or platformdirs.user_cache_dir("workshop-dask-pytorch"))
    except RuntimeError as error:  # for example in a container, for a user without a name
        raise CacheError(f"There is no home folder for the cache ({error}): export WORKSHOP_CACHE=FOLDER") from error


def shared_folder() -> str:
    """Return the address of a new folder that this process and all workers can read and write.

    It is below WORKSHOP_SHARED, any address that fsspec knows, else a temporary folder of this machine.
    Raises NotShared if WORKSHOP_SHARED cannot be written, or if it is unset and workers do not see this machine's disk.
    """
    if root := _shared_root():
        fs, path = open_address(address := f"{root}/{uuid.uuid4().hex}")
        try:
            if isinstance(fs, LocalFileSystem):  # object storage has no folders
                fs.makedirs(path)
        except OSError as error:
            raise _cannot_write(root, error) from error
        return address
    return on_all_workers(tempfile.mkdtemp())


def share(folder: Path) -> str:
    """Return an address where all workers reach the files of `folder`.

    With WORKSHOP_SHARED, it is a copy below that, which gets the files that it lacks; else it is `folder` itself.
    Raises NotShared if WORKSHOP_SHARED cannot be written, or if it is unset and workers do not see `folder`.
    """
    if not (root := _shared_root()):
        return on_all_workers(str(folder))
    try:
        fs, target = open_fresh(f"{root}/{folder.name}")
        have = {path: about["size"] for path, about in fs.find(target, detail=True).items()}
        files = {f"{target}/{path.relative_to(folder).as_posix()}": path for path in folder.glob("*/*.jpg")}
        lacking = [name for name, path in files.items() if have.get(name) != path.stat().st_size]
        if isinstance(fs, LocalFileSystem):
            for name in lacking:
                with whole_file(Path(name)) as part:  # others may read or share the same files now
                    shutil.copyfile(files[name], part)
        else:  # an object store shows a file once all of it is there
            fs.put([str(files[name]) for name in lacking], lacking)
    except Exception as error:  # each protocol raises errors of its own, such as botocore's
        raise _cannot_write(root, error) from error
    return f"{root}/{folder.name}"


def on_all_workers(path: str) -> str:
    """Return `path` if every worker of the current client can see it, or there is no client; else raise NotShared."""
    from distributed import default_client

    from workshop_utils.job.errors import check_client

    client = None
    with suppress(ValueError):  # there is no client
        client = default_client()
    if client:
        check_client(client)
    seen = client.run(os.path.exists, path, on_error="ignore") if client else {}
    if blind := [worker for worker, sees in seen.items() if not sees]:
        raise NotShared(
            f"{path!r} lies on this machine, and {len(blind)} of {len(seen)} workers do not see it, "
            f"{blind[0]} first. Give all a place that they reach: type\n"
            "%env WORKSHOP_SHARED=s3://BUCKET/FOLDER\n"
            "in a cell, or the path of a folder that all machines have, and run this again."
        )
    return path


def default_storage_options(url: str | os.PathLike) -> dict:
    """Return {"anon": True} for an s3:// address if neither the environment nor ~/.aws holds credentials, else {}.

    This does not look for the role of a cloud's instance: set FSSPEC_S3_ANON=false to use one.
    """
    if not str(url).startswith("s3://") or fsspec.config.conf.get("s3"):
        return {}
    in_home = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    files = [Path(os.path.expanduser(os.environ.get(name, usual))) for name, usual in in_home.items()]
    known = any(value and name.startswith(OF_SOMEBODY) for name, value in os.environ.items())
    known = known or any(HOLDS_CREDENTIALS.search(file.read_text()) for file in files if file.is_file())
    return {} if known else {"anon": True}


def open_address(url: str | os.PathLike, storage_options: dict | None = None) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return (filesystem, path in it) of a local path or any address that fsspec knows.

    storage_options: what fsspec needs there; None for `default_storage_options`.
    Raises ValueError for an unknown protocol, ImportError if its package is missing.

    >>> open_address("memory://dogs/rex.jpg")[1]
    '/dogs/rex.jpg'
    """
    # This is cheap: fsspec keeps one filesystem per process and set of options. A forked process needs one of its own.
    options = default_storage_options(url) if storage_options is None else storage_options
    if str(url).startswith("s3://"):
        of_botocore = {"max_pool_connections": S3_CONNECTIONS, **(options.get("config_kwargs") or {})}
        # With more than one request per file at a time, s3fs asks for each file's size before it asks for the file.
        options = {"max_concurrency": 1, **options, "config_kwargs": of_botocore}
    return fsspec.core.url_to_fs(str(url), **options)


def absolute(address: str) -> str:
    """Return a local path as it is from any working directory and for any user; another address stays as it is.

    >>> absolute("/dogs/rex.jpg"), absolute("s3://dogs/rex.jpg")
    ('/dogs/rex.jpg', 's3://dogs/rex.jpg')
    """
    if address.startswith("/"):  # the rest takes 5 µs
        return address
    is_local = fsspec.core.split_protocol(address)[0] in (None, *LocalFileSystem.protocol)
    return LocalFileSystem._strip_protocol(address) if is_local else address


def open_fresh(url: str | os.PathLike, storage_options: dict | None = None) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return what `open_address` does; listings are asked for anew, as another process may have written since."""
    fs, path = open_address(url, storage_options)
    fs.invalidate_cache()
    return fs, path


def version_of(url: str | os.PathLike) -> str | None:
    """Return what its storage says of the file at this address, such as size and time, which change with the file.

    None where it says nothing: there is no file, or it cannot be reached.
    """
    with suppress(Exception):  # each protocol raises errors of its own
        fs, path = open_fresh(url)
        return str(fs.info(path))
    return None


def _cannot_write(root: str, error: Exception) -> NotShared:
    return NotShared(
        f"WORKSHOP_SHARED is {root!r}, which cannot be written ({error}): set it to an address that this machine may "
        "write to, and set what the storage asks for, such as AWS_ACCESS_KEY_ID."
    )


def _shared_root() -> str:
    root = os.environ.get("WORKSHOP_SHARED", "").rstrip("/")
    return root if "://" in root or not root else str(Path(root).expanduser().absolute())


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file beside `path`; when the block ends, it replaces `path`.

    If the block raises, the temporary file is deleted, and `path` stays as it was. A missing folder is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
