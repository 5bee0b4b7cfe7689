"""Free the workers of an attempt that is over: its ranks leave, or their processes are replaced."""

from collections.abc import Collection, Sequence
from contextlib import suppress

from distributed import Client, Future

from daskrun.ask import LOOK_S, ask_scheduler, ask_workers
from daskrun.decide import Decisions, Free
from daskrun.errors import listed
from daskrun.on_scheduler import replace
from daskrun.owners import Worker
from daskrun.rank import Attempt, leave


async def free(
    client: Client, attempt: Attempt, members: Sequence[Worker], futures: Sequence[Future], state: Decisions, how: Free
) -> list[str]:
    """Free the members, in rank order; return warnings. futures: of the ranks. state: it is asked alone."""
    at_work = [rank for rank, future in enumerate(futures) if not future.done()]
    # Not those with an error, which whoever holds them may ask for. Dask would run the others anew elsewhere.
    if cancelled := [future for future in futures if future.status != "error"]:
        await client.cancel(cancelled)  # their threads may still run
    # Nobody can kill those without a nanny.
    stay = {rank for rank in how.kill if members[rank].has_nanny} | state.gone
    others = [rank for rank in range(len(state.workers)) if rank not in stay]
    begun = await _leave(client, attempt, [members[rank].address for rank in others])
    kill = list(how.kill)
    if how.keep or state.error is not None:
        kill += [rank for rank in others if members[rank].address in begun]  # the message of it was on its way
    dead = [members[rank] for rank in state.gone - state.lost]
    await ask_scheduler(client, replace, attempt.job, [members[rank] for rank in kill], dead, how.keep)
    immortal = [members[rank].address for rank in kill if rank in at_work and not members[rank].has_nanny]
    return [
        f"Worker {listed(immortal)} has no nanny to restart it, and stays busy until its rank returns: end that "
        "process, and start workers with nannies."
    ] * bool(immortal)


async def free_all_the_same(client: Client, job: str, begun: Sequence[Worker], futures: Sequence[Future]) -> None:
    """Free the workers of a job that ended by a failure of the launcher, or because the scheduler was too slow.

    begun: those on which a rank has begun.
    """
    with suppress(Exception):  # the scheduler is lost, and with it all that the job owned
        await client.cancel(futures)
        await client.run_on_scheduler(replace, job, begun, [], False)


async def _leave(client: Client, attempt: Attempt, workers: Sequence[str]) -> Collection[str]:
    """Return those of these workers on which a rank of the attempt has begun. On the others, none ever will."""
    answers = await ask_workers(client, workers, leave, attempt, answer_s=LOOK_S)
    return [worker for worker, has_begun in answers.items() if has_begun is True]
