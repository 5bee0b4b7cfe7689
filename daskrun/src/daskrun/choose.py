"""Get workers for a job: ask the scheduler until it gives enough, and look whether they are really idle."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from distributed import Client

from daskrun.ask import ask_scheduler, ask_workers
from daskrun.decide import Choose
from daskrun.errors import JobError, listed
from daskrun.on_scheduler import claim, give_back, task_name
from daskrun.owners import Claimed, Denied, Request, Worker
from daskrun.rank import at_work

POLL_S = 0.2  # between two questions to the scheduler


async def choose(
    client: Client, request: Request, action: Choose, ending: Callable[[], bool], denied: Callable[[JobError], None]
) -> Claimed | JobError:
    """Return the workers that belong to the job from now on, or why it gets none.

    request: its `fewest` is set here. ending: whether the job does not want workers any more. denied: called with the
    reason each time that there are none yet.
    """
    deadline = time.monotonic() + action.patience_s
    while True:
        late = ending() or time.monotonic() >= deadline
        answer = await _claim(client, replace(request, fewest=action.fewest if late else action.most))
        if isinstance(answer, Claimed):
            return answer
        if ending() or (late and not answer.soon):
            return answer.error
        denied(answer.error)
        await asyncio.sleep(POLL_S)


async def _claim(client: Client, request: Request) -> Claimed | Denied:
    """Claim workers; where some are at work on what the scheduler does not know, others instead."""
    while True:
        answer = await ask_scheduler(client, claim, request)
        if isinstance(answer, Denied):
            return answer
        stuck, share_a_process = await _look_at(client, answer.workers)
        if not stuck and not share_a_process:
            return answer
        await ask_scheduler(client, give_back, request.job)
        if not stuck:
            return Denied(
                JobError(
                    f"{listed(worker.address for worker in answer.workers)} share a process, where each rank needs one "
                    "of its own: start the cluster with processes=True."
                )
            )
        request = replace(request, stuck={**request.stuck, **stuck})


async def _look_at(client: Client, workers: Sequence[Worker]) -> tuple[dict[str, list[str]], bool]:
    """Return (names of the tasks that workers are at, by address; whether two workers are one process)."""
    addresses = [worker.address for worker in workers]
    found = await ask_workers(client, addresses, at_work)
    for address, answer in found.items():
        if isinstance(answer, Exception):
            raise JobError(
                f"Worker {address} cannot use workshop_utils of this version ({answer}): install the same one there, "
                "and start the worker again."
            )
    stuck = {address: ["something that does not let it answer"] for address in addresses if address not in found}
    stuck |= {address: [task_name(key) for key in keys] for address, (_, keys) in found.items() if keys}
    processes = {process for process, _ in found.values()}
    return stuck, len(processes) < len(found)  # PyTorch has one default group a process
