"""How the ranks of a job look: asked by the scheduler, which does not need the job's client for it."""

import asyncio
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from distributed.protocol.pickle import dumps

from daskrun.claims import Worker
from daskrun.protocol import AttemptId
from daskrun.scheduler import ask, known
from daskrun.why.look import Look
from daskrun.why.verdict import late, not_begun, unreachable
from daskrun.worker.rank import look

LOOK_S = 6  # time limit for a worker's answer
LATE_S = 1  # after the first answer: what was seen then cannot be compared with what was seen before


async def looks(
    attempt: AttemptId, ranks: Mapping[int, Worker], begun: Collection[int], dask_scheduler: Any = None
) -> tuple[list[Look], list[int]]:
    """Return (how each of these ranks of an attempt looks, those that ended meanwhile: their workers have none).

    begun: ranks that have begun; one that has not begun, and is gone, is left out.
    """
    looking = dumps(partial(look, attempt))
    answers = await asyncio.gather(*(_answer(dask_scheduler, worker.address, looking) for worker in ranks.values()))
    in_time_s = min((took_s for *_, took_s in answers), default=0) + LATE_S
    seen, ended = [], []
    for (rank, worker), (there, found, took_s) in zip(ranks.items(), answers, strict=True):
        if found:
            seen.append(found if found.is_mute or took_s < in_time_s else late(found, took_s))
        elif rank in begun:
            if there:
                ended.append(rank)
            else:
                seen.append(unreachable(rank))
        elif states := known([worker.address], dask_scheduler):
            seen.append(not_begun(rank, states[0], attempt.job))
    return sorted(seen), ended


async def _answer(scheduler: Any, address: str, looking: bytes) -> tuple[bool, Look | None, float]:
    """Return (whether a worker answers, how its rank looks, the seconds that it took)."""
    begin = time.monotonic()
    try:
        there, found = await asyncio.wait_for(ask(scheduler, address, looking), LOOK_S)
    except TimeoutError:
        there, found = False, None
    return there, found, time.monotonic() - begin
