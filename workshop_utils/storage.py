"""Where files lie: the cache folder, a place for all workers, any address; and files written whole or not at all."""

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import platformdirs
from fsspec.implementations.local import LocalFileSystem

S3_CONNECTIONS = 64  # with botocore's own 10, a batch of 32 would wait four times for storage far away


class NotShared(RuntimeError):
    """What all workers have to reach lies where some of them cannot; the message says what to type."""


def cache_folder() -> Path:
    """Return the folder for downloads and sketches: WORKSHOP_CACHE, else the user's cache folder."""
    return Path(os.environ.get("WORKSHOP_CACHE") or platformdirs.user_cache_dir("workshop-dask-pytorch"))


def shared_folder() -> str:
    """Return the address of a new folder that this process and all workers can read and write.

    It is below WORKSHOP_SHARED, any address that fsspec knows, else a temporary folder of this machine.
    Raises NotShared where that cannot be written, or is unset and workers do not see this machine's disk.
    """
    if root := _shared_root():
        fs, path = open_address(address := f"{root}/{uuid.uuid4().hex}")
        try:
            if isinstance(fs, LocalFileSystem):  # others have none
                fs.makedirs(path)
        except OSError as error:
            raise _cannot_write(root, error) from error
        return address
    return on_all_workers(tempfile.mkdtemp())


def share(folder: Path) -> str:
    """Return the address by which all workers reach the files of `folder`, which are copied where they have to be.

    It is that of a copy below WORKSHOP_SHARED, to which files are added that it lacks, else `folder` itself.
    Raises NotShared where that is unset and workers do not see `folder`, or where it cannot be written.
    """
    if not (root := _shared_root()):
        return on_all_workers(str(folder))
    try:
        fs, target = open_address(f"{root}/{folder.name}")
        fs.invalidate_cache()
        have = {path: about["size"] for path, about in fs.find(target, detail=True).items()}
        files = {f"{target}/{path.relative_to(folder).as_posix()}": path for path in folder.glob("*/*.jpg")}
        lacking = [name for name, path in files.items() if have.get(name) != path.stat().st_size]
        for parent in {name.rpartition("/")[0] for name in lacking} if isinstance(fs, LocalFileSystem) else ():
            fs.makedirs(parent, exist_ok=True)
        fs.put([str(files[name]) for name in lacking], lacking)
    except Exception as error:  # each protocol has its own, such as botocore's
        raise _cannot_write(root, error) from error
    return f"{root}/{folder.name}"


def on_all_workers(path: str) -> str:
    """Return `path`, of this machine, if all workers of the current client see it, if there is one; raise NotShared."""
    from distributed import default_client

    client = None
    with suppress(ValueError):  # there is none
        client = default_client()
    seen = client.run(os.path.exists, path, on_error="ignore") if client else {}
    if blind := [worker for worker, sees in seen.items() if not sees]:
        raise NotShared(f"{path!r} lies on this machine, and {len(blind)} of {len(seen)} workers do not see it, "
                        f"{blind[0]} first. Give all a place that they reach: type\n"
                        "%env WORKSHOP_SHARED=s3://BUCKET/FOLDER\n"
                        "in a cell, or the path of a folder that all machines have, and run this again.")  # fmt: skip
    return path


def default_storage_options(url: str | os.PathLike) -> dict:
    """Return {"anon": True} for an s3:// address where neither the environment nor ~/.aws holds credentials, else {}.

    An instance's role is not looked for: set FSSPEC_S3_ANON=false to use it.
    """
    signs = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY", "AWS_CONTAINER_CREDENTIALS", "FSSPEC_S3_")
    known = any(name.startswith(signs) for name in os.environ) or Path.home().joinpath(".aws/credentials").exists()
    return {} if known or not str(url).startswith("s3://") else {"anon": True}


def open_address(url: str | os.PathLike, storage_options: dict | None = None) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return (filesystem, path in it) of a local path or any address that fsspec knows.

    storage_options: what fsspec needs there; None for `default_storage_options`.
    Raises ValueError for an unknown protocol, ImportError where its package is missing.

    >>> open_address("memory://dogs/rex.jpg")[1]
    '/dogs/rex.jpg'
    """
    # fsspec keeps one filesystem per process and set of options, so this is cheap, and right after a fork.
    options = default_storage_options(url) if storage_options is None else storage_options
    if str(url).startswith("s3://"):
        of_botocore = {"max_pool_connections": S3_CONNECTIONS, **options.get("config_kwargs", {})}
        # Parts of a file at once; for more than one, s3fs asks for each file's size before it asks for the file.
        options = {"max_concurrency": 1, **options, "config_kwargs": of_botocore}
    return fsspec.core.url_to_fs(str(url), **options)


def _cannot_write(root: str, error: Exception) -> NotShared:
    return NotShared(f"WORKSHOP_SHARED is {root!r}, which cannot be written ({error}): set it to an address that this "
                     "machine may write, and give it what the storage asks for, such as AWS_ACCESS_KEY_ID.")


def _shared_root() -> str:
    root = os.environ.get("WORKSHOP_SHARED", "").rstrip("/")
    return root if "://" in root or not root else str(Path(root).expanduser().absolute())


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file beside `path`; when the block ends, it takes the place of `path`.

    After an error in the block, it is deleted and `path` is as it was. The folder is made where it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
