"""Call one object on many batches, on all workers of a cluster: `map_batches`."""

import asyncio
import hashlib
import inspect
import io
import os
import pickle
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from numbers import Integral
from typing import TYPE_CHECKING, Any

import cloudpickle
import dask
from dask.utils import format_bytes
from distributed import Client, Future, secede
from tqdm import tqdm

from daskrun.errors import SchedulerLost, check_client, warn
from daskrun.screen import screen
from daskrun.worker import batches as on_workers
from daskrun.worker.batches import Batch, Part, Rows

if TYPE_CHECKING:
    import pandas as pd

TASKS_PER_THREAD = 4  # at a time: while the next one in order takes long, other threads have work
LARGE = 100_000  # bytes of a pickled maker
FORGET_S = 10.0  # time limit for workers to drop what they have made
LOOK_S = 2.0  # between two looks at workers while a result is awaited
SHOWN_AFTER_S = 2
PART = re.compile(r"part-(\d+)-(\w+)\.parquet")


def parquet_batches(
    url: str | os.PathLike, columns: Sequence[str] | None = None, *, storage_options: dict[str, Any] | None = None
) -> list[Rows]:
    """Return the row groups of a Parquet file, or of all in a folder, as items for `map_batches`.

    A batch is a DataFrame of as many rows as ``batch_size`` says, but never of two row groups. Nothing but the files'
    footers is read here.

    Args:
        url: A path or address that fsspec opens, which all workers reach.
        columns: Those to read; None for all.
        storage_options: For fsspec.

    Raises:
        FileNotFoundError: If there's no such file, or no Parquet file in the folder itself.
        ValueError: For a file that's no Parquet, and for a column that it doesn't have.
    """
    from fsspec.core import url_to_fs

    options = storage_options or {}
    fs, path = url_to_fs(_absolute(os.fspath(url)), **options)
    files = sorted(fs.glob(f"{path.rstrip('/')}/*.parquet")) if fs.isdir(path) else [path]
    if not files or not fs.exists(files[0]):
        raise FileNotFoundError(f"{url} is no Parquet file, and no folder that holds *.parquet itself.")
    chosen = (columns,) if isinstance(columns, str) else None if columns is None else tuple(columns)
    groups = (on_workers.row_groups(fs.unstrip_protocol(file), chosen, options) for file in files)
    return list(chain.from_iterable(groups))


def map_batches(
    client: Client,
    make: Callable[[], Callable],
    items: Iterable,
    *,
    batch_size: int = 32,
    output: str | os.PathLike | None = None,
    on_error: str = "raise",
    storage_options: dict[str, Any] | None = None,
    batches_per_task: int = 8,
    ahead: int = 1,
    progress: bool = True,
) -> Any:
    """Call an object on batches of items, on all workers, and return the rows in the order of the items.

    Each worker process makes one object, and keeps it until the call ends. If it has a method ``load``, this is called
    in threads with the items of the next batches, as many as ``ahead`` says, while a batch is computed; what it returns
    is what the object is called with. A worker with several threads calls both at the same time. If a worker dies, its
    batches run again on another one, which makes an object of its own.

    Without ``output``, the rows come as an iterator of DataFrames. No more items are taken, and no more tasks given to
    the cluster, than keep the workers busy while you use one, so memory stays flat. An error, an interrupt and the
    iterator's ``close()`` free the workers.

    Args:
        client: A connected ``distributed.Client``.
        make: A class, or a function without arguments, that returns what is called with each batch and returns columns
            (a dict of lists, arrays or tensors on any device) or a DataFrame, with any number of rows.
            ``functools.partial`` gives it arguments.
        items: Anything that can be iterated: paths, rows; or `parquet_batches`. A batch is a list of them, or a
            DataFrame of Parquet's rows.
        batch_size: Items of a batch.
        output: A folder, or an address that fsspec opens and all workers reach. Each task then writes its rows there as
            a Parquet file, atomically, and a call with the same items, sizes and class skips what is there already. A
            class that you've changed, and other items, need another folder. Types are widened at the end where parts
            differ, as integers and floats.
        on_error: "raise", or "row": if a batch fails, its items are tried one by one, and those that fail become rows
            in which only the column ``error`` has a value.
        storage_options: For fsspec, for ``output``.
        batches_per_task: The most batches of a task. What a lost worker costs, and a file's size, grows with it.
        ahead: Batches that are loaded while another is computed.
        progress: Whether to show a bar, from the third second on.

    Returns:
        An iterator of DataFrames; with ``output``, the addresses of the files, in order.

    Raises:
        TypeError: If ``make`` can't be called without arguments.
        ValueError: For an invalid argument, or an ``output`` with parts of other items or of types that don't go
            together.
        SchedulerLost: If the client is closed, also meanwhile, or its scheduler is lost.

    What ``make`` or its object raises is raised here, of a batch with a note that names it. A batch that ends its
    worker's process raises Dask's KilledWorker, once it has done so four times.

    >>> from distributed import Client
    >>> class Lengths:
    ...     def __call__(self, words):
    ...         return {"word": words, "length": [len(word) for word in words]}
    >>> with Client(processes=False, dashboard_address="127.0.0.1:0") as client:
    ...     frames = list(map_batches(client, Lengths, ["a", "dog", "is", "here"], batch_size=3))
    >>> [frame.length.tolist() for frame in frames]
    [[1, 3, 2], [4]]
    """
    check_client(client)
    if isinstance(items, (str, bytes, os.PathLike, Mapping)) or hasattr(items, "columns"):
        raise ValueError(f"items is a {type(items).__name__}: give a list, or parquet_batches.")
    counts = {"batch_size": batch_size, "batches_per_task": batches_per_task, "ahead": ahead}
    for name, value in counts.items():
        if not isinstance(value, Integral) or value < (name != "ahead"):
            raise ValueError(f"{name} is {value!r}: give an integer of at least {int(name != 'ahead')}.")
    if on_error not in ("raise", "row"):
        raise ValueError(f"on_error is {on_error!r}: write 'raise' or 'row'.")
    with suppress(ValueError):  # of a built-in function, which tells no arguments
        inspect.signature(make).bind()  # raises TypeError
    with suppress(ValueError, AttributeError, KeyError):  # in no task, in none with a thread, or it has left before
        secede()  # a task of Dask that calls this gives its thread back, as the batches may need it
    total = None
    if isinstance(items, Sized):
        total = sum(len(item) if isinstance(item, Rows) else 1 for item in items)
    batches = _batched(items, batch_size)
    run = _Run(client, make, on_error == "row", ahead)
    bar = partial(tqdm, desc=run.name, total=total, unit=" items", delay=SHOWN_AFTER_S, file=screen())
    bar = partial(bar, **({} if progress else {"disable": True}))  # given False, TQDM_DISABLE has no effect
    if output is None:
        return _frames(run, _long_tasks_first(batches, run.n_threads, batches_per_task), bar)
    tasks = iter(lambda: list(islice(batches, batches_per_task)), [])
    return _write(run, tasks, _absolute(os.fspath(output)), storage_options or {}, bar)


def _frames(run: "_Run", tasks: Iterable[list[Batch]], bar: Callable) -> Iterator["pd.DataFrame"]:
    with bar() as line:
        for task, frame in run.results((task, None) for task in tasks):
            line.update(sum(map(len, task)))
            yield frame


def _write(run: "_Run", tasks: Iterable[list[Batch]], folder: str, options: dict[str, Any], bar: Callable) -> list[str]:
    """Write a part for each task that has none yet, and return all parts' addresses."""
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(folder, **options)
    if not fs.async_impl:  # the others are object stores, which have no folders
        fs.makedirs(root, exist_ok=True)
    names, there = set[str](), dict[int, str]()
    with suppress(FileNotFoundError):
        names = {path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False, refresh=True)}
        there = {int(found[1]): found[0] for found in map(PART.fullmatch, names) if found}

    def with_parts() -> Iterator[tuple[list[Batch], Part]]:
        for number, task in enumerate(tasks):
            name = f"part-{number:06}-{_digest(task, run.name)}.parquet"
            if there.pop(number, name) != name:
                raise ValueError(
                    f"{folder} holds another part {number}: of other items, of another class than {run.name}, or of "
                    "another batch_size or batches_per_task. Give another folder, or delete this one."
                )
            yield task, Part(f"{folder.rstrip('/')}/{name}", options, name in names)

    parts: list[Part] = []
    schema = b""
    with bar() as line:
        for task, part in run.results(with_parts()):
            parts.append(part)
            try:
                schema = on_workers.merged([schema, part.schema]) if schema else part.schema
            except (ValueError, TypeError) as error:
                raise ValueError(f"{part.path} doesn't go with the parts before it, so delete it: {error}") from error
            line.update(sum(map(len, task)))
        if there:
            raise ValueError(f"{folder} holds parts {sorted(there)}, too, of other items: delete them.")
        run.retype([part for part in parts if part.schema != schema], schema)
    return [part.path for part in parts]


def _digest(task: list[Batch], made_by: str) -> str:
    """Return what's the same for equal items of the same class, whichever objects the items are."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.fast = True  # it writes an object twice where it's there twice
    pickler.dump([replace(batch, storage_options=b"") if isinstance(batch, Rows) else batch for batch in task])
    return hashlib.sha256(file.getvalue() + made_by.encode()).hexdigest()[:10]


class _Run:
    """What all tasks of one call have in common."""

    def __init__(self, client: Client, make: Callable, row_errors: bool, ahead: int) -> None:
        self.name = getattr(getattr(make, "func", make), "__name__", "map_batches")  # of a partial's function
        self._client, self._call, self._warned = client, uuid.uuid4().hex, set[str]()
        self._counted_at, self._n_threads = -LOOK_S, 1
        self._make: bytes | Future = cloudpickle.dumps(make)
        if len(self._make) > LARGE:  # not with each task; the scheduler has it for workers that come later
            with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TB"}):
                self._make = client.submit(bytes, self._make, key=f"{self.name}-made-by-{self._call}")
            client.replicate([self._make])  # or Dask would give the first tasks to the one worker that has it
        self._rest = row_errors, ahead

    @property
    def n_threads(self) -> int:
        """The cluster's threads, counted again now and then, as workers come and go."""
        if time.monotonic() > self._counted_at + LOOK_S:
            self._n_threads = sum(self._client.nthreads().values()) or 1  # the only worker may be restarting
            self._counted_at = time.monotonic()
        return self._n_threads

    def results(self, tasks: Iterator[tuple[list[Batch], Part | None]]) -> Iterator[tuple[list[Batch], Any]]:
        """Yield each task's batches and result, in order, while those after it run."""
        running: deque[tuple[list[Batch], Future]] = deque()
        try:
            for task, part in chain(tasks, [([], None)]):
                if task:
                    given = self._call, self._make, task, *self._rest, part
                    key = f"{self.name}-{uuid.uuid4().hex}"
                    running.append((task, self._client.submit(on_workers.run_task, *given, key=key)))
                while running and (not task or len(running) > TASKS_PER_THREAD * self.n_threads):
                    future = running[0][1]
                    result = result_of(self._client, future, self._warned)
                    future.release()  # or a cycle that a timeout left keeps it, and a death has it computed again
                    yield running.popleft()[0], result
        except Exception as error:  # each call of a closed client raises an error of another type
            if self._client.status != "running":
                raise SchedulerLost(
                    f"The scheduler is lost or the client was closed (it is {self._client.status}): start or join a "
                    "cluster, and go on with the items that have no row yet."
                ) from error
            raise
        finally:
            if self._client.status == "running":  # a closed one refuses, and its scheduler has cancelled them
                self._client.cancel([future for _, future in running])  # frees the workers after an error or Ctrl-C
                loop: Any = self._client.loop
                asyncio.run_coroutine_threadsafe(_forget(self._client, self._call), loop.asyncio_loop)

    def retype(self, parts: Sequence[Part], schema: bytes) -> None:
        """Give parts these types, on the workers."""
        futures = [self._client.submit(on_workers.retype, part, schema, pure=False) for part in parts]
        for future in futures:
            result_of(self._client, future, self._warned)


async def _forget(client: Client, call: str) -> None:
    """Have the workers drop what they have made for a call; nobody waits for one that hangs."""
    with suppress(Exception):
        await asyncio.wait_for(client.run(on_workers.forget, call, on_error="ignore"), FORGET_S)  # type: ignore[arg-type]


def result_of(client: Client, future: Future, warned: set[str]) -> Any:
    """Return a future's result; warn meanwhile if workers are paused, or none is left, as Dask then waits silently.

    Args:
        warned: The workers that were named before, by address; it grows.
    """
    while True:
        try:
            return future.result(timeout=LOOK_S)
        except TimeoutError:
            if future.done():  # a task's own error, or it took long to send
                return future.result()
        workers = client.scheduler_info(n_workers=-1)["workers"]
        for address, of in workers.items():
            if of["status"] == "paused" and address not in warned:
                warned.add(address)
                used, limit = format_bytes(of["metrics"]["memory"]), format_bytes(of["memory_limit"])
                warn(
                    f"Worker {address} is paused, so it starts no task: it uses {used} of its {limit}. It goes on by "
                    "itself once it uses less. Delete futures and variables that hold much, call "
                    f"client.restart_workers([{address!r}]), or give workers more memory."
                )
        if not workers and "" not in warned:
            warned.add("")
            warn("The cluster has no worker. This waits until one joins.")


def _batched(items: Iterable, size: int) -> Iterator[Batch]:
    left = iter(items)
    for item in left:
        if isinstance(item, Rows):
            yield from (item[start : start + size] for start in range(0, len(item), size))
        else:
            yield [item, *islice(left, size - 1)]


def _long_tasks_first(batches: Iterator[Batch], n_threads: int, longest: int) -> Iterator[list[Batch]]:
    """Yield batches as consecutive tasks: long ones first, single batches last, so that threads end together.

    At most 2 * n_threads * longest batches are taken ahead: by these we know where the last, shorter tasks begin.

    >>> [len(task) for task in _long_tasks_first(iter([["a.jpg"]] * 20), n_threads=2, longest=8)]
    [5, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1]
    """
    ahead = deque(islice(batches, 2 * n_threads * longest))
    while ahead:
        size = min(max(len(ahead) // (2 * n_threads), 1) if n_threads > 1 else len(ahead), longest)
        yield [ahead.popleft() for _ in range(size)]
        ahead.extend(islice(batches, size))


def _absolute(url: str) -> str:
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))
