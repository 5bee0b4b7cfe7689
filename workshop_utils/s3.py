"""Read and list s3:// with obstore, which is several times as fast as s3fs; what it does not give, s3fs is asked for.

So each error is s3fs's own. obstore finds region and keys by itself, in the environment (AWS_…): a profile of ~/.aws,
and options that are not in KNOWN, are left to s3fs.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from itertools import chain
from multiprocessing.pool import ThreadPool

import fsspec

REQUESTS = 64  # at the same time: storage takes long to answer, but no longer for many questions
HTTP = {"connect_timeout": "5s", "read_timeout": "5s", "timeout": "1h", "allow_http": True}  # 1h: a whole, large file
RETRIES = {"max_retries": 4, "retry_timeout": timedelta(seconds=8)}  # then s3fs may take 30 s to say what is wrong
KNOWN = {"anon", "key", "secret", "token", "client_kwargs", "config_kwargs", "max_concurrency"}
OF_CLIENT = {"endpoint_url": "aws_endpoint_url_s3", "region_name": "region"}  # what obstore calls them

OF_CONFIG = {"max_pool_connections"}

# {(bucket, settings): its S3Store; None where s3fs has to be asked, because there are no keys or obstore has failed}
_stores: dict[tuple, object] = {}


def read_objects(fs: fsspec.AbstractFileSystem, paths: Sequence[str]) -> list[bytes | None]:
    """Return the bytes of each file, in order, all read at the same time; None for what `fs` has to be asked for.

    That is each file that obstore cannot read, for whatever reason, and all files of a filesystem other than s3fs.
    """
    if not _can_use_obstore(fs):
        return [None] * len(paths)

    def read(part):
        bucket, key, version = part
        if version or not key or key != key.strip("/"):
            return None  # obstore ignores slashes at the ends, and would read another key, or a listing
        return _ask(fs, bucket, lambda store: bytes(store.get(key).bytes()))

    return list(_threads().imap(read, map(fs.split_path, paths)))


def list_folders(fs: fsspec.AbstractFileSystem, root: str, is_wanted: Callable[[str], bool]) -> list[str] | None:
    """Return the paths of all files in the wanted folders directly below `root`; None if `fs` has to be asked.

    is_wanted: tells by a folder's path.
    """
    if not _can_use_obstore(fs):
        return None
    bucket, prefix, _ = fs.split_path(root)

    def list_one(folder):
        return _ask(fs, bucket, lambda store: store.list_with_delimiter(folder))

    if (top := list_one(prefix or None)) is None:
        return None
    wanted = [folder for folder in top["common_prefixes"] if is_wanted(f"{bucket}/{folder}")]
    listed = list(_threads().imap(list_one, wanted))
    if None in listed:
        return None
    return [f"{bucket}/{file['path']}" for file in chain.from_iterable(one["objects"] for one in listed)]


def _can_use_obstore(fs):
    options = fs.storage_options
    of_client, of_config = (options.get(name) or {} for name in ("client_kwargs", "config_kwargs"))
    is_known = options.keys() <= KNOWN and of_client.keys() <= OF_CLIENT.keys() and of_config.keys() <= OF_CONFIG
    if "s3" not in fs.protocol or not is_known:
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


def _ask(fs, bucket, question):
    """Return what a store answers, None where it does not; one that does not answer is not asked again."""
    settings = _settings(fs.storage_options)
    known = bucket, *sorted(settings.items())
    if known not in _stores:
        _stores[known] = _new_store(bucket, settings)
    if (store := _stores[known]) is None:
        return None
    try:
        return question(store)
    except FileNotFoundError:
        return None
    except Exception:  # so that nobody waits for each of a thousand files
        _stores[known] = None
        return None


def _settings(options):
    """Return what obstore calls the options of an s3fs filesystem."""
    keys = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token"}
    found = {name: options[of_s3fs] for name, of_s3fs in keys.items() if options.get(of_s3fs)}
    found |= {OF_CLIENT[name]: value for name, value in (options.get("client_kwargs") or {}).items() if value}
    return found | ({"skip_signature": True} if options.get("anon") else {})


def _new_store(bucket, settings):
    from obstore.store import S3Store

    if not settings.keys() & {"skip_signature", "access_key_id"} and "AWS_ACCESS_KEY_ID" not in os.environ:
        return None
    try:
        return S3Store(
            bucket, **settings, virtual_hosted_style_request=False, client_options=HTTP, retry_config=RETRIES
        )
    except Exception:  # such as a key without its secret: s3fs will say what is wrong
        return None
