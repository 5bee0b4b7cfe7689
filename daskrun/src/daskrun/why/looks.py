"""How the ranks of a job look: asked by the scheduler, which does not need the job's client for it."""

import asyncio
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from distributed.protocol.pickle import dumps

from daskrun.claims import Worker
from daskrun.protocol import AttemptId
from daskrun.scheduler import ask, known
from daskrun.why.look import Look
from daskrun.why.verdict import not_begun, unreachable
from daskrun.worker.rank import look

LOOK_S = 6  # time limit for a worker's answer


async def looks(
    attempt: AttemptId, ranks: Mapping[int, Worker], begun: Collection[int], dask_scheduler: Any = None
) -> tuple[list[Look], list[int]]:
    """Return (how each of these ranks of an attempt looks, those that ended meanwhile: their workers have none).

    begun: ranks that have begun; one that has not begun, and is gone, is left out.
    """
    looking = dumps(partial(look, attempt))
    answers = await asyncio.gather(*(_answer(dask_scheduler, worker.address, looking) for worker in ranks.values()))
    seen, ended = [], []
    for (rank, worker), (there, found) in zip(ranks.items(), answers, strict=True):
        if found:
            seen.append(found)
        elif rank in begun:
            if there:
                ended.append(rank)
            else:
                seen.append(unreachable(rank))
        elif states := known([worker.address], dask_scheduler):
            seen.append(not_begun(rank, states[0], attempt.job))
    return sorted(seen), ended


async def _answer(scheduler: Any, address: str, looking: bytes) -> tuple[bool, Look | None]:
    """Return (whether a worker answers, how its rank looks)."""
    try:
        return await asyncio.wait_for(ask(scheduler, address, looking), LOOK_S)
    except TimeoutError:
        return False, None
