"""Where files lie: the cache folder, a place for all workers, any address; and files written whole or not at all."""

import getpass
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

import fsspec
import platformdirs
from fsspec.archive import AbstractArchiveFileSystem
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
ADDRESS = re.compile(r"([\w+.-]{2,})://")
CHAIN = re.compile(r"([\w+.-]+::)+[\w+.-]{2,}://")
# What pathlib makes of an address. A name that no protocol has may be a folder's.
LACKS_A_SLASH = re.compile(rf"({'|'.join(fsspec.available_protocols())}):(/(?!/)|$)")
ADDRESS_IN_PATH = re.compile(r"([\w+.-]+::)*[\w+.-]{2,}:(/|$)")  # in a `pathlib.Path`, which no string can be
LOCAL_READERS = 16  # threads; to start them takes as long as to read 100 files of a fast disk
SLOW_S = 0.002  # to read a file; a fast disk takes 0.05 ms
S3_CONNECTIONS = 64  # botocore allows 10, so a batch of 32 would wait four times for storage far away


class NotShared(RuntimeError):
    """Some workers cannot reach a place that all of them need; the message says what to type."""


class CacheError(OSError):
    """The cache folder cannot be written; the message says why and what to type."""


def cache_folder() -> Path:
    """Return the folder for downloads and sketches: WORKSHOP_CACHE, else the user's cache folder.

    Raises CacheError where the user has no home, and where WORKSHOP_CACHE is the address of other storage.
    """
    try:
        return local_path(os.environ.get("WORKSHOP_CACHE") or platformdirs.user_cache_dir("workshop-dask-pytorch"))
    except RuntimeError as error:  # for example in a container, for a user without a name
        raise CacheError(f"There is no home folder for the cache ({error}): export WORKSHOP_CACHE=FOLDER") from error
    except ValueError as error:
        raise CacheError(f"WORKSHOP_CACHE cannot be used: {error} Type\nexport WORKSHOP_CACHE=FOLDER") from error


def shared_folder() -> str:
    """Return the address of a folder that all workers and all processes of this user can read and write.

    It is the same at each call, so that a program which is started again finds its checkpoints: a folder with the
    user's name below WORKSHOP_SHARED, any address that `open_address` takes; else a folder in the cache of this
    machine, which no other user may read. Nothing in it is ever deleted for you.
    Raises NotShared if WORKSHOP_SHARED cannot be written, or if it is unset and workers do not see this machine's disk.
    """
    if root := _shared_root():
        return _made(root, _user())
    folder = cache_folder() / "shared"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # whoever made it
    except OSError as error:
        raise CacheError(f"{str(folder)!r} cannot be used ({error.strerror}): export WORKSHOP_CACHE=FOLDER") from error
    return on_all_workers(str(folder))


def new_shared_folder() -> str:
    """Return the address of a new, empty folder that all workers can read and write, for what nobody reads later.

    It lies below WORKSHOP_SHARED, or is a temporary folder of this machine. Raises what `shared_folder` raises.
    """
    root = _shared_root()
    return _made(root, uuid.uuid4().hex) if root else on_all_workers(tempfile.mkdtemp())


def share(folder: Path) -> str:
    """Return an address where all workers reach the files of `folder`.

    With WORKSHOP_SHARED, it is a copy below that, which gets the files that it lacks; else it is `folder` itself.
    Raises NotShared if WORKSHOP_SHARED cannot be written, or if it is unset and workers do not see `folder`.
    """
    if not (root := _shared_root()):
        return on_all_workers(str(folder))
    try:
        fs, target = open_fresh(_below(root, folder.name))
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
    return _below(root, folder.name)


def on_all_workers(path: str) -> str:
    """Return `path` if every worker of the current client can see it, or there is no client; else raise NotShared."""
    from distributed import default_client

    from daskrun.errors import check_client

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


def path_text(path: str | os.PathLike) -> str:
    """Return a path or an address as text. Raises TypeError for what is neither a string nor an `os.PathLike` of one.

    >>> path_text(Path("runs/run.pt"))
    'runs/run.pt'
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"{path!r} is bytes: give a string.")
    return text


def absolute_address(url: str | os.PathLike) -> str:
    """Return an address as it is, and a local path as an absolute one, which means the same in every working directory.

    An address begins with protocol://. A string that does not is a local path, whole, whatever else is in it.
    Raises ValueError for a chain of addresses, and for an address that lacks a slash, as one does in a `pathlib.Path`;
    TypeError for what is neither a string nor an `os.PathLike` of one.

    >>> absolute_address("s3://bucket/run::2.pt"), absolute_address("/runs/run::2.pt")
    ('s3://bucket/run::2.pt', '/runs/run::2.pt')
    """
    text = path_text(url)
    if CHAIN.match(text):
        raise ValueError(f"{text!r} is a chain of addresses: give the last one alone, {text.rpartition('::')[2]!r}.")
    if LACKS_A_SLASH.match(text) or (isinstance(url, os.PathLike) and ADDRESS_IN_PATH.match(text)):
        protocol, _, path = text.rpartition("::")[2].partition(":")
        right = f"{protocol}://{path if protocol in LocalFileSystem.protocol else path.lstrip('/')}"
        raise ValueError(
            f"{text!r} lacks a slash after the protocol, which pathlib.Path takes away: give the string {right!r}."
        )
    protocol = _protocol(text)
    if protocol and protocol not in LocalFileSystem.protocol:
        return text
    prefix = f"{protocol}://" if protocol else ""
    return prefix + str(Path(os.path.expanduser(text.removeprefix(prefix))).absolute())


def address_for_workers(path: str) -> str:
    """Return what `absolute_address` does, as workers may have another working directory and another home.

    What it refuses is returned as it is: `read_files` refuses it, too, where it is one of many.
    """
    try:
        return absolute_address(path)
    except ValueError:
        return path


def local_path(path: str | os.PathLike) -> Path:
    """Return the absolute path of a file or folder of this machine; raise ValueError for another storage's address."""
    address = absolute_address(path)
    if (protocol := _protocol(address)) and protocol not in LocalFileSystem.protocol:
        raise ValueError(f"{address!r} is no folder of this machine: give the path of one.")
    return Path(ADDRESS.sub("", address, count=1) if protocol else address)


def weights_setting(weights: str | os.PathLike | None = None) -> str:
    """Return `weights`, or WORKSHOP_WEIGHTS: "auto", "imagenet", "sketches", a checkpoint's absolute address, or ""."""
    given = weights or os.environ.get("WORKSHOP_WEIGHTS", "")
    return given if given in ("", "auto", "imagenet", "sketches") else absolute_address(given)  # type: ignore[return-value]


def default_storage_options(url: str | os.PathLike) -> dict:
    """Return {"anon": True} for an s3:// address if neither the environment nor ~/.aws holds credentials, else {}.

    This does not look for the role of a cloud's instance: set FSSPEC_S3_ANON=false to use one.
    """
    if not path_text(url).startswith("s3://") or fsspec.config.conf.get("s3"):
        return {}
    in_home = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    files = [Path(os.path.expanduser(os.environ.get(name, usual))) for name, usual in in_home.items()]
    known = any(value and name.startswith(OF_SOMEBODY) for name, value in os.environ.items())
    known = known or any(HOLDS_CREDENTIALS.search(file.read_text()) for file in files if file.is_file())
    return {} if known else {"anon": True}


def open_address(url: str | os.PathLike, storage_options: dict | None = None) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return (filesystem, path in it) of a local path or any address, protocol://…, that fsspec knows.

    url: as in `absolute_address`. storage_options: what fsspec needs there; None for `default_storage_options`. They
    come before a user or a port in the address.
    Raises ValueError for an unknown protocol and what `absolute_address` refuses, ImportError if a protocol's package
    is missing.

    >>> open_address("memory://dogs/rex.jpg")[1]
    '/dogs/rex.jpg'
    """
    url = absolute_address(url)
    # This is cheap: fsspec keeps one filesystem per process and set of options. A forked process needs one of its own.
    options = default_storage_options(url) if storage_options is None else storage_options
    if url.startswith("s3://"):
        of_botocore = {"max_pool_connections": S3_CONNECTIONS, **(options.get("config_kwargs") or {})}
        # With more than one request per file at a time, s3fs asks for each file's size before it asks for the file.
        options = {"max_concurrency": 1, **options, "config_kwargs": of_botocore}
    protocol = _protocol(url) or "file"
    kind = fsspec.get_filesystem_class(protocol)
    if issubclass(kind, AbstractArchiveFileSystem):
        raise ValueError(f"{url!r} is in an archive: unpack it, and give the address of what it held.")
    # Not fsspec's url_to_fs, which splits a name at "::".
    of_url = kind._get_kwargs_from_urls(url)
    # fsspec leaves the %40 that stands for an @ in a password.
    of_url |= {name: unquote(of_url[name]) for name in ("username", "user", "password") if of_url.get(name)}
    options = {**of_url, **options}
    return fsspec.filesystem(protocol, **options), kind._strip_protocol(url)


def open_fresh(url: str | os.PathLike, storage_options: dict | None = None) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return what `open_address` does; listings are asked for anew, as another process may have written since."""
    fs, path = open_address(url, storage_options)
    fs.invalidate_cache()
    return fs, path


def read_together(fs: fsspec.AbstractFileSystem, paths: Sequence[str]) -> list[bytes | Exception]:
    """Return the bytes of each file, in order; an unreadable file gives its exception.

    Object storage is asked for all at the same time, and so is a disk once it has been slow, as those of a network are.
    Storage with one connection, such as ftp://, gives one file after the other.
    """
    if not isinstance(fs, LocalFileSystem):
        # ftp's cat_file takes no address, and s3fs would strip the slash at a key's end.
        keys = paths if fs.async_impl else [fs._strip_protocol(path) for path in paths]
        # fs.cat would take the [1] of a name for a pattern.
        return fs.cat_ranges(keys, None, None, on_error="return")
    contents: list[bytes | Exception] = []
    for path in paths:
        start = time.perf_counter()
        contents.append(_read_local(path))
        if time.perf_counter() - start > SLOW_S:
            with ThreadPoolExecutor(LOCAL_READERS) as pool:
                return contents + list(pool.map(_read_local, paths[len(contents) :]))
    return contents


def has_one_connection(fs: fsspec.AbstractFileSystem) -> bool:
    """Return whether threads cannot use a filesystem at the same time, as is so for ftp:// and may be for others."""
    return not (fs.async_impl or isinstance(fs, LocalFileSystem))


def _cannot_write(root: str, error: Exception) -> NotShared:
    return NotShared(
        f"WORKSHOP_SHARED is {root!r}, which cannot be written ({error}): set it to an address that this machine may "
        "write to, and set what the storage asks for, such as AWS_ACCESS_KEY_ID."
    )


def _shared_root() -> str:
    root = re.sub(r"(?<=[^/:])/+$", "", os.environ.get("WORKSHOP_SHARED", ""))  # but "/" and "file:///" are folders
    try:
        return root and absolute_address(root)
    except ValueError as error:
        raise _cannot_write(root, error) from error


def _below(root, name):
    return f"{root}{name}" if root.endswith("/") else f"{root}/{name}"


def _user():
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # for example in a container, for a user without a name
        return str(os.getuid())


def _made(root, name):
    """Make the folder `name` below WORKSHOP_SHARED, and return its address."""
    try:
        fs, path = open_address(address := _below(root, name))
        if not fs.async_impl:  # the others are object stores, which have no folders
            fs.makedirs(path, exist_ok=True)
    except Exception as error:  # each protocol raises errors of its own
        raise _cannot_write(root, error) from error
    return address


def _protocol(url):
    return found[1] if (found := ADDRESS.match(url)) else ""


def _read_local(path):
    try:
        return local_path(path).read_bytes()
    except Exception as error:
        return error


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
