"""A lock beside a checkpoint, so that two runs never write the same one at the same time."""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EAGAIN

from fsspec.implementations.local import LocalFileSystem

from daskrun.child.context import current
from workshop_utils.storage import open_address

BEAT_S = 5  # between two signs of life in a storage that has no locks
SILENT_S = 3 * BEAT_S  # after which the owner of a lock there is dead


_held: set[str] = set()
_adding = threading.Lock()


class CheckpointInUse(RuntimeError):
    """Another run that's alive writes this checkpoint; the message says which."""

    def __init__(self, path: str, owner: str) -> None:
        super().__init__(path, owner)  # pickle needs both
        self.path, self.owner = path, owner

    def __str__(self) -> str:
        return f"{self.path!r} is being written by {self.owner}: wait for its end, stop it, or give another path."


@contextmanager
def checkpoint_lock(path: str | os.PathLike) -> Iterator[Callable[[], None]]:
    """Own the checkpoint at a path for as long as the block runs; yield what raises if it's owned no more.

    The lock is a file, ``<path>.lock``, which names its owner. On a disk it's locked by the kernel, so a process that
    was killed blocks nobody. In an object store, its owner writes it again every five seconds, and who comes after a
    killed one waits for three such times.

    Raises:
        CheckpointInUse: If a run that's alive owns it.
    """
    rank = current()
    owner = f"the job {rank.mine.attempt.job}" if rank else f"process {os.getpid()} on {socket.gethostname()}"
    fs, key = open_address(path)
    if isinstance(fs, LocalFileSystem):
        with _locked_by_the_kernel(str(path), f"{os.path.realpath(key)}.lock", owner):
            yield lambda: None
    else:
        with _kept_alive(str(path), fs, f"{key}.lock", owner) as check:
            yield check


@contextmanager
def _locked_by_the_kernel(path, file, owner):
    os.makedirs(os.path.dirname(file), exist_ok=True)
    with _held_by_this_process(path, file, owner), _opened_and_locked(path, file) as lock:
        lock.truncate(0)
        lock.write(owner)
        lock.flush()
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                os.unlink(file)


@contextmanager
def _held_by_this_process(path, file, owner):
    """The kernel's lock is the process's, so another thread would get it, too."""
    with _adding:
        if file in _held:
            raise CheckpointInUse(path, owner)
        _held.add(file)
    try:
        yield
    finally:
        _held.discard(file)


def _opened_and_locked(path, file):
    while True:
        lock = open(file, "a+")  # noqa: SIM115  it stays open
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (EACCES, EAGAIN):
                with lock:
                    lock.seek(0)
                    raise CheckpointInUse(path, lock.read() or "another run") from error
            return lock  # this disk has no locks
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(file)):
                return lock
        lock.close()  # the owner of before has just deleted this file


@contextmanager
def _kept_alive(path, fs, key, owner):
    mine, over = uuid.uuid4().hex, threading.Event()

    def read():
        with suppress(FileNotFoundError, ValueError):
            read = json.loads(fs.cat_file(key))
            return read if isinstance(read, dict) and {"owner", "run"} <= read.keys() else None
        return None

    def beat():
        fs.pipe_file(key, json.dumps({"owner": owner, "run": mine, "at": time.time()}).encode())

    def check():
        if (now := read()) and now["run"] != mine:
            raise CheckpointInUse(path, now["owner"])

    def keep_alive():
        while not over.wait(BEAT_S):
            with suppress(Exception):  # the next one may arrive
                check()
                beat()

    before, until = read(), time.monotonic() + SILENT_S
    while before and before["owner"] != owner and time.monotonic() < until:  # else it's this job, restarted
        time.sleep(1)
        if (now := read()) and now != before:
            raise CheckpointInUse(path, now["owner"])
        before = now
    beat()
    thread = threading.Thread(target=keep_alive, daemon=True)
    thread.start()
    try:
        yield check
    finally:
        over.set()
        thread.join()
        with suppress(Exception):
            check()
            fs.rm_file(key)
