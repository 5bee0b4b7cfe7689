"""Dask in virtual time: a fake client, scheduler and workers under the real `Cluster` and `scheduler`."""

import asyncio
import inspect
import pickle
import selectors
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from distributed import CancelledError
from waiting import owners

from daskrun.client.cluster import Cluster
from daskrun.client.control import Control
from daskrun.client.limits import Limits
from daskrun.errors import JobError
from daskrun.protocol import TOPIC, Ended, Event, Failure

ENDS_BY_S = 3600  # virtual seconds by which every job has ended


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is ready."""

    def __init__(self):
        self.now, jumps = 0.0, selectors.SelectSelector()
        jumps.select = self.jump
        super().__init__(jumps)

    def time(self):
        return self.now

    def jump(self, timeout):
        assert timeout is not None, "everybody waits, and nothing will ever happen"
        self.now += max(timeout, 0)
        return []


class Plan(NamedTuple):
    """What a rank does: it begins, and after some seconds it ends in this way."""

    how: str = "returns"
    takes_s: float = 3.0
    begins_s: float = 0.1


FOLLOWS = "loses a peer"  # the only error that may come of another rank's end
TOLD = {"raises": KeyError, FOLLOWS: RuntimeError, "tells and hangs": KeyError}
OF_WORKERS = {"end": "end_rank"}  # what is run on workers, where World has another of its name
DIES = {"is killed": -9, "is aborted": -6}


@dataclass(eq=False)
class Process:
    """A worker's process. rank: (attempt, rank) that is at work. left: attempts. mute_until: it answers then."""

    slot: str
    pid: int
    address: str
    is_alive: bool = True
    status: str = "running"
    rank: tuple | None = None
    left: set = field(default_factory=set)
    mute_until: float = -1.0


class Future:
    """What `client.submit` returns for a rank."""

    def __init__(self, key, home):
        self.key, self.home, self.status, self.error, self.outcome = key, home, "pending", None, None
        self.is_over = asyncio.Event()

    def end(self, status, error=None):
        if self.status == "pending" or status == "cancelled":
            self.status, self.error = status, error
            self.is_over.set()

    def done(self):
        return self.status != "pending"

    def cancelled(self):
        return self.status == "cancelled"

    async def exception(self):
        await self.is_over.wait()
        return self.error


class Client:
    """A client of its own for each job. plans: by (attempt, rank); what is not there returns."""

    def __init__(self, world, name, plans):
        self.id, self.world, self.plans = name, world, plans
        self.status, self.scheduler, self.loop = "running", world, SimpleNamespace(asyncio_loop=world.loop)
        self.futures, self.handlers = [], {}

    def subscribe_topic(self, topic, handler):
        self.handlers[topic] = handler

    def unsubscribe_topic(self, topic):
        del self.handlers[topic]

    def submit(self, run_rank, mine, *, key, workers, **_):
        future = Future(key, self.world.at_address(workers[0]))
        self.futures.append(future)
        if self.status == "connecting":
            future.end("cancelled")
        plan = self.plans.get((mine.attempt.number, mine.rank), Plan())
        self.world.loop.create_task(self.world.run_rank(future, mine, plan))
        return future

    async def cancel(self, futures):
        await self.world.way()
        for future in futures:
            future.end("cancelled")

    async def gather(self, futures, errors):
        await asyncio.sleep(self.world.sending_s)
        while any(future.status == "finished" and not future.home.is_alive for future in futures):
            await asyncio.sleep(1)  # Dask waits for a worker of that address, until somebody cancels
        return [future.outcome for future in futures if future.status == "finished"]

    async def who_has(self, futures):
        await self.world.way()
        return {future.key: [future.home.address] * future.home.is_alive for future in futures}

    async def run_on_scheduler(self, function, *args):
        await self.way()
        answer = function(*args, dask_scheduler=self.world)
        answer = await answer if inspect.isawaitable(answer) else answer
        await self.way()
        return answer

    async def run(self, function, *args, workers, on_error="raise"):
        await self.way()
        answers = {}
        for address in workers:
            process = self.world.at_address(address)
            while process and process.is_alive and self.world.is_mute(process, 0.2):  # tasks that were sent come first
                await asyncio.sleep(0.1)
            if process and process.is_alive:
                answers[address] = getattr(self.world, OF_WORKERS.get(function.__name__, function.__name__))(
                    process, *args
                )
            elif on_error == "raise":
                raise OSError(f"no connection to {address}")
        await self.way()
        return answers

    async def way(self):
        await self.world.way()
        if self.status == "connecting":
            raise OSError("lost")


class World:
    """A scheduler and workers; `wrongs` is what must never happen."""

    def __init__(self, slots="ab", delay_s=0.01, renewal_s=1.0, sending_s=0.05, is_address_kept=False):
        self.loop, self.slots, self.delay_s, self.renewal_s = VirtualLoop(), slots, delay_s, renewal_s
        self.sending_s, self.is_address_kept = sending_s, is_address_kept
        self.clients, self.plugins, self.processes, self.controls = {}, {}, {}, {}
        self.wrongs, self.n_processes, self.running, self.lost = [], 0, [], set()
        self._broker = SimpleNamespace(truncate=lambda topic: None, _topics={})

    def __enter__(self):
        self.patches = ExitStack()
        for name, fake in {
            "scheduler.time": SimpleNamespace(monotonic=self.loop.time),
            "scheduler.dumps": lambda function: function,
        }.items():
            self.patches.enter_context(mock.patch(f"daskrun.{name}", fake))
        for slot in self.slots:
            self.start(slot)
        return self

    def __exit__(self, *_):
        for task in (tasks := asyncio.all_tasks(self.loop)):
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()
        self.patches.close()

    def launch(self, plans=(), size=(None, None), limits=()):
        """Launch a job; return its Control. plans: by (attempt, rank)."""
        name = f"job{len(self.controls)}"
        self.clients[name] = client = Client(self, name, dict(plans))
        self.controls[name] = control = Control(
            Cluster(client, name), name, None, Limits(size if size[0] else None, **dict(limits))
        )
        self.running.append(self.loop.create_task(control.run()))
        return control

    def run(self, *events):
        """Let all this happen, and time pass until all jobs have ended and whatever they left behind.

        events: (when, the name of a method, its arguments).
        """

        async def until_all_are_over():
            for at, method, *about in sorted(events, key=lambda event: event[0]):
                await asyncio.sleep(at - self.loop.now)
                getattr(self, method)(*about)
            async with asyncio.timeout(ENDS_BY_S):
                for task in self.running:
                    await asyncio.shield(task)  # a job would take being cancelled for its end
            await asyncio.sleep(100)

        self.loop.run_until_complete(until_all_are_over())

    # --- what can happen, if that job or that worker is there

    def end(self, slot, is_host_lost=False):
        """End the worker's process; its nanny starts a successor, a host that is lost comes back after a minute."""
        if (process := self.processes.get(slot)) and process.is_alive:
            process.is_alive, process.rank = False, None
            self.lost |= {slot} if is_host_lost else set()
            self.loop.call_later(self.delay_s, self.remove, slot)
            self.loop.call_later(self.delay_s + (60 if is_host_lost else self.renewal_s), self.start, slot)

    def become(self, slot, status):
        if slot in self.processes:
            self.processes[slot].status = status

    def go_mute(self, slot):
        if slot in self.processes:
            self.processes[slot].mute_until = self.loop.now + 20

    def kill_rank(self, slot):
        """End the process of the rank on this worker."""
        if (process := self.processes.get(slot)) and process.is_alive and process.rank:
            self.loop.create_task(self.die(process, -9))

    def stop(self, job="job0"):
        if job in self.controls:
            self.controls[job].stop(CancelledError("stop"))

    def cancel_tasks(self, job="job0"):
        for future in self.clients[job].futures if job in self.clients else ():
            future.end("cancelled")

    def lose_client(self, job="job0"):
        if job in self.clients:
            self.cancel_tasks(job)
            self.clients.pop(job).status = "connecting"
            for plugin in self.plugins.values():
                plugin.remove_client(self, job)

    def log_row(self, job="job0"):
        self.log_event(TOPIC + job, ("row", {"attempt": 0, "rank": 0}))

    async def way(self):
        await asyncio.sleep(self.delay_s)

    # --- the scheduler, as daskrun.scheduler uses it

    @property
    def workers(self):
        return {process.address: self.state(process) for process in self.processes.values()}

    def state(self, process):
        return SimpleNamespace(
            address=process.address, server_id=f"id{process.pid}", pid=process.pid, nanny=process.slot, host="host",
            name=process.slot, extra={}, status=SimpleNamespace(name=process.status), memory_limit=2,
            memory=SimpleNamespace(process=1), processing=self.given(process),
        )  # fmt: skip

    def given(self, process):
        """Return the futures of ranks that are at work in a process, or will be."""
        return [future for future in self.futures if future.home is process and not future.done()]

    @property
    def futures(self):
        return [future for client in self.clients.values() for future in client.futures]

    def add_plugin(self, plugin):
        self.plugins[plugin.name] = plugin

    def log_event(self, topic, message):
        for plugin in self.plugins.values():
            plugin.log_event(topic, message)
        client = self.clients.get(topic.removeprefix(TOPIC))
        if client and topic in client.handlers:
            self.loop.call_later(self.delay_s, client.handlers[topic], (0.0, message))

    def get_events(self, topic):
        return ()

    def rpc(self, where):
        return SimpleNamespace(run=lambda function: self.ask_worker(where, function), identity=self.nanny_of(where))

    def nanny_of(self, slot):
        async def identity():
            await asyncio.sleep(self.delay_s)
            if slot in self.lost:
                raise OSError("no connection")

        return identity

    async def ask_worker(self, address, function):
        process = self.at_address(address)
        await asyncio.sleep(max(0, process.mute_until - self.loop.now))
        if not process.is_alive:
            raise OSError("no connection")
        if isinstance(function, partial) and function.func.__name__ == "end":
            return {"result": self.end_rank(process, *function.args)}
        raise AssertionError(function)

    def start(self, slot):
        self.lost.discard(slot)
        self.n_processes += 1
        where = slot if self.is_address_kept else f"{slot}{self.n_processes}"
        self.processes[slot] = Process(slot, self.n_processes, f"tcp://{where}")
        for plugin in self.plugins.values():
            plugin.add_worker(self, f"tcp://{where}")
        for future in self.futures if self.is_address_kept else ():
            if future.home and future.home.slot == slot:
                future.end("finished")  # it was started a second time

    def remove(self, slot):
        address = self.processes.pop(slot).address
        for plugin in self.plugins.values():
            plugin.remove_worker(self, address)

    def owned(self):
        return {slot: job for plugin in self.plugins.values() for slot, job in owners(plugin.claims).items()}

    # --- workers: what is run on them

    def at_address(self, address):
        return next((process for process in self.processes.values() if process.address == address), None)

    def at_work(self, process):
        return [("a rank", process.rank)] * bool(process.rank), ""

    def deliver(self, process, attempt, meeting):
        pass

    def end_rank(self, process, attempt, grace_s):
        process.left.add(attempt)
        if process.rank and process.rank[0] == attempt:
            process.rank = None
            for future in self.given(process):
                future.end("finished")
        return True

    async def run_rank(self, future, mine, plan):
        process, was_mute = future.home, False
        await asyncio.sleep(plan.begins_s)
        while process and process.is_alive and (process.rank or process.status != "running" or self.is_mute(process)):
            was_mute = self.is_mute(process)
            await asyncio.sleep(0.1)
        if not (process and process.is_alive) or (future.cancelled() and not was_mute):
            return
        if mine.process != f"id{process.pid}" or mine.attempt in process.left:
            future.end("finished")
            return
        if not future.cancelled() and self.owned().get(process.slot) != mine.attempt.job:
            self.wrongs.append(f"rank {mine.rank} of {mine.attempt} begins on {process}, which is not the job's")
        process.rank = mine.attempt, mine.rank
        await self.tell(process, mine, Event.BEGAN, process.address, *["host", 1] * (mine.rank == 0))
        await asyncio.sleep(300 if future.cancelled() else plan.takes_s)  # nobody tells it where to meet the others
        if process.rank != (mine.attempt, mine.rank):  # it was ended
            return
        if plan.how in DIES:
            await self.die(process, DIES[plan.how])
        elif plan.how in TOLD:
            error = pickle.dumps(TOLD[plan.how](mine.rank))
            await self.tell(process, mine, Event.FAILED, *Failure(error, "", plan.how == FOLLOWS, "", []))
            await asyncio.sleep(0.3)
        if "hangs" not in plan.how and process.is_alive and process.rank == (mine.attempt, mine.rank):
            process.rank = None
            await self.way()
            future.outcome = b"result" if plan.how == "returns" else None
            if plan.how == "breaks":
                future.end("error", JobError("a mistake of the launcher's"))
            future.end("finished")

    async def die(self, process, code):
        (attempt, rank), process.rank = process.rank, None
        mine = SimpleNamespace(attempt=attempt, rank=rank)
        await self.tell(process, mine, Event.DIED, "", *Ended(code))
        for future in self.given(process):
            future.end("finished")

    def is_mute(self, process, longer_s=0.0):
        return self.loop.now < process.mute_until + longer_s

    async def tell(self, process, mine, kind, *about):
        if process.is_alive:
            await asyncio.sleep(max(self.delay_s, process.mute_until - self.loop.now))
            self.log_event(TOPIC + mine.attempt.job, (str(kind), mine.attempt.number, mine.rank, *about))
