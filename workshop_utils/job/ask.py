"""Questions of the client to the scheduler and to workers, none of which waits without an end."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from distributed import Client

from workshop_utils.job.errors import SchedulerLost

ANSWER_S = 15  # time limit for a worker's answer
BUSY_S = 60  # time limit for the scheduler's answer: it may be busy
LOST = (
    "The connection to the scheduler is lost, and with it the job: its process has ended, or the network to it. Start "
    "or join a cluster, and launch again."
)


async def ask_scheduler(client: Client, function: Callable, *args: Any) -> Any:
    """Return what `function` of `on_scheduler` returns there. Raises SchedulerLost."""
    if client.status == "connecting":  # it would wait for a scheduler to come back
        raise SchedulerLost(LOST)
    try:
        return await asyncio.wait_for(client.run_on_scheduler(function, *args), BUSY_S)
    except (OSError, TimeoutError, AttributeError) as error:  # without a connection, client.scheduler is None
        raise SchedulerLost(f"The scheduler does not answer ({str(error) or type(error).__name__}).") from error


async def ask_workers(client: Client, workers: Sequence[str], function: Callable, *args: Any) -> dict[str, Any]:
    """Return what function(*args) returns on each of these workers that answers in time, by address."""

    async def ask(address: str) -> dict[str, Any]:
        with suppress(Exception):  # it is ending, or its host is cut off: the others' answers shall not wait
            return await asyncio.wait_for(client.run(function, *args, workers=[address]), ANSWER_S)
        return {}

    answers = await asyncio.gather(*(ask(address) for address in workers))
    return {address: answer for one in answers for address, answer in one.items()}
