"""Send rows of metrics from a rank to the client while the job runs."""

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from math import prod
from typing import Any

from daskrun.child.context import current, is_started_by_a_rank

_has_warned = False


def log_metrics(**values: object) -> None:
    """Send one row of named numbers, strings or booleans from a rank to the client, and go on at once.

    ``Job.rows()`` yields rows as they come, ``Job.metrics()`` has all of them; each begins with rank, attempt and time
    (Unix seconds, by the rank's clock), and ends with worker, its address. The dashboard's page of ranks draws them,
    against the number that is named ``step``; if there is none, it counts rows.

    One-element tensors and NumPy numbers become numbers. Outside of a job nothing happens, so that the same function
    runs alone, but a plain task of Dask gets a warning. A script under the command ``daskrun`` also prints its row. Any
    thread of the rank may log.

    Raises:
        ValueError: For other values, for names that begin with __, and in a process that a rank has started, such as a
            DataLoader's.
    """
    refuse_children("log_metrics")
    if not (rank := current()):
        _warn_in_a_task()
        return
    if taken := sorted(values.keys() & {"rank", "attempt", "time", "worker"}):
        raise ValueError(f"log_metrics writes {taken} itself: choose other names.")
    row = {_sendable(name): _plain(name, value) for name, value in values.items()}
    if rank.is_script:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    begin = {"rank": rank.mine.rank, "attempt": rank.mine.attempt.number, "time": time.time()}
    with suppress(OSError):  # a script has closed the connection
        rank.send("row", begin | row)


def _warn_in_a_task() -> None:
    """Warn, once in a process, that a task's rows go nowhere; Dask brings the warning to its client."""
    global _has_warned
    tasks = getattr(sys.modules.get("distributed.worker"), "thread_state", None)
    if not _has_warned and hasattr(tasks, "execution_state"):
        _has_warned = True
        from distributed import warn

        warn(
            "log_metrics was called in a task of Dask, whose rows go nowhere: return the numbers, or run the function "
            "as a job of one rank, daskrun.run(client, function, n_workers=1)."
        )


def latest_rows(rows: Iterable[dict[str, Any]], step: str = "step") -> list[dict[str, Any]]:
    """Return the rows without those that a later attempt of the same rank has repeated.

    Args:
        rows: As `Job.rows` yields them.
        step: The name of the number by which rows are the same. Rows without it are kept.
    """
    rows = list(rows)
    last: dict[tuple, int] = {}
    for row in rows:
        key = row.get("rank"), row.get(step)
        last[key] = max(row.get("attempt", 0), last.get(key, 0))
    return [row for row in rows if row.get(step) is None or row.get("attempt", 0) == last[row.get("rank"), row[step]]]


def refuse_children(name: str) -> None:
    """Raise ValueError in a process that a rank has started; name: of the function that was called there."""
    if is_started_by_a_rank():
        raise ValueError(
            f"{name} was called in process {os.getpid()}, which a rank has started, as a DataLoader does, and from "
            "which nothing reaches the client: return the values to the rank's own process, and send them there."
        )


def _plain(name: str, value: Any) -> int | float | str | None:
    if name.startswith("__"):  # Dask's own marks, such as __Set__, would end the worker's connection
        raise ValueError(f"{name!r} begins with __: choose another name.")
    try:
        if (n_values := prod(getattr(value, "shape", ()))) != 1:  # of a tensor or an array
            raise ValueError(f"{name} has {n_values} values: log one number, such as its mean.")
        value = value.item() if hasattr(value, "item") else value
        for kind in (bool, int, float):  # not a subclass, such as an IntEnum, which Dask does not send
            if isinstance(value, kind):
                value = kind(value)
                break
    except ValueError:
        raise
    except Exception as error:  # such as of a tensor of the device "meta"
        raise ValueError(f"{name} has no value to log ({error!r}).") from error
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} is {value}, which has more than 64 bits: log a float.")
    if not isinstance(value, (int, float, str, type(None))):
        raise ValueError(f"{name} is a {type(value).__name__}: log a number, a string or a boolean.")
    return _sendable(value) if isinstance(value, str) else value


def _sendable(text: str) -> str:
    """Return a text without lone surrogates, one of which would end the worker's connection; they are escaped."""
    return text.encode(errors="backslashreplace").decode()
