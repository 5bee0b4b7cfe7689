"""A place that all workers can read and write: a folder of this machine, or WORKSHOP_SHARED."""

import atexit
import getpass
import os
import re
import shutil
import stat
import tempfile
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from workshop_utils.storage import CacheError, absolute_address, cache_folder, open_address, variables, whole_file


class NotShared(RuntimeError):
    """Some workers cannot reach a place that all of them need; the message says what to type."""


def shared_folder() -> str:
    """Return the address of a folder that all workers and all processes of this user can read and write.

    It is the same at each call, so that a program which is started again finds its checkpoints: a folder with the
    user's name below WORKSHOP_SHARED, any address that `open_address` takes; else a folder in the cache of this
    machine, which no other user may read. Nothing in it is ever deleted for you.
    Raises NotShared if WORKSHOP_SHARED cannot be written, or if it is unset and workers do not see this machine's disk.
    """
    if address := _made_below_shared():
        return address
    folder = cache_folder() / "shared"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # whoever made it
    except OSError as error:
        raise CacheError(f"{str(folder)!r} cannot be used ({error.strerror}): export WORKSHOP_CACHE=FOLDER") from error
    return on_all_workers(str(folder))


def new_shared_folder() -> str:
    """Return the address of a new, empty folder that all workers can read and write, for what nobody reads later.

    It lies in the user's folder below WORKSHOP_SHARED, or is a folder of this machine that goes when this process
    ends. Raises what `shared_folder` raises.
    """
    if address := _made_below_shared(uuid.uuid4().hex):
        return address
    folder = tempfile.mkdtemp()
    atexit.register(_remove, folder, os.getpid())
    return on_all_workers(folder)


def _remove(folder: str, of: int) -> None:
    if os.getpid() == of:  # not a fork, which ends earlier
        shutil.rmtree(folder, ignore_errors=True)


def copy_for_workers(folder: Path) -> str:
    """Return an address at which all workers can read the photos of `folder`, which lie in folders of breeds.

    With WORKSHOP_SHARED, it is a copy in the user's folder there, to which missing photos are added; else it is
    `folder` itself.
    Raises NotShared if WORKSHOP_SHARED cannot be written, or if it is unset and workers do not see `folder`.
    """
    if not (address := _made_below_shared(folder.name)):
        return on_all_workers(str(folder))
    with _says_that_shared_cannot_be_written():
        fs, target = open_address(address)
        sizes = {path: about["size"] for path, about in fs.find(target, detail=True).items()}
        photos = {f"{target}/{path.relative_to(folder).as_posix()}": path for path in folder.glob("*/*.jpg")}
        missing = [copy for copy, photo in photos.items() if sizes.get(copy) != photo.stat().st_size]
        if isinstance(fs, LocalFileSystem):
            for copy in missing:
                with whole_file(Path(copy)) as part:  # another process may read or write the same copies now
                    shutil.copyfile(photos[copy], part)
        else:  # an object store shows a file once all of it is there
            fs.put([str(photos[copy]) for copy in missing], missing)
    return address


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


def _made_below_shared(*names):
    """Make a folder in the user's own below WORKSHOP_SHARED, and return its address; "" if WORKSHOP_SHARED is unset.

    A missing WORKSHOP_SHARED gets the permissions of the folder that it's in, so that the other users of that can
    make theirs beside this one.
    """
    if not variables().shared:
        return ""
    root = absolute_address(variables().shared)
    root = re.sub(r"(?<=[^/:])/+$", "", root)  # but s3:// and / end with their slash
    address = f"{root}{'' if root.endswith('/') else '/'}{'/'.join([_user(), *names])}"
    with _says_that_shared_cannot_be_written():
        fs, path = open_address(address)
        if isinstance(fs, LocalFileSystem):
            _make_as_its_parent(Path(root))
        if not fs.async_impl:  # the others are object stores, which have no folders
            fs.makedirs(path, exist_ok=True)
    return address


def _user():
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in a container, for example, a user may have no name
        return str(os.getuid())


def _make_as_its_parent(folder):
    if not folder.exists():
        _make_as_its_parent(folder.parent)
        folder.mkdir(exist_ok=True)  # another process may be first
        with suppress(OSError):  # as on a mounted bucket, which has no permissions
            folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))


@contextmanager
def _says_that_shared_cannot_be_written():
    try:
        yield
    except Exception as error:  # each protocol raises errors of its own, such as botocore's
        raise NotShared(
            f"WORKSHOP_SHARED is {variables().shared!r}, which cannot be written ({error}): set it to an address that "
            "you can write to from this machine, and set what the storage asks for, such as AWS_ACCESS_KEY_ID."
        ) from error
