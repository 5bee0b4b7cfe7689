"""Looks at worker processes that also work where a worker does not answer: its nanny is asked, with a time limit."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pandas as pd
import torch
from distributed import Client

from daskrun.settings import known_workers

OF_LOOKS = "Run out-of-band function"  # what a worker logs whenever it is looked at
ANSWER_S = 3  # time limit for each worker and nanny
COLUMNS = (
    "worker",
    "pid",
    "state",
    "cpu_percent",
    "memory_mb",
    "limit_mb",
    "n_threads",
    "torch_threads",
    "children",
)


def worker_rows(client: Client) -> pd.DataFrame:
    """Return one row per worker, as in `gym.Case.workers`."""
    workers = known_workers(client)
    seen, threads = client.sync(_ask_both, client, list(workers), _process, _torch_threads)
    rows = []
    for address, info in workers.items():
        limit_mb = (info["memory_limit"] or float("nan")) / 2**20
        known = {"worker": str(info["name"]), "limit_mb": limit_mb, "torch_threads": threads.get(address)}
        rows.append(known | (seen.get(address) or {}))
    return pd.DataFrame(rows, columns=list(COLUMNS)).sort_values("worker", ignore_index=True)


def log_lines(client: Client, since: float) -> str:
    """Return the lines that nannies and workers logged, and Dask's reasons for restarts. since: Unix seconds."""

    def records(dask_worker: Any) -> list[tuple[float, str, str]]:
        return dask_worker.get_logs(start=since, timestamps=True)[::-1]

    workers = known_workers(client)
    nannies, own = client.sync(_ask_both, client, list(workers), records, records)
    lines = []
    for address, info in workers.items():
        for who, found in (("nanny", nannies.get(address)), ("worker", own.get(address))):
            if found is None:
                lines.append(f"{who} {info['name']}: does not answer within {ANSWER_S} s")
            told = [text for _, _, text in found or () if OF_LOOKS not in text]
            lines += [f"{who} {info['name']}: {text}" for text in told]
    for at, event in client.get_events("worker-restart-memory") or ():
        if at >= since:
            lines.append(f"event worker-restart-memory: {event}")
    return "\n".join(lines) or "Nobody has logged anything."


async def _ask_both(client, workers, of_nanny, of_worker):
    """Return ({address: what of_nanny returns in its nanny}, {address: what of_worker returns in the worker})."""

    async def ask(address: str, function: Callable, nanny: bool) -> Any:
        with suppress(Exception):  # it has none, it is ending, or it is stuck
            run = client.run(function, workers=[address], nanny=nanny, on_error="ignore")
            return (await asyncio.wait_for(run, ANSWER_S)).get(address)

    asked = [ask(address, of_nanny, True) for address in workers]
    asked += [ask(address, of_worker, False) for address in workers]
    answers = await asyncio.gather(*asked)
    return dict(zip(workers, answers, strict=False)), dict(zip(workers, answers[len(workers) :], strict=True))


async def _process(dask_worker: Any) -> dict[str, Any] | None:
    """Return what a nanny sees of its worker's process; None if it has none."""
    import psutil

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
