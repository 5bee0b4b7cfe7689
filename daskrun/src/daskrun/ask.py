"""Questions of the client to the scheduler and to workers, which have a time limit."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distributed import CancelledError, Client, Future

from daskrun.errors import JobError, SchedulerLost
from daskrun.explain import not_begun, silent
from daskrun.look import Look, look_here
from daskrun.on_scheduler import known, processes, watch_ends
from daskrun.owners import Worker
from daskrun.rank import Attempt

ANSWER_S = 15  # time limit for a worker's answer
LOOK_S = 5  # time limit for its answer to how its rank looks
BUSY_S = 60  # time limit for the scheduler's answer: it may be busy
LOST = (
    "The connection to the scheduler is lost, and with it the job: its process has ended, or the network to it. Start "
    "or join a cluster, and launch again."
)


async def results_of(client: Client, futures: list[Future]) -> list:
    """Return the results of futures that have finished. Raises JobError where one was lost with its worker."""
    results = await client.gather(futures, errors="skip")  # "raise" would leave an error that nobody retrieves
    if len(results) < len(futures):
        raise JobError("A rank's result was lost with its worker while it was fetched: launch the job again.")
    return results


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


async def ask_workers(
    client: Client, workers: Iterable[str], function: Callable, *args: Any, answer_s: float = ANSWER_S
) -> dict[str, Any]:
    """Return what function(*args) returns on each of these workers that answers in time, by address.

    A worker that cannot import the function answers with the ImportError.
    """

    async def ask(address: str) -> dict[str, Any]:
        with suppress(Exception):  # it is ending, or its host is cut off: the others' answers shall not wait
            try:
                return await asyncio.wait_for(client.run(function, *args, workers=[address]), answer_s)
            except (ImportError, AttributeError) as error:
                return {address: error}
        return {}

    answers = await asyncio.gather(*(ask(address) for address in workers))
    return {address: answer for one in answers for address, answer in one.items()}


def lost_tasks(job: str) -> CancelledError:
    """Return the error of a job whose tasks were cancelled, and not by the job."""
    return CancelledError(f"{job} lost its tasks to client.cancel(), client.restart() or client.close().")


async def let_ends_be_watched(client: Client, workers: Sequence[Worker]) -> None:
    """Let nannies remember how these workers end. If that fails, a death is told without its cause."""
    with suppress(Exception):
        await ask_scheduler(client, watch_ends, workers)


async def ask_looks(
    client: Client, attempt: Attempt, ranks: Mapping[int, Worker], begun: Collection[int]
) -> list[Look]:
    """Return how those of these ranks look that have not ended. A worker's nanny answers for it where it does not.

    begun: those of all ranks that have begun. It raises nothing, as a diagnosis must not end a job.
    """
    try:
        return await _looks(client, attempt, ranks, begun)
    except Exception as error:
        return [Look(rank, trouble=f"could not be looked at: {error!r}") for rank in ranks]


async def _looks(client: Client, attempt: Attempt, ranks: Mapping[int, Worker], begun: Collection[int]) -> list[Look]:
    addresses = [worker.address for worker in ranks.values()]
    found = await ask_workers(client, addresses, look_here, *attempt, answer_s=LOOK_S)
    looks = [found[address] for address in addresses if found.get(address)]
    if waiting := {w.address: rank for rank, w in ranks.items() if rank not in begun and not found.get(w.address)}:
        workers = await ask_scheduler(client, known, list(waiting))
        looks += [not_begun(waiting[worker.address], worker, attempt.job) for worker in workers]
    if mute := {rank: w for rank, w in ranks.items() if rank in begun and w.address not in found}:
        seen: list = [None] * len(mute)
        with suppress(TimeoutError, JobError):  # a busy scheduler must not keep an explanation
            seen = await asyncio.wait_for(ask_scheduler(client, processes, list(mute.values())), ANSWER_S)
        looks += [
            silent(rank, process, worker.has_nanny) for (rank, worker), process in zip(mute.items(), seen, strict=True)
        ]
    return sorted(looks)
