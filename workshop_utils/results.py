"""Bring metrics and files from running ranks to the client while they run, and keep them."""

import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from math import prod
from pathlib import Path, PurePath, PurePosixPath

from distributed import Client, Future, default_client, get_worker

from workshop_utils.storage import whole_file

MAX_RESULT_BYTES = 16 * 2**20  # a message passes the scheduler, which keeps it; a model belongs into a checkpoint
# (worker, topic, values that each row begins with) while this process runs a rank, else None. A process runs one rank
# at a time, and the rank's function may log from any of its threads, so this is the process's and not a context's.
_job = None


class ResultError(ValueError):
    """A result cannot be sent or stored; the message says which, and what to do."""


def log_metrics(**values: object) -> None:
    """Send one row of named numbers, strings or booleans from a rank to the client, and go on at once.

    `Job.rows()` shows rows as they come, `Job.metrics()` all of them; each begins with rank, attempt and time (Unix
    seconds, by the rank's clock), and ends with worker, its address. One-element tensors and NumPy numbers become
    numbers. Outside a job nothing happens, so that the same function runs alone. Raises ResultError for other values.
    """
    if _job is not None:
        worker, topic, about = _job
        if taken := sorted(values.keys() & {*about, "time", "worker"}):
            raise ResultError(f"log_metrics writes {taken} itself: choose other names.")
        worker.log_event(topic, about | {"time": time.time()} | {name: _plain(name, values[name]) for name in values})


@contextmanager
def reporting(topic: str, **about: object) -> Iterator[None]:
    """Send this process's metrics to `topic` within the block; each row begins with `about`."""
    global _job
    _job = (get_worker(), topic, about)
    try:
        yield
    finally:
        _job = None


def write_tensorboard(rows: Iterable[dict], folder: str | Path, *, step: str = "step") -> None:
    """Write TensorBoard event files, one run per rank: each number of a row is a scalar at the row's `step`.

    rows: dicts, such as `job.rows()`. Rows without `step` are left out.
    """
    from torch.utils.tensorboard import SummaryWriter

    with ExitStack() as stack:
        writer_of = cache(lambda rank: stack.enter_context(SummaryWriter(str(Path(folder, f"rank-{rank}")))))
        for row in rows:
            numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and value == value}
            if step in numbers:  # not where it is NaN, as in a row from a DataFrame
                writer = writer_of(row.get("rank", 0))
                for name in [name for name in numbers if name not in ("rank", "attempt", "time", step)]:
                    writer.add_scalar(name, numbers[name], int(row[step]), walltime=row.get("time"))


class ResultsHandler:
    """Files from running jobs to the client, with the methods of dask_pytorch_ddp's handler, on today's Dask.

    Make it on the client before the job, hand it to the job's function, and call `process_results` while it runs.
    """

    def __init__(self, pub_sub_key: str | None = None, client: Client | None = None) -> None:
        """pub_sub_key: a name for the channel, drawn at random by default. client: by default the current one."""
        self.pub_sub_key = pub_sub_key or f"results-{uuid.uuid4().hex}"
        self._arrived: list[dict] = []
        (client or default_client()).subscribe_topic(self.pub_sub_key, lambda event: self._arrived.append(event[1]))

    def __getstate__(self) -> dict:
        return {"pub_sub_key": self.pub_sub_key}

    def submit_result(self, path: str | PurePath, data: str | bytes) -> None:
        """Send a file from a worker. path: relative, with /. data: str or bytes, 16 MiB at most."""
        name, data = _relative(path), data.encode() if isinstance(data, str) else data
        if not isinstance(data, bytes):
            raise ResultError(f"data for {name!r} is a {type(data).__name__}: give str or bytes.")
        if len(data) > MAX_RESULT_BYTES:
            raise ResultError(f"data for {name!r} has {len(data):,} bytes, more than {MAX_RESULT_BYTES:,}: "
                              "write it to storage that the client can read, as a checkpoint.")
        get_worker().log_event(self.pub_sub_key, {"path": name, "data": data})

    def process_results(self, prefix: str | Path, futures: Iterable[Future], raise_errors: bool = True) -> list[Path]:
        """Write each result to `<prefix>/<path>` as it comes, until all `futures` are done; return the paths.

        futures: of one or more jobs, such as `job.futures`. A later result of the same path replaces an earlier one.
        Raises what a future raised, unless raise_errors is False; results that came before it are written.
        """
        written, pending = [], list(futures)
        while pending or self._arrived:
            done = [future for future in pending if future.done()]  # asked before the last results are written
            while self._arrived:
                result = self._arrived.pop(0)
                written.append(_write(prefix, result["path"], result["data"]))
            for future in done if raise_errors else ():
                future.result()
            pending = [future for future in pending if future not in done]
            time.sleep(0.05)  # until the next look at the futures
        return written


def _plain(name, value):
    if (n_values := prod(getattr(value, "shape", ()))) != 1:  # of a tensor or an array
        raise ResultError(f"{name} has {n_values} values: log one number, such as its mean.")
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ResultError(f"{name} is {value}, which has more than 64 bits: log a float.")
    if not isinstance(value, (int, float, str, type(None))):
        raise ResultError(f"{name} is a {type(value).__name__}: log a number, a string or a boolean.")
    # A lone surrogate would end the worker's connection.
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _relative(path):
    name, parts = str(path), PurePosixPath(path).parts
    leads_out = name.startswith("/") or ".." in parts or "\\" in name or name[1:2] == ":"
    if leads_out or not parts or not name.isprintable():
        raise ResultError(f"path {name!r} is none inside the results' folder: give one such as 'runs/loss.csv'.")
    return name


def _write(prefix, path, data):
    target = Path(prefix, _relative(path)).resolve()  # again here: what arrives is not trusted
    if not target.is_relative_to(Path(prefix).resolve()):
        raise ResultError(f"path {path!r} leads out of {str(prefix)!r} by a symbolic link: remove that link.")
    with whole_file(target) as part:
        part.write_bytes(data)
    return target
