"""What worker processes look like also while one does not answer: its nanny is asked, too, with a time limit."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pandas as pd
import psutil
import torch
from distributed import Client

from daskrun.settings import known_workers

ANSWER_S = 3  # time limit for each worker and nanny
OWN_LINES = "Run out-of-band function"  # what a worker logs whenever it is asked
COLUMNS = ["worker", "pid", "state", "cpu_percent", "memory_mb", "limit_mb", "n_threads", "torch_threads", "children"]


def worker_rows(client: Client) -> pd.DataFrame:
    """Return one row per worker, as in `gym.Case.workers`."""
    workers = known_workers(client)
    processes = client.sync(_ask, client, list(workers), _process, nanny=True)
    torch_threads = client.sync(_ask, client, list(workers), _torch_threads)
    rows = [
        {
            "worker": str(info["name"]),
            "limit_mb": (info["memory_limit"] or float("nan")) / 2**20,
            "torch_threads": torch_threads.get(address),
            **(processes.get(address) or {}),
        }
        for address, info in workers.items()
    ]
    return pd.DataFrame(rows, columns=COLUMNS).sort_values("worker", ignore_index=True)


def log_lines(client: Client, since: float) -> str:
    """Return the lines that nannies and workers logged, and Dask's reasons for restarts. since: Unix seconds."""

    def records(dask_worker: Any) -> list[tuple[float, str, str]]:
        return dask_worker.get_logs(start=since, timestamps=True)[::-1]

    workers = known_workers(client)
    told = {
        "nanny": client.sync(_ask, client, list(workers), records, nanny=True),
        "worker": client.sync(_ask, client, list(workers), records),
    }
    lines = []
    for address, info in workers.items():
        for who, by_address in told.items():
            if by_address.get(address) is None:
                lines.append(f"{who} {info['name']}: does not answer within {ANSWER_S} s")
            texts = [text for _, _, text in by_address.get(address) or () if OWN_LINES not in text]
            lines += [f"{who} {info['name']}: {text}" for text in texts]
    for at, event in client.get_events("worker-restart-memory") or ():
        if at >= since:
            lines.append(f"event worker-restart-memory: {event}")
    return "\n".join(lines) or "Nobody has logged anything."


async def _ask(client: Client, workers: list[str], function: Callable, nanny: bool = False) -> dict[str, Any]:
    """Return {worker's address: what `function` returns in it, or in its nanny; None if that does not answer}."""

    async def ask(address: str) -> Any:
        with suppress(Exception):  # it has no nanny, it is ending, or it is stuck
            run = client.run(function, workers=[address], nanny=nanny, on_error="ignore")
            return (await asyncio.wait_for(run, ANSWER_S)).get(address)

    return dict(zip(workers, await asyncio.gather(*map(ask, workers)), strict=True))


async def _process(dask_worker: Any) -> dict[str, Any] | None:
    """Return what a nanny sees of its worker's process; None if it has none."""
    if not dask_worker.pid:
        return None
    process = psutil.Process(dask_worker.pid)
    process.cpu_percent()
    await asyncio.sleep(0.5)
    return {
        "pid": process.pid,
        "state": process.status(),
        "cpu_percent": process.cpu_percent(),
        "memory_mb": process.memory_info().rss / 2**20,
        "n_threads": process.num_threads(),
        "children": len(process.children()),
    }


def _torch_threads() -> int:
    return torch.get_num_threads()
