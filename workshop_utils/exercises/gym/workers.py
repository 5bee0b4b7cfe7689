"""A case's ranks as the operating system sees them, also a stopped one; and what Dask has logged meanwhile."""

import asyncio
from contextlib import suppress
from typing import Any

import pandas as pd
import psutil
from distributed import Client

from daskrun import Job
from daskrun.worker.rank import rank_pids
from workshop_utils.cluster import known_workers

OWN_LINES = "Run out-of-band function"  # what a worker logs whenever it is asked
COLUMNS = ["worker", "pid", "state", "cpu_percent", "memory_mb", "limit_mb", "n_threads", "torch_threads", "children"]


def worker_rows(client: Client, job: Job) -> pd.DataFrame:
    """Return one row per rank of a job, as in `gym.Case.workers`."""

    async def process(dask_worker: Any) -> dict[str, Any] | None:
        for attempt, pid in rank_pids(dask_worker).items():
            with suppress(psutil.NoSuchProcess):
                if attempt.job == job_name:
                    return await _process(pid)
        return None

    job_name, known = job.name, known_workers(client)
    processes = client.run(process, workers=job.workers, on_error="ignore")
    metrics = job.metrics()
    torch_threads = {} if metrics.empty else metrics.groupby("worker")["torch_threads"].last()
    rows = [
        {
            "worker": str(known[address]["name"]),
            "limit_mb": (known[address]["memory_limit"] or float("nan")) / 2**20,
            "torch_threads": torch_threads.get(address),
            **(processes.get(address) or {}),
        }
        for address in job.workers
        if address in known
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def log_lines(client: Client, since: float) -> str:
    """Return the lines that nannies and workers have logged. since: Unix seconds."""

    def records(dask_worker: Any) -> list[tuple[float, str, str]]:
        return dask_worker.get_logs(start=since, timestamps=True)[::-1]

    told = {who: client.run(records, nanny=who == "nanny", on_error="ignore") for who in ("nanny", "worker")}
    lines = [
        f"{who} {info['name']}: {text}"
        for address, info in known_workers(client).items()
        for who, of_workers in told.items()
        for _, _, text in of_workers.get(address, ())
        if OWN_LINES not in text
    ]
    return "\n".join(lines) or "Nobody has logged anything."


async def _process(pid: int) -> dict[str, Any]:
    process = psutil.Process(pid)
    process.cpu_percent()
    await asyncio.sleep(0.5)
    return {
        "pid": pid,
        "state": process.status(),
        "cpu_percent": process.cpu_percent(),
        "memory_mb": process.memory_info().rss / 2**20,
        "n_threads": process.num_threads(),
        "children": len(process.children()),
    }
