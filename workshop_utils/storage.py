"""Where files lie: what WORKSHOP_* says, the cache folder, any address; and files written whole or not at all."""

import os
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import fsspec
import platformdirs
from fsspec.archive import AbstractArchiveFileSystem
from fsspec.utils import tokenize

# How an address begins: protocol://host. It also fits what pathlib.Path leaves of one, protocol:/host.
ADDRESS = re.compile(r"([\w+.-]*:)+/+[^/]*")
# These variables say who asks S3, and so do these lines of the files in ~/.aws.
CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_WEB_IDENTITY",
    "AWS_CONTAINER_CREDENTIALS",
    "FSSPEC_S3_",
)
CREDENTIAL_LINE = re.compile(r"^\s*(aws_access_key_id|credential_process|role_arn|sso_|login_session)", re.MULTILINE)
S3_CONNECTIONS = 64  # botocore allows 10, so a batch of 32 would wait four times for storage far away
_s3_filesystems: dict[tuple, fsspec.AbstractFileSystem] = {}  # by process, options, and who asks where


class CacheError(OSError):
    """The cache folder cannot be written; the message says why and what to type."""


@dataclass(frozen=True)
class Variables:
    """What the environment's WORKSHOP_* variables say of files; a variable that is unset gives an empty string."""

    data: str  #: WORKSHOP_DATA: where the photos are
    weights: str  #: WORKSHOP_WEIGHTS: a checkpoint, or a name that `weights.load_resnet` knows
    names: str  #: WORKSHOP_NAMES: a JSON list of pet names
    cache: str  #: WORKSHOP_CACHE: a folder of this machine for downloads and sketches
    shared: str  #: WORKSHOP_SHARED: a folder that all workers can read and write


def variables() -> Variables:
    """Return the Variables of this moment, as a notebook can change them with %env."""
    return Variables(
        data=os.environ.get("WORKSHOP_DATA", ""),
        weights=os.environ.get("WORKSHOP_WEIGHTS", ""),
        names=os.environ.get("WORKSHOP_NAMES", ""),
        cache=os.environ.get("WORKSHOP_CACHE", ""),
        shared=os.environ.get("WORKSHOP_SHARED", ""),
    )


def cache_folder() -> Path:
    """Return the folder for downloads and sketches: WORKSHOP_CACHE, else the user's cache folder.

    Raises CacheError if the user has no home, and if WORKSHOP_CACHE is the address of other storage.
    """
    try:
        return local_path(variables().cache or platformdirs.user_cache_dir("workshop-dask-pytorch"))
    except (RuntimeError, ValueError) as error:  # in a container, for example, a user may have no home
        raise CacheError(f"There is no folder for the cache ({error}): export WORKSHOP_CACHE=FOLDER") from error


def absolute_address(path: str | os.PathLike) -> str:
    """Return an address as it is, and a local path as an absolute one, which means the same in every working directory.

    Text that begins with protocol:// is an address, except that file:// and local:// begin a local path. Text that
    begins with protocol:/ is what `pathlib.Path` makes of an address: it is returned as it is, and `open_address`
    refuses it. All other text is a local path.
    Raises TypeError for what is neither a string nor an `os.PathLike` of one.

    >>> absolute_address("s3://bucket/run::2.pt"), absolute_address("/runs/run::2.pt")
    ('s3://bucket/run::2.pt', '/runs/run::2.pt')
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"{path!r} is bytes: give a string.")
    text = text.replace("file://localhost/", "file:///", 1) if text.startswith("file://localhost/") else text
    text = text.removeprefix("file://").removeprefix("local://")
    return text if ADDRESS.match(text) else str(Path(os.path.expanduser(text)).absolute())


def local_path(path: str | os.PathLike) -> Path:
    """Return the absolute path of a file or folder of this machine; raise ValueError for another storage's address."""
    address = absolute_address(path)
    if not os.path.isabs(address):
        raise ValueError(f"{address!r} is no path of this machine: give one.")
    return Path(address)


def default_storage_options(url: str | os.PathLike) -> dict:
    """Return {"anon": True} for an s3:// address if neither the environment nor ~/.aws holds credentials, else {}.

    This does not look for the role of a cloud's instance: set FSSPEC_S3_ANON=false to use one.
    """
    # botocore's own search would start a credential_process, ask a container's server, and take 7 to 25 ms.
    if not os.fspath(url).startswith("s3://") or fsspec.config.conf.get("s3"):
        return {}
    known = any(value and name.startswith(CREDENTIAL_VARIABLES) for name, value in os.environ.items())
    known = known or any(CREDENTIAL_LINE.search(file.read_text()) for file in _aws_files())
    return {} if known else {"anon": True}


def _aws_files():
    in_home = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    files = [Path(os.path.expanduser(os.environ.get(name, usual))) for name, usual in in_home.items()]
    return [file for file in files if file.is_file()]


def open_address(url: str | os.PathLike, storage_options: dict | None = None) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return (filesystem, path in it) of a local path or any address, protocol://…, that fsspec knows.

    Listings are asked for again, as another process may have written since. S3 is asked at the endpoint, and with the
    keys, that the environment and ~/.aws name now.
    url: as in `absolute_address`. storage_options: what fsspec needs there; None for `default_storage_options`. They
    come before a user or a port in the address.
    Raises ValueError for an unknown protocol, a chain of protocols, an archive, and an address that lacks a slash;
    ImportError if a protocol's package is missing.

    >>> open_address("memory://dogs/rex.jpg")[1]
    '/dogs/rex.jpg'
    """
    address = absolute_address(url)
    if os.path.isabs(address):
        protocol = "file"
    elif "://" in address:
        protocol = address.partition("://")[0]
    else:
        raise ValueError(f"{address!r} lacks a slash: give a string protocol://…, as pathlib.Path takes a slash away.")
    kind = fsspec.get_filesystem_class(protocol)
    if issubclass(kind, AbstractArchiveFileSystem):
        raise ValueError(f"{address!r} is in an archive: unpack it, and give the address of what it held.")
    options = default_storage_options(address) if storage_options is None else storage_options
    if protocol == "s3":
        of_botocore = {"max_pool_connections": S3_CONNECTIONS, **(options.get("config_kwargs") or {})}
        # With more than one request per file at a time, s3fs asks for each file's size before it asks for the file.
        options = {"max_concurrency": 1, **options, "config_kwargs": of_botocore}
    of_url = kind._get_kwargs_from_urls(address)
    # fsspec leaves the %40 that stands for an @ in a password.
    of_url |= {name: unquote(of_url[name]) for name in ("username", "user", "password") if of_url.get(name)}
    # This is cheap: one filesystem is kept per process and set of options. A forked process needs one of its own.
    # Not fsspec's url_to_fs, which splits a name at "::".
    options = {**of_url, **options}
    fs = _s3_filesystem(options) if protocol == "s3" else fsspec.filesystem(protocol, **options)
    fs.invalidate_cache()
    return fs, kind._strip_protocol(address)


def _s3_filesystem(options):
    """fsspec would keep it by its options alone, and ask the server of before after a change of the environment."""
    variables = [(name, value) for name, value in os.environ.items() if name.startswith("AWS_")]
    files = [(str(file), file.stat().st_mtime_ns) for file in _aws_files()]
    known = os.getpid(), tokenize(options), *variables, *files
    with _lock(os.getpid()):
        if known not in _s3_filesystems:
            _s3_filesystems[known] = fsspec.filesystem("s3", **options, skip_instance_cache=True)
        return _s3_filesystems[known]


@cache
def _lock(process):
    """Return a lock for this process: a fork may inherit one that is held for ever."""
    return threading.Lock()


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
