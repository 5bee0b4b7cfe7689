"""What a job asks of Dask: its client, its scheduler, its workers."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from signal import Signals
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from distributed import CancelledError, Client, Future

from daskrun import dashboard, scheduler
from daskrun.attempt import Attempt
from daskrun.claims import Claimed, Denied, Request, Worker, busy_with
from daskrun.errors import JobError, SchedulerLost, listed
from daskrun.rank import TOPIC, Assignment, Meeting, at_work, deliver, leave, listen, places, run_rank
from daskrun.script import signal_script
from daskrun.why.look import Look
from daskrun.why.looks import looks
from daskrun.why.process import Death, ends, watch_ends

ANSWER_S = 15  # time limit for a worker's answer
LOOK_S = 5  # time limit for its answer to how its rank looks
BUSY_S = 60  # time limit for the scheduler's answer: it may be busy
FIRST = 100  # the ranks' priority: they come before what waits on a worker
LOST = (
    "The connection to the scheduler is lost, and with it the job: its process has ended, or the network to it. Start "
    "or join a cluster, and launch again."
)

_shown_by: "WeakSet[Client]" = WeakSet()  # clients that have asked for the page of ranks
# For each client, what hears the messages of each of its jobs: a client keeps its handler of a topic for good.
_heard_by: "WeakKeyDictionary[Client, dict[str, Callable]]" = WeakKeyDictionary()


class Cluster:
    """Dask, as one job sees it."""

    def __init__(self, client: Client, job: str) -> None:
        self.client_id, self._client, self._job = client.id, client, job

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
        if self._client not in _heard_by:
            jobs = _heard_by[self._client] = {}
            topic = TOPIC + self.client_id
            self._client.subscribe_topic(topic, lambda event: _pass_on(jobs, *event[1]))
        _heard_by[self._client][self._job] = heard

    def hear_no_more(self) -> None:
        """Drop what is heard of the job from now on."""
        _heard_by.get(self._client, {}).pop(self._job, None)

    async def claim(self, request: Request) -> Claimed | Denied:
        """Claim workers; where some are at work on what the scheduler does not know, others instead."""
        if self._client not in _shown_by:
            await self._ask_scheduler(dashboard.show)
            _shown_by.add(self._client)
        while True:
            answer = await self._ask_scheduler(scheduler.claim, request)
            if isinstance(answer, Denied):
                return answer
            try:
                stuck, share_a_process = await self._look_for_work(answer.workers)
            except JobError:
                await self.give_back()
                raise
            if not stuck and not share_a_process:
                return answer
            await self.give_back()
            if not stuck:
                return Denied(
                    JobError(
                        f"{listed(worker.address for worker in answer.workers)} share a process, where each rank needs "
                        "one of its own: start the cluster with processes=True."
                    )
                )
            request = replace(request, stuck={**request.stuck, **stuck})

    async def give_back(self, error: str = "") -> None:
        """Give up what the job owns, where no attempt uses it. A scheduler that is lost knows of nothing.

        error: with which the job has ended.
        """
        with suppress(JobError):
            await self._ask_scheduler(scheduler.give_back, self._job, error)

    def submit(self, attempt: Attempt, bootstrap: Callable, max_restarts: int) -> None:
        """Send each rank to its worker. Each begins, and waits for `introduce`.

        The futures are set at once: another thread takes their presence as a sign that all ranks are sent.
        """
        futures, where = [], places([member.host for member in attempt.members])
        for rank, member in enumerate(attempt.members):
            mine = Assignment(attempt.id, self.client_id, rank, attempt.size, max_restarts, member.process, where[rank])
            futures.append(
                self._client.submit(
                    run_rank,
                    bootstrap,
                    mine,
                    key=(*attempt.id, rank),
                    workers=[member.address],
                    priority=FIRST,
                    pure=False,
                )
            )
        attempt.futures = futures

    async def introduce(self, attempt: Attempt, call: bytes) -> None:
        """Tell the ranks where they meet, at rank 0's worker, and what they run; have nannies remember their ends.

        Raises JobError. Where a worker dies meanwhile, or the scheduler, that is heard.
        """
        first = attempt.members[0].address
        with suppress(Exception):  # a death is then told without its cause
            await self._ask_scheduler(watch_ends, attempt.members)
        found = await self.ask_workers([first], listen, attempt.id)
        if first not in found:
            return
        host, port, error = found[first]
        if error:
            raise JobError(f"Worker {first} of rank 0 cannot listen for the other ranks: {error}.")
        meeting = Meeting(host, port, call)
        addresses = [member.address for member in attempt.members]
        with suppress(OSError):
            await self._client.run(deliver, attempt.id, meeting, workers=addresses, on_error="return")

    async def ended(self, future: Future) -> tuple[BaseException | None, Any]:
        """Wait until a rank's task is over; return (its error, its traceback), (None, None) if it returned.

        Raises CancelledError of `distributed` if somebody cancelled the task, and SchedulerLost.
        """
        # Not distributed.wait, which waits in the loop of the client that was made last.
        error = await future.exception()
        if future.cancelled():
            raise SchedulerLost(LOST) if self.is_lost else tasks_lost(self._job)
        return error, error and await future.traceback()

    async def results(self, attempt: Attempt) -> list[bytes]:
        """Return what the ranks returned, pickled. Raises JobError where one was lost with its worker."""
        # errors="raise" would leave an error that nobody retrieves.
        found = await self._client.gather(attempt.futures, errors="skip")
        if len(found) < attempt.size:
            if self.is_lost:
                raise SchedulerLost(LOST)
            if any(future.cancelled() for future in attempt.futures):
                raise tasks_lost(self._job)
            raise JobError("A rank's result was lost with its worker while it was fetched: launch the job again.")
        return found

    async def is_kept(self, future: Future) -> bool:
        """Whether the rank's result is still there: an adaptive cluster moves it before it retires a worker."""
        with suppress(OSError):  # the scheduler is lost
            return future.status == "finished" and any((await self._client.who_has([future])).values())
        return False

    async def known(self, members: Sequence[Worker]) -> list[Worker | None]:
        """Return what the scheduler knows of these workers now; None for one that is gone."""
        found = await self._ask_scheduler(scheduler.known, [member.address for member in members])
        there = {worker.process: worker for worker in found}
        return [there.get(member.process) for member in members]

    async def how_they_ended(self, members: Sequence[Worker]) -> list[Death]:
        """Return how each of these workers died; raise SchedulerLost alone, as a diagnosis."""
        try:
            return await self._ask_scheduler(ends, members)
        except SchedulerLost:
            raise
        except Exception:
            return [Death()] * len(members)  # as of a nanny that remembers nothing

    async def signal_scripts(self, attempt: Attempt, number: int) -> bool:
        """Send a signal to the scripts that the ranks run; return whether there was any."""
        there = [worker.address for rank, worker in enumerate(attempt.members) if rank not in attempt.gone]
        answers = await self.ask_workers(there, signal_script, number, answer_s=LOOK_S)
        return True in answers.values()

    async def stop_scripts(self, attempt: Attempt, number: int) -> bool:
        """Send the scripts a signal for the job's user; return whether there was any."""
        with suppress(JobError):  # the scheduler is lost
            await self._ask_scheduler(scheduler.stops, self._job, Signals(number).name)
        return await self.signal_scripts(attempt, number)

    async def looks(self, attempt: Attempt) -> tuple[list[Look], list[int]]:
        """Return (how each rank at work looks, ranks that are over).

        A worker's nanny answers for it where it does not. This raises nothing, as a diagnosis must not end a job.
        """
        ended = [rank for rank, future in enumerate(attempt.futures) if future.done()]
        late = {rank: worker for rank, worker in enumerate(attempt.members) if rank not in ended}
        try:
            found, meanwhile = await self._ask_scheduler(looks, attempt.id, late, attempt.begun)
            return found, sorted([*ended, *meanwhile])
        except Exception as error:
            return [Look(rank, trouble=f"could not be looked at: {error!r}") for rank in late], ended

    async def free(self, attempt: Attempt, kill: bool, again: bool, error: str) -> list[str]:
        """End what is left of an attempt, and give its workers up; return warnings.

        kill: each process in which a rank has begun is replaced. again: the job keeps its slots for another attempt.
        error: with which the attempt has ended.
        """
        if self._client.status in ("closing", "closed"):
            return []  # the scheduler frees what belongs to a client that is gone
        busy = {rank for rank, future in enumerate(attempt.futures) if not future.done()}
        # Not those with an error, which whoever holds them may ask for. Dask would run the others again elsewhere.
        if cancelled := [future for future in attempt.futures if future.status != "error"]:
            with suppress(OSError):
                await self._client.cancel(cancelled)  # their threads may still run
        there = {rank: worker for rank, worker in enumerate(attempt.members) if rank not in attempt.gone}
        begun = await self.ask_workers([w.address for w in there.values()], leave, attempt.id, answer_s=LOOK_S)
        killed = {
            rank: worker
            for rank, worker in there.items()
            if kill and (rank in attempt.begun or begun.get(worker.address) is True)
        }
        dead = [attempt.members[rank] for rank in attempt.gone - attempt.without_nanny]
        with suppress(JobError):  # the scheduler is lost, and with it all that the job owned
            await self._ask_scheduler(scheduler.free, self._job, list(killed.values()), dead, again, error)
        immortal = [worker.address for rank, worker in killed.items() if rank in busy and not worker.has_nanny]
        return [
            f"Worker {address} has no nanny to restart it, and stays busy until its rank returns: end that process, "
            "and start workers with nannies."
            for address in immortal
        ]

    async def _look_for_work(self, workers: Sequence[Worker]) -> tuple[dict[str, str], bool]:
        """Return (why workers cannot be had, though the scheduler takes them for idle; whether two are one process)."""
        addresses = [worker.address for worker in workers]
        found = await self.ask_workers(addresses, at_work)
        for address, answer in found.items():
            if isinstance(answer, Exception):
                raise JobError(
                    f"Worker {address} cannot use daskrun of this version ({answer}): install the same one there, and "
                    "start the worker again."
                )
        stuck = {address: "does not answer" for address in addresses if address not in found}
        stuck |= {address: busy_with(map(scheduler.task_name, keys)) for address, (_, keys) in found.items() if keys}
        ids = {process for process, _ in found.values()}
        return stuck, len(ids) < len(found)  # PyTorch has one default group a process

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


def workers_with_gpu(client: Client) -> set[str]:
    """Return the addresses of the workers whose PyTorch sees a GPU. Raises SchedulerLost, JobError."""
    return client.sync(Cluster(client, "")._ask_scheduler, scheduler.with_gpu)


def tasks_lost(job: str) -> CancelledError:
    """Return the error of a job whose tasks were cancelled, and not by the job."""
    return CancelledError(f"{job} lost its tasks to client.cancel(), client.restart() or client.close().")


def _pass_on(jobs: Mapping[str, Callable], kind: str, job: str, *about: Any) -> None:
    if heard := jobs.get(job):
        heard(kind, *about)
