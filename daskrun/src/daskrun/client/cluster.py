"""What a job asks of Dask: its client, its scheduler, its workers."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from signal import Signals
from typing import Any

from distributed import CancelledError, Client, Future

from daskrun import dashboard, scheduler
from daskrun.claims import Claimed, Denied, Request, Worker, busy_with
from daskrun.client.attempt import Attempt
from daskrun.client.limits import Limits
from daskrun.errors import JobError, SchedulerLost
from daskrun.protocol import TOPIC, Assignment, Function, JobState, Meeting, Place, Script
from daskrun.why.look import Look
from daskrun.why.looks import looks
from daskrun.worker.rank import at_work, deliver, end, kill, run_rank, send_signal, tell

ANSWER_S = 15  # time limit for a worker's answer
LOOK_S = 5  # time limit for an answer that takes no time on a worker that runs
BUSY_S = 60  # time limit for the scheduler's answer: it may be busy
FIRST = 100  # the ranks' priority: they come before what waits on a worker
LOST = (
    "The connection to the scheduler is lost, and with it the job: its process has ended, or the network to it. Start "
    "or join a cluster, and launch again."
)


class Cluster:
    """Dask, as one job sees it."""

    def __init__(self, client: Client, job: str) -> None:
        self.client_id, self._client, self._job = client.id, client, job
        self._heard: Callable[..., None] | None = None
        self._gpus_seen: dict[str, str] = {}  # CUDA_VISIBLE_DEVICES of the workers, by address

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The client's event loop, which ends with the client. No interrupt reaches it."""
        return self._client.loop.asyncio_loop  # type: ignore[union-attr]

    @property
    def is_lost(self) -> bool:
        """Whether the client tries to connect to its scheduler again: it does so for a while, at the same address."""
        return self._client.status == "connecting"

    def hear(self, heard: Callable[..., None]) -> None:
        """Call heard(kind, ...) with all that the job's ranks log, and that the scheduler says of its workers."""
        self._heard = heard
        # A client keeps its handler of a topic for good, and with it what that refers to: this object alone.
        self._client.subscribe_topic(TOPIC + self._job, lambda event: self._pass_on(*event[1]))

    def _pass_on(self, *message: Any) -> None:
        if self._heard is not None:
            self._heard(*message)

    def hear_no_more(self) -> None:
        """Drop what is heard of the job from now on."""
        self._heard = None
        with suppress(Exception):  # the client is closed
            self._client.unsubscribe_topic(TOPIC + self._job)

    async def claim(self, request: Request) -> Claimed | Denied:
        """Claim workers; where some are at work on what the scheduler does not know, others instead."""
        await self._ask_scheduler(dashboard.show)
        while True:
            answer = await self._ask_scheduler(scheduler.claim, request)
            if isinstance(answer, Denied):
                return answer
            try:
                stuck = await self._look_for_work(answer.workers)
            except JobError:
                await self.give_back()
                raise
            if not stuck:
                return answer
            await self.give_back()
            request = replace(request, stuck={**request.stuck, **stuck})

    async def give_back(self, state: JobState | None = None, error: str = "") -> None:
        """Give up what the job owns, where no attempt uses it. A scheduler that is lost knows of nothing.

        Args:
            state: To which the job has come, None if it goes on.
            error: With which it has ended.
        """
        with suppress(JobError):
            await self._ask_scheduler(scheduler.give_back, self._job, state, error)

    def submit(self, attempt: Attempt, limits: Limits) -> None:
        """Send each rank to its worker. Each begins, and waits for `introduce`.

        The futures are set at once: another thread takes their presence as a sign that all ranks are sent.
        """
        futures = []
        for rank, (member, place) in enumerate(zip(attempt.members, attempt.places, strict=True)):
            mine = Assignment(
                attempt.id,
                rank,
                attempt.size,
                limits.max_restarts,
                member.process,
                place,
                limits.start_method == "spawn",
                limits.debug_timeout,
                limits.debug == "error",
            )
            futures.append(
                self._client.submit(
                    run_rank,
                    mine,
                    key=(*attempt.id, rank),
                    workers=[member.address],
                    priority=FIRST,
                    pure=False,
                )
            )
        attempt.futures = futures

    async def introduce(self, attempt: Attempt, program: Function | Script, host: str, port: int) -> None:
        """Tell the ranks where they meet, at rank 0's worker, and what they run.

        Raises JobError. Where a worker dies meanwhile, or the scheduler, that is heard.
        """
        seen = [self._gpus_seen.get(member.address, "") for member in attempt.members]
        meeting = Meeting(host, port, program, visible_gpus(seen, attempt.places))
        addresses = [member.address for member in attempt.members]
        with suppress(OSError):
            await self._client.run(deliver, attempt.id, meeting, workers=addresses, on_error="return")

    async def result(self, future: Future) -> bytes | None:
        """Wait until a rank's task is over, and return its result; None where it failed, or died, or lost that.

        If its worker dies meanwhile, this may wait for ever.

        Raises:
            CancelledError: Of ``distributed``, if somebody canceled the task.
            SchedulerLost: A JobError.
            Exception: One of Dask's, or a mistake of ours.
        """
        # Not distributed.wait, which waits in the loop of the client that was made last.
        error = await future.exception()
        if not error and not future.cancelled():  # errors="raise" would leave an error that nobody retrieves
            for result in await self._client.gather([future], errors="skip"):
                return result
        if future.cancelled():
            raise SchedulerLost(LOST) if self.is_lost else tasks_lost(self._job)
        if error:
            raise error
        return None

    async def known(self, members: Sequence[Worker]) -> list[Worker | None]:
        """Return what the scheduler knows of these workers now; None for one that is gone."""
        found = await self._ask_scheduler(scheduler.known, [member.address for member in members])
        there = {worker.process: worker for worker in found}
        return [there.get(member.process) for member in members]

    async def worker_ends(self, members: Sequence[Worker]) -> list[tuple[str, int | None]]:
        """Return what `scheduler.worker_ends` does; raise SchedulerLost alone, as a diagnosis."""
        try:
            return await self._ask_scheduler(scheduler.worker_ends, members)
        except SchedulerLost:
            raise
        except Exception:
            return [("", None)] * len(members)

    async def signal(self, attempt: Attempt, number: int) -> bool:
        """Send a signal to the ranks' processes, as the job's user asked; return whether there was any."""
        with suppress(JobError):  # the scheduler is lost
            await self._ask_scheduler(scheduler.stops, self._job, Signals(number).name)
        there = [worker.address for rank, worker in enumerate(attempt.members) if rank not in attempt.gone]
        answers = await self.ask_workers(there, send_signal, attempt.id, number, answer_s=LOOK_S)
        return True in answers.values()

    async def tell(self, attempt: Attempt, ranks: Sequence[int], *message: Any) -> None:
        """Send a message to the processes of these ranks. Where one is gone, that is heard.

        Raises JobError if a worker doesn't take it.
        """
        there = [attempt.members[rank].address for rank in ranks if rank not in attempt.gone]
        answers = await self.ask_workers(there, tell, attempt.id, *message, answer_s=BUSY_S)
        if set(answers) != set(there):
            await asyncio.sleep(LOOK_S)  # a death is told meanwhile
            gone = {attempt.members[rank].address for rank in attempt.gone}
            if silent := set(there) - set(answers) - gone:
                raise JobError(f"These workers of ranks do not answer: {', '.join(sorted(silent))}.")

    async def kill(self, attempt: Attempt, rank: int) -> bool:
        """Kill the process of a rank; return whether it had one."""
        answers = await self.ask_workers([attempt.members[rank].address], kill, attempt.id, answer_s=BUSY_S)
        return True in answers.values()

    async def looks(self, attempt: Attempt) -> tuple[list[Look], list[int]]:
        """Return (how each rank at work looks, ranks that are over).

        This raises nothing, as a diagnosis must not end a job.
        """
        ended = [rank for rank, future in enumerate(attempt.futures) if future.done()]
        late = {rank: worker for rank, worker in enumerate(attempt.members) if rank not in ended}
        try:
            found, meanwhile = await self._ask_scheduler(looks, attempt.id, late, attempt.begun)
            return found, sorted([*ended, *meanwhile])
        except Exception as error:
            return [Look(rank, trouble=f"could not be looked at: {error!r}") for rank in late], ended

    async def free(self, attempt: Attempt, state: JobState, error: str, grace_s: float) -> None:
        """End what is left of an attempt, and give its workers up.

        Args:
            state: Of the job; with ENDING, it keeps its slots for another attempt.
            error: With which the attempt has ended.
            grace_s: Seconds that ranks have after SIGTERM.
        """
        if self._client.status in ("closing", "closed"):
            return  # the scheduler frees what belongs to a client that is gone
        there = [worker.address for rank, worker in enumerate(attempt.members) if rank not in attempt.gone]
        answers = await self.ask_workers(there, end, attempt.id, grace_s, answer_s=grace_s + LOOK_S)
        if attempt.futures:
            with suppress(OSError):
                await self._client.cancel(attempt.futures)
        with suppress(JobError):  # the scheduler is lost, and with it all that the job owned
            silent = [address for address in there if address not in answers]
            await self._ask_scheduler(scheduler.free, attempt.id, state, error, silent)

    async def _look_for_work(self, workers: Sequence[Worker]) -> dict[str, str]:
        """Return why workers cannot be had, though the scheduler takes them for idle; note what GPUs they see."""
        addresses = [worker.address for worker in workers]
        found = await self.ask_workers(addresses, at_work)
        for address, answer in found.items():
            if isinstance(answer, Exception):
                raise JobError(
                    f"Worker {address} cannot use daskrun of this version ({answer}): install the same one there, and "
                    "start the worker again."
                )
        self._gpus_seen = {address: gpus for address, (_, gpus) in found.items()}
        stuck = {address: "does not answer" for address in addresses if address not in found}
        return stuck | {
            address: busy_with(map(scheduler.task_name, keys)) for address, (keys, _) in found.items() if keys
        }

    async def _ask_scheduler(self, function: Callable, *args: Any) -> Any:
        """Return what a function returns in the scheduler's process. Raises SchedulerLost, JobError."""
        if self.is_lost or self._client.scheduler is None:  # it would wait for a scheduler to come back
            raise SchedulerLost(LOST)
        try:
            return await asyncio.wait_for(self._client.run_on_scheduler(function, *args), BUSY_S)
        except TimeoutError as error:
            raise SchedulerLost(f"The scheduler has not answered within {BUSY_S} s. {LOST}") from error
        except OSError as error:  # it was lost while it was asked
            raise SchedulerLost(LOST) from error
        except (ImportError, AttributeError) as error:  # pickle looks for the function there
            raise JobError(
                f"The scheduler's process cannot use daskrun of this version ({error}): install the same one there, "
                "and start the scheduler again."
            ) from error

    async def ask_workers(
        self, workers: Iterable[str], function: Callable, *args: Any, answer_s: float = ANSWER_S
    ) -> dict[str, Any]:
        """Return what function(*args) returns on each of these workers that answers in time, by address.

        A worker that cannot import the function answers with the ImportError.
        """

        async def ask(address: str) -> dict[str, Any]:
            with suppress(Exception):  # it is ending, or its host is cut off: the others' answers shall not wait
                try:
                    return await asyncio.wait_for(self._client.run(function, *args, workers=[address]), answer_s)
                except (ImportError, AttributeError) as error:
                    return {address: error}
            return {}

        answers = await asyncio.gather(*(ask(address) for address in workers))
        return {address: answer for one in answers for address, answer in one.items()}


def tasks_lost(job: str) -> CancelledError:
    """Return the error of a job whose tasks were cancelled, and not by the job."""
    return CancelledError(f"{job} lost its tasks to client.cancel(), client.restart() or client.close().")


def visible_gpus(seen: Sequence[str], where: Sequence[Place]) -> tuple[str | None, ...]:
    """Return CUDA_VISIBLE_DEVICES for each rank, so that its own GPU is cuda:LOCAL_RANK; None to leave it as it is.

    If each worker of a host sees another GPU first, its rank sees these, in the order of the ranks, and then what else
    its worker sees.

    Args:
        seen: CUDA_VISIBLE_DEVICES of each rank's worker.
        where: The ranks' places.

    Raises:
        JobError: If a rank would have no GPU of its own.

    >>> visible_gpus(["0,1", "1,0"], [Place(0, 2, 0, 1), Place(1, 2, 0, 1)])
    ('0,1', '0,1')
    """
    visible: list[str | None] = []
    for rank, place in enumerate(where):
        mine, begin = _gpus(seen[rank]), rank - place.local_rank
        own = [gpu for one in seen[begin : begin + place.local_world_size] for gpu in _gpus(one)[:1]]
        if not mine or len(set(own)) < place.local_world_size:
            if mine and len(mine) <= place.local_rank:
                raise JobError(
                    f"Rank {rank} has LOCAL_RANK {place.local_rank} on its host, and its worker sees only "
                    f"CUDA_VISIBLE_DEVICES={','.join(mine)}, so it would have no GPU of its own: set "
                    "virtual_local_rank=True."
                )
            visible.append(None)
        else:
            visible.append(",".join(dict.fromkeys([*own, *mine])))
    return tuple(visible)


def _gpus(visible: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names; CUDA sees none after -1."""
    gpus = [gpu.strip() for gpu in visible.split(",")]
    return list(takewhile(lambda gpu: gpu not in ("", "-1", "NoDevFiles"), gpus))
