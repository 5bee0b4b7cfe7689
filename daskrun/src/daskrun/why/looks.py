"""How the ranks of a job look: asked by the scheduler, which does not need the job's client for it."""

import asyncio
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from distributed.protocol.pickle import dumps

from daskrun.claims import Worker
from daskrun.rank import AttemptId
from daskrun.scheduler import known
from daskrun.why.look import Look, look_here
from daskrun.why.process import ask, processes
from daskrun.why.verdict import late, not_begun, silent

LOOK_S = 5  # time limit for a worker's answer
LATE_S = 1  # after the first answer: what was seen then cannot be compared with what was seen before


async def looks(
    attempt: AttemptId, ranks: Mapping[int, Worker], begun: Collection[int], dask_scheduler: Any = None
) -> tuple[list[Look], list[int]]:
    """Return (how each of these ranks of an attempt looks, those that ended meanwhile: their workers have none).

    A worker's nanny answers for it where it does not. begun: ranks that have begun; one that has not begun, and is
    gone, is left out.
    """
    looking = dumps(partial(look_here, *attempt))
    answers = await asyncio.gather(*(_answer(dask_scheduler, worker.address, looking) for worker in ranks.values()))
    found = dict(zip(ranks, answers, strict=True))
    in_time_s = min((took_s for *_, took_s in answers), default=0) + LATE_S
    seen = [look if took_s < in_time_s else late(look, took_s) for _, look, took_s in answers if look]
    mute, ended = [], []
    for rank, worker in ranks.items():
        there, look, _ = found[rank]
        if rank in begun:
            mute += [rank] * (not there)
            ended += [rank] * (there and not look)
        elif not look and (states := known([worker.address], dask_scheduler)):
            seen.append(not_begun(rank, states[0], attempt.job))
    told = await processes([ranks[rank] for rank in mute], dask_scheduler)
    seen += [silent(rank, process, ranks[rank].has_nanny) for rank, process in zip(mute, told, strict=True)]
    return sorted(seen), ended


async def _answer(scheduler: Any, address: str, looking: bytes) -> tuple[bool, Look | None, float]:
    """Return (whether a worker answers, how its rank looks, the seconds that it took)."""
    begin = time.monotonic()
    try:
        there, look = await asyncio.wait_for(ask(scheduler, address, looking), LOOK_S)
    except TimeoutError:
        there, look = False, None
    return there, look, time.monotonic() - begin
