"""Read and list s3:// with obstore, which is several times as fast as s3fs; what it does not give, s3fs is asked for.

So each error is s3fs's own. obstore finds region and keys by itself, in the environment (AWS_…): a profile of ~/.aws,
and options that are not in OPTIONS, are left to s3fs.
"""

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.pool import ThreadPool
from typing import Any

import fsspec

FAILURES, PAUSE_S = 3, 60  # after so many failures in a row, obstore is not asked for so long
REQUESTS = 64  # at the same time: storage takes long to answer, but no longer for many questions
HTTP: Any = {"connect_timeout": "5s", "read_timeout": "5s", "timeout": "1h", "allow_http": True}  # 1h: of a whole file
RETRIES: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=8)}  # then s3fs may take 30 s to say what is wrong
# Options of s3fs that obstore has too, or does not need.
OPTIONS = {"anon", "key", "secret", "token", "client_kwargs", "config_kwargs", "max_concurrency", "use_listings_cache"}
CLIENT_OPTIONS = {"endpoint_url": "aws_endpoint_url_s3", "region_name": "region"}  # what obstore calls them
CONFIG_OPTIONS = {"max_pool_connections"}

Files = dict[str, tuple[int | None, str]]  # {path: (size or None, ETag or "")}; equal files have one ETag, mostly
_buckets: "dict[tuple, _Bucket]" = {}  # by name, settings and what the environment says


def read_objects(fs: fsspec.AbstractFileSystem, paths: Sequence[str]) -> list[bytes | None]:
    """Return the bytes of each file, in order, all read at the same time; None for what `fs` has to be asked for.

    That is each file that obstore cannot read, for whatever reason, and all files of a filesystem other than s3fs.
    """
    if not _can_use_obstore(fs):
        return [None] * len(paths)
    parts = [fs.split_path(path) for path in paths]
    buckets = {name: _bucket_of(fs, name) for name, _, _ in set(parts)}

    def read(part):
        name, key, version = part
        if version or _would_be_changed(key):
            return None
        return buckets[name].ask(lambda store: bytes(store.get(key).bytes()))

    return list(_threads().imap(read, parts))


def list_folder(fs: fsspec.AbstractFileSystem, path: str) -> tuple[list[str], Files] | None:
    """Return (folders, files) that lie directly in a folder; None if `fs` has to be asked."""
    if not _can_use_obstore(fs):
        return None
    name, key, _ = fs.split_path(path)
    if key and _would_be_changed(key):
        return None
    found = _bucket_of(fs, name).ask(lambda store: store.list_with_delimiter(key or None))
    if found is None:
        return None
    # obstore takes its slash from the empty object "folder/", with which S3's console makes a folder.
    files = {f"{name}/{o['path']}": (o["size"], o["e_tag"] or "") for o in found["objects"] if o["path"] != key}
    return [f"{name}/{folder}" for folder in found["common_prefixes"]], files


def _would_be_changed(key):
    """obstore ignores slashes at the ends, and would read another key, or a listing; it refuses the other odd keys."""
    return not {"", ".", ".."}.isdisjoint(key.split("/"))


def _can_use_obstore(fs):
    options = fs.storage_options
    of_client, of_config = (options.get(name) or {} for name in ("client_kwargs", "config_kwargs"))
    if "s3" not in fs.protocol:
        return False
    if "AWS_ENDPOINT" in os.environ:  # which obstore obeys, and botocore does not know
        return False
    if options.keys() - OPTIONS or of_client.keys() - CLIENT_OPTIONS.keys() or of_config.keys() - CONFIG_OPTIONS:
        return False
    try:
        import obstore  # noqa: F401
    except ImportError:
        return False
    return _first_process() == os.getpid()  # a fork of one that has used it has none of its threads


@cache
def _first_process():
    return os.getpid()


@cache
def _threads():
    return ThreadPool(REQUESTS)  # took half of the processor's time that an event loop did


class _Bucket:
    """A bucket of S3. store: obstore's; None if there are no keys for it, and s3fs has to be asked."""

    def __init__(self, name, settings, environment):
        from obstore.store import S3Store

        self.name, self.store = name, None
        self.n_failures, self.asked_from = 0, 0.0  # in a row; on the clock of time.monotonic
        if settings.keys() & {"skip_signature", "access_key_id"} or "AWS_ACCESS_KEY_ID" in environment:
            with suppress(Exception):  # such as a key without its secret: s3fs will say what is wrong
                self.store = S3Store(
                    name, **settings, virtual_hosted_style_request=False, client_options=HTTP, retry_config=RETRIES
                )

    def ask(self, question):
        """Return what the store answers, None where it does not. After several failures it is not asked for a time."""
        from obstore.exceptions import InvalidPathError, PermissionDeniedError, UnauthenticatedError

        if self.store is None or time.monotonic() < self.asked_from:
            return None
        try:
            answer = question(self.store)
        except (FileNotFoundError, InvalidPathError, PermissionDeniedError, UnauthenticatedError):  # one of a//b
            answer = None
        except Exception as error:
            self._note_failure(error)
            return None
        self.n_failures = 0
        return answer

    def _note_failure(self, error):
        if time.monotonic() < self.asked_from:  # of those that had been asked before
            return
        self.n_failures += 1
        if self.n_failures >= FAILURES:  # nobody should wait for each of a thousand files
            self.n_failures, self.asked_from = 0, time.monotonic() + PAUSE_S
            warnings.warn(
                f"obstore failed {FAILURES} times in a row, so s3fs, which is slower, reads s3://{self.name} for "
                f"{PAUSE_S} s ({type(error).__name__}: {str(error)[:200]}).",
                stacklevel=2,
            )


def _bucket_of(fs, name):
    """Return the bucket with this filesystem's options and the environment of today; the same for the same ones."""
    options, environment = fs.storage_options, {n: v for n, v in os.environ.items() if n.startswith("AWS_")}
    keys = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token"}
    settings = {name: options[of_s3fs] for name, of_s3fs in keys.items() if options.get(of_s3fs)}
    settings |= {CLIENT_OPTIONS[name]: value for name, value in (options.get("client_kwargs") or {}).items() if value}
    settings |= {"skip_signature": True} if options.get("anon") else {}
    known = name, *sorted(settings.items()), *sorted(environment.items())
    if known not in _buckets:
        _buckets[known] = _Bucket(name, settings, environment)
    return _buckets[known]
