"""Keep what ranks send: metrics as TensorBoard files, and files of their own."""

import math
import time
import uuid
from collections.abc import Iterable
from itertools import groupby
from numbers import Real
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING

from daskrun.child.context import current
from daskrun.errors import check_client
from daskrun.metrics import latest_rows, refuse_children
from workshop_utils.shared import new_shared_folder
from workshop_utils.storage import local_path, open_address, whole_file

if TYPE_CHECKING:  # a rank that sends a file imports nothing of Dask, which takes half a second
    import pandas as pd
    from distributed import Client, Future

    from daskrun import Job


class ResultError(ValueError):
    """A result cannot be sent or stored; the message says which, and what to do."""


def write_tensorboard(rows: "Iterable[dict] | pd.DataFrame", folder: str | Path, *, step: str = "step") -> None:
    """Write TensorBoard event files, one run per rank, with a scalar for each number of each row.

    TensorBoard shows each step once: after a restart, the last attempt's row, and after another call with the same
    folder, that call's rows from its first step on.

    Args:
        rows: Dicts, such as ``job.rows()`` yields, or a DataFrame, as ``job.metrics()`` is; numbers may be NumPy's. All
            of them are read before the first is written.
        folder: The parent of the runs' folders, ``rank-0`` and so on.
        step: The name of the number that is a row's step. Rows without it are skipped.

    Raises:
        ResultError: If there are rows, and none has a step.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder, rows = local_path(folder), rows.to_dict("records") if hasattr(rows, "to_dict") else list(rows)
    numbers = [{name: x for name, value in row.items() if math.isfinite(x := _as_float(value))} for row in rows]
    numbers = [row for row in numbers if step in row]  # not where it is NaN, as in a row from a DataFrame
    if rows and not numbers:
        raise ResultError(
            f"None of {len(rows)} rows has a number {step!r}, so nothing was written: name another with step=."
        )
    by_rank = sorted(latest_rows(numbers, step), key=lambda row: (row.get("rank", 0), row[step]))
    for rank, of_rank in groupby(by_rank, lambda row: int(row.get("rank", 0))):
        steps = list(of_rank)
        with SummaryWriter(str(folder / f"rank-{rank}"), purge_step=int(steps[0][step])) as writer:
            for row in steps:
                for name in row.keys() - {"rank", "attempt", "time", step}:
                    writer.add_scalar(name, row[name], int(row[step]), walltime=row.get("time"))


def _as_float(value):
    """Return a number, also of NumPy or in a tensor, as a float; NaN for anything else."""
    if math.prod(getattr(value, "shape", [0])) == 1:
        value = value.item()
    return float(value) if isinstance(value, Real) else math.nan


class ResultsHandler:
    """Files from running jobs to the client, with the methods of dask_pytorch_ddp's handler, on today's Dask.

    Make it on the client before the job, hand it to the job's function, and call `process_results` while it runs. The
    files travel through the shared storage; only their names pass the scheduler.
    """

    def __init__(self, pub_sub_key: str | None = None, client: "Client | None" = None) -> None:
        """pub_sub_key: a name for the channel, drawn at random by default. client: by default the current one.

        Raises shared.NotShared where workers and client have no storage in common.
        """
        from distributed import default_client

        self.pub_sub_key = pub_sub_key or f"results-{uuid.uuid4().hex}"
        self.folder = new_shared_folder()
        self._client = client or default_client()
        check_client(self._client)
        self._arrived: list[dict[str, str]] = []  # path, and name in the folder
        self._client.subscribe_topic(self.pub_sub_key, lambda event: self._arrived.append(event[1]))

    def __getstate__(self) -> dict:
        return {"pub_sub_key": self.pub_sub_key, "folder": self.folder}

    def submit_result(self, path: str | PurePath, data: str | bytes) -> None:
        """Send a file from a worker, but not from a child process of a rank. path: relative, with /."""
        refuse_children("submit_result")
        relative, data = _relative(path), data.encode() if isinstance(data, str) else data
        if not isinstance(data, bytes):
            raise ResultError(f"data for {relative!r} is a {type(data).__name__}: give str or bytes.")
        name = uuid.uuid4().hex
        fs, there = open_address(f"{self.folder}/{name}")
        fs.pipe_file(there, data)
        about = {"path": relative, "name": name}
        if rank := current():
            rank.send("event", self.pub_sub_key, about)
        else:  # a task of Dask
            from distributed import get_worker

            get_worker().log_event(self.pub_sub_key, about)

    def process_results(
        self, prefix: str | Path, futures: "Job | Iterable[Job | Future]", raise_errors: bool = True
    ) -> list[Path]:
        """Write each result to `<prefix>/<path>` as it comes, until all `futures` are done; return the paths.

        A later result of the same path replaces an earlier one.

        Args:
            futures: Jobs of daskrun, or Dask's futures.
            raise_errors: Whether to raise what one of them raised; results that came before are written.
        """
        from daskrun import Job

        written: list[Path] = []
        pending = [futures] if isinstance(futures, Job) else list(futures)
        while pending or self._arrived:
            done = [future for future in pending if future.done()]  # asked before the last results are written
            while self._arrived:
                result = self._arrived.pop(0)
                written.append(self._keep(prefix, result["path"], result["name"]))
            for future in done if raise_errors else ():
                if isinstance(future, Job) or future.status != "finished":  # else its result stays where it is
                    future.result()
            pending = [future for future in pending if future not in done]
            time.sleep(0.05)  # until the next look at the futures
        return written

    def _keep(self, prefix: str | Path, path: str, name: str) -> Path:
        """Bring a result from the shared storage to its place, and delete it there."""
        prefix = local_path(prefix)
        target = Path(prefix, _relative(path)).resolve()  # checked here, too: what arrives is not trusted
        if not target.is_relative_to(Path(prefix).resolve()):
            raise ResultError(f"path {path!r} leads out of {str(prefix)!r} by a symbolic link: remove that link.")
        fs, there = open_address(f"{self.folder}/{PurePosixPath(name).name}")
        with whole_file(target) as part:
            part.write_bytes(fs.cat_file(there))
        fs.rm_file(there)
        return target


def _relative(path):
    name, parts = str(path), PurePosixPath(path).parts
    leads_out = name.startswith("/") or ".." in parts or "\\" in name or name[1:2] == ":"
    if leads_out or not parts or not name.isprintable():
        raise ResultError(f"path {name!r} is none inside the results' folder: give one such as 'runs/loss.csv'.")
    return name
