"""Read and list s3:// with obstore, which is several times as fast as s3fs, and leave to s3fs what obstore cannot do.

s3fs finds endpoint, region and credentials, and each error is its own. Unlike s3fs, obstore does not compare what it
read with a checksum that S3 may have of the object.
"""

import asyncio
import atexit
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import fsspec
from fsspec.asyn import get_loop, sync

REQUESTS = 64  # at the same time: storage takes long to answer, but no longer for many questions
TIMEOUT_S = 5  # to connect, and from one packet to the next; then the request is sent again
GIVE_UP_AFTER_S = 8  # no request is sent again after this: s3fs may take another 30 s to say what is wrong
MAX_RETRIES = 4
PAUSE_S = 60  # s3fs alone is asked for so long after obstore read nothing of a bucket
CREDENTIALS_LAST = timedelta(minutes=10)  # obstore asks for them again after half of it; botocore renews them
# What s3fs may be given: it does not change what is asked for, or `_make_store` heeds it.
OF_ACCOUNT = {"anon", "key", "secret", "token", "username", "password", "profile", "endpoint_url", "use_ssl"}
OF_CACHE = {"use_listings_cache", "listings_expiry_time", "max_paths", "cache_regions"}
OPTIONS = OF_ACCOUNT | OF_CACHE | {"client_kwargs", "config_kwargs", "max_concurrency"}
OF_CLIENT = {"endpoint_url", "region_name"}
ONLY_OBSTORES = ("AWS_SSE_", "AWS_SERVER_SIDE_ENCRYPTION")  # variables that s3fs does not heed
OF_CONFIG = {"max_pool_connections", "connect_timeout", "read_timeout", "retries"}

# {s3fs's filesystem: {bucket: (its S3Store, or None, and when to make another, in seconds of the monotonic clock)}}
_stores: WeakKeyDictionary[fsspec.AbstractFileSystem, dict] = WeakKeyDictionary()
_is_fork = False  # of a process that may have used obstore: a fork copies everything but threads


def _note_fork() -> None:
    global _is_fork
    _is_fork = _is_fork or "obstore" in sys.modules


os.register_at_fork(after_in_child=_note_fork)


def read_objects(fs: fsspec.AbstractFileSystem, paths: Sequence[str]) -> list[bytes | None]:
    """Return the bytes of each file, in order, all read at the same time; None for what `fs` has to be asked for.

    That is each file that obstore cannot read, for whatever reason, and all files of a filesystem other than s3fs.
    """
    if not _can_use_obstore(fs):
        return [None] * len(paths)
    parts = [fs.split_path(path) for path in paths]
    stores = {bucket: _store_of(fs, bucket) for bucket, _, _ in set(parts)}
    silent: set[str] = set()  # buckets whose last request failed without an answer
    if not any(stores.values()):
        return [None] * len(paths)
    contents = list(_threads().imap(partial(_read, stores, silent), parts))
    read_from = {part[0] for part, content in zip(parts, contents, strict=True) if content is not None}
    for bucket in silent - read_from:
        _stores[fs][bucket] = None, time.monotonic() + PAUSE_S
    return contents


def list_folders(fs: fsspec.AbstractFileSystem, root: str, is_wanted: Callable[[str], bool]) -> list[str] | None:
    """Return the paths of all files in the wanted folders directly below `root`; None if `fs` has to be asked.

    is_wanted: tells by a folder's path.
    """
    if not _can_use_obstore(fs):
        return None
    bucket, prefix, _ = fs.split_path(root)
    if not (store := _store_of(fs, bucket)):
        return None

    def list_one(folder):
        return [f"{bucket}/{file['path']}" for file in store.list_with_delimiter(folder)["objects"]]

    try:
        below = store.list_with_delimiter(prefix or None)["common_prefixes"]
        wanted = [folder for folder in below if is_wanted(f"{bucket}/{folder}")]
        return list(chain.from_iterable(_threads().imap(list_one, wanted)))
    except Exception:  # `fs` will say what is wrong
        return None


def _can_use_obstore(fs):
    if "s3" not in fs.protocol or _is_fork:  # obstore would wait for ever
        return False
    try:
        import obstore  # noqa: F401
        import s3fs
    except ImportError:
        return False
    options = fs.storage_options
    of_client, of_config = (options.get(name) or {} for name in ("client_kwargs", "config_kwargs"))
    known = options.keys() <= OPTIONS and of_client.keys() <= OF_CLIENT and of_config.keys() <= OF_CONFIG
    return known and type(fs) is s3fs.S3FileSystem


@cache
def _threads():
    pool = ThreadPool(REQUESTS)  # took half of the processor's time that an event loop did
    atexit.register(pool.terminate)
    return pool  # its threads are daemons: a program that is interrupted ends, and does not wait for storage


def _read(stores, silent, part):
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    bucket, key, version = part
    store = stores[bucket]
    if version or not store or not key or key != key.strip("/"):
        return None  # obstore ignores slashes at the ends, and would read another key, or a listing
    if bucket in silent:
        return None  # so that nobody waits for each of a thousand files
    try:
        content = bytes(store.get(key).bytes())
        silent.discard(bucket)
        return content
    except (FileNotFoundError, PermissionDeniedError, UnauthenticatedError):
        silent.discard(bucket)
    except ValueError:  # a name that obstore does not take, such as a//b: it asked nothing
        pass
    except Exception:
        silent.add(bucket)
    return None


def _store_of(fs, bucket):
    """Return the bucket's S3Store, the same each time; None if s3fs has to be used."""
    stores = _stores.setdefault(fs, {})
    store, again_at = stores.get(bucket, (None, 0))
    if not store and time.monotonic() >= again_at:
        with suppress(Exception):  # such as a key without its secret: s3fs will say what is wrong
            store = sync(get_loop(), _make_store, fs, bucket, failed_before=bucket in stores)
        stores[bucket] = store, time.monotonic() + PAUSE_S
    return store


async def _make_store(fs, bucket, failed_before):
    """Return an S3Store of the endpoint, region, credentials and timeouts that s3fs has; None for S3's rarer settings.

    failed_before: the bucket is asked for its region. (s3fs follows it there; obstore does not.)
    """
    from botocore import UNSIGNED
    from obstore.store import S3Store

    client = await fs.set_session()
    url, region, config = client.meta.endpoint_url, client.meta.region_name, client.meta.config
    if config.s3 or config.proxies or config.signature_version not in ("s3v4", UNSIGNED):
        return None
    if any(name.startswith(ONLY_OBSTORES) for name in os.environ):
        return None
    if failed_before:
        region = await asyncio.wait_for(_ask_region(client, bucket), TIMEOUT_S)
        url = re.sub(r"^(https?)://s3\.([\w-]+\.)?amazonaws\.com$", rf"\1://s3.{region}.amazonaws.com", url)
    return S3Store(
        bucket,
        aws_endpoint_url_s3=url,  # obstore prefers AWS_ENDPOINT_URL_S3 to `endpoint`
        request_payer=False,  # nor does s3fs heed AWS_REQUEST_PAYER
        s3_express=False,
        region=region,
        virtual_hosted_style_request=False,
        skip_signature=bool(fs.anon),
        credential_provider=None if fs.anon else await _credentials_of(fs),
        client_options=_http_settings(fs, url),
        retry_config={
            "max_retries": MAX_RETRIES,
            "retry_timeout": timedelta(seconds=GIVE_UP_AFTER_S),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
        },
    )


def _http_settings(fs, url):
    from botocore.utils import get_environ_proxies

    given, parts = fs.config_kwargs, urlsplit(url)
    settings = {
        "allow_http": url.startswith("http://"),
        "connect_timeout": f"{given.get('connect_timeout', TIMEOUT_S)}s",
        "read_timeout": f"{given.get('read_timeout', TIMEOUT_S)}s",
        "timeout": "1h",  # of a whole file: obstore's own, 30 s, is short for a large one on a slow line
    }
    # obstore reads the environment's proxies in another way: it heeds ALL_PROXY, and no_proxy=* not for a number.
    proxy = get_environ_proxies(url).get(parts.scheme)
    settings |= {"proxy_url": proxy} if proxy else {"proxy_url": url, "proxy_excludes": parts.hostname}
    if authorities := fs.session.get_config_variable("ca_bundle"):
        settings["root_certificate"] = Path(authorities).read_bytes()
    return settings


async def _ask_region(client, bucket):
    from botocore.exceptions import ClientError

    try:
        answer = await client.head_bucket(Bucket=bucket)
    except ClientError as error:  # also who may not look at the bucket is told its region
        answer = error.response
    return answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", client.meta.region_name)


async def _credentials_of(fs):
    """Return a function that gives obstore the credentials that s3fs signs with."""
    from aiobotocore.credentials import AioCredentials

    credentials = AioCredentials(fs.key, fs.secret, fs.token) if fs.key else await fs.session.get_credentials()

    def current():
        frozen = sync(get_loop(), credentials.get_frozen_credentials)
        names = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token}
        return names | {"expires_at": datetime.now(UTC) + CREDENTIALS_LAST}

    return current
