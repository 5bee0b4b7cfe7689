"""Where files lie: the cache folder, whatever fsspec can open, and files written whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import platformdirs

S3_CONNECTIONS = 64  # with botocore's own 10, a batch of 32 would wait four times for storage far away


def cache_folder() -> Path:
    """Return the folder for downloads and sketches: WORKSHOP_CACHE, else the user's cache folder."""
    return Path(os.environ.get("WORKSHOP_CACHE") or platformdirs.user_cache_dir("workshop-dask-pytorch"))


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
