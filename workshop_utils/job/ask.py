"""Questions of the client to the scheduler and to workers, which have a time limit."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from distributed import Client

from workshop_utils.job.errors import JobError, SchedulerLost

ANSWER_S = 15  # time limit for a worker's answer
BUSY_S = 60  # time limit for the scheduler's answer: it may be busy
LOST = (
    "The connection to the scheduler is lost, and with it the job: its process has ended, or the network to it. Start "
    "or join a cluster, and launch again."
)


async def ask_scheduler(client: Client, function: Callable, *args: Any) -> Any:
    """Return what `function` of `on_scheduler` returns there. Raises SchedulerLost, JobError."""
    if client.status == "connecting" or client.scheduler is None:  # it would wait for a scheduler to come back
        raise SchedulerLost(LOST)
    try:
        return await asyncio.wait_for(client.run_on_scheduler(function, *args), BUSY_S)
    except TimeoutError as error:
        raise SchedulerLost(f"The scheduler has not answered within {BUSY_S} s. {LOST}") from error
    except OSError as error:  # it was lost while it was asked
        raise SchedulerLost(LOST) from error
    except (ImportError, AttributeError) as error:  # pickle looks for the function there
        raise JobError(
            f"The scheduler's process cannot use workshop_utils of this version ({error}): install the same one there, "
            "and start the scheduler again."
        ) from error


async def ask_workers(client: Client, workers: Sequence[str], function: Callable, *args: Any) -> dict[str, Any]:
    """Return what function(*args) returns on each of these workers that answers in time, by address.

    A worker that cannot import the function answers with the ImportError.
    """

    async def ask(address: str) -> dict[str, Any]:
        with suppress(Exception):  # it is ending, or its host is cut off: the others' answers shall not wait
            try:
                return await asyncio.wait_for(client.run(function, *args, workers=[address]), ANSWER_S)
            except (ImportError, AttributeError) as error:
                return {address: error}
        return {}

    answers = await asyncio.gather(*(ask(address) for address in workers))
    return {address: answer for one in answers for address, answer in one.items()}
