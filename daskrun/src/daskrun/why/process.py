"""What nannies are asked about their worker's process: to kill it, to look at it, and how it ended.

A nanny may lack this package, so it gets functions that hold nothing of ours, pickled by value.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.protocol import deserialize
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialize, Serialized

from daskrun.claims import Worker

ANSWER_S = 5  # time limit for a nanny's answer


class Process(NamedTuple):
    """A worker's process, as its nanny sees it.

    pid: None where it has ended. status: of psutil. cpu: its share of a core. written: what faulthandler wrote.
    """

    pid: int | None
    status: str = ""
    cpu: float = 0.0
    written: str = ""


class End(NamedTuple):
    """How a worker's process ended.

    pid: what it was. code: its exit code, or minus the signal. by_the_kernel: how many processes the kernel killed
    meanwhile for want of memory. limit: Dask's memory limit, in bytes. written: what faulthandler wrote.
    """

    pid: int
    code: int
    by_the_kernel: int
    limit: int | None
    written: str


class Death(NamedTuple):
    """What is known of a worker's death.

    end: what its nanny remembers. nanny_lives: whether that answered. rss: bytes that the process had when Dask ended
    it for its memory limit; None where Dask did not. reason: for which the worker was closed in order, else "".
    """

    end: End | None = None
    nanny_lives: bool = True
    rss: int | None = None
    reason: str = ""


def killing(pid: int) -> bytes:
    """Return the function that kills the worker's process of this pid, and its script, and not its successor."""

    def kill(dask_worker: Any) -> None:
        import contextlib
        import os
        import signal

        import psutil

        if dask_worker.pid == pid:
            children = [child.pid for child in psutil.Process(pid).children()]
            os.kill(pid, signal.SIGKILL)
            for child in children:
                with contextlib.suppress(OSError):  # it has ended by itself
                    if os.getpgid(child) == child:  # a script, which leads a group of what it has started
                        os.killpg(child, signal.SIGKILL)

    return dumps(kill)


def looking(pid: int) -> bytes:
    """Return the function that looks at the worker's process for half a second; it returns Process's fields."""

    async def look(dask_worker: Any) -> tuple:
        import asyncio
        import contextlib
        import os
        import signal
        from pathlib import Path

        import psutil

        def is_handled() -> bool:
            """Return whether the process handles SIGUSR1, which would end it otherwise."""
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("SigCgt:"):
                        return bool(int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
            return True  # no Linux: the file of stacks says so

        if dask_worker.pid != pid:  # a successor is no rank
            return (None,)
        file = Path(f"{dask_worker.worker_dir}.stacks")
        try:
            process = psutil.Process(pid)
            status, before = process.status(), file.stat().st_size if file.exists() else None
            if before is not None and status != psutil.STATUS_STOPPED and is_handled():
                os.kill(pid, signal.SIGUSR1)
            process.cpu_percent()
            await asyncio.sleep(0.5)
            written = "" if before is None else file.read_text()[before:][:100_000]
            return pid, status, process.cpu_percent() / 100, written
        except (psutil.NoSuchProcess, OSError):  # it has just ended
            return (None,)

    return dumps(look)


def watching() -> bytes:
    """Return the function that lets a nanny remember how its worker's process ends, which it forgets otherwise."""

    def watch(dask_worker: Any) -> None:
        import contextlib
        from pathlib import Path

        def killed_by_the_kernel() -> int:
            """Return how many processes of our cgroup the kernel has killed for want of memory."""
            with contextlib.suppress(OSError):  # not Linux
                for group in Path("/proc/self/cgroup").read_text().splitlines():
                    path = group.split(":", 2)[2]
                    for file in (f"{path}/memory.events", f"/memory{path}/memory.oom_control"):  # of version 2, 1
                        with contextlib.suppress(OSError):
                            counts = dict(
                                line.split() for line in Path(f"/sys/fs/cgroup{file}").read_text().splitlines()
                            )
                            return int(counts["oom_kill"])
            return 0

        process, pid = dask_worker.process, dask_worker.pid
        file, dask_worker.last_end = Path(f"{dask_worker.worker_dir}.stacks"), None
        tell, before = getattr(process.on_exit, "told", process.on_exit), killed_by_the_kernel()

        def on_exit(code: int) -> None:
            limit = dask_worker.memory_manager.memory_limit
            written = ""
            with contextlib.suppress(OSError):
                written = file.read_text()[-100_000:]
                file.unlink()
            dask_worker.last_end = pid, code, killed_by_the_kernel() - before, limit, written
            tell(code)

        on_exit.told = tell  # type: ignore[attr-defined]
        process.on_exit = on_exit

    return dumps(watch)


def remembering(pid: int) -> bytes:
    """Return the function that says how the worker's process of this pid ended; it waits up to two seconds for the end.

    It returns the fields of End, None where nobody watched.
    """

    async def remember(dask_worker: Any) -> tuple | None:
        import asyncio

        for _ in range(20):
            end = getattr(dask_worker, "last_end", None)
            if end and end[0] == pid:
                return end
            await asyncio.sleep(0.1)
        return None

    return dumps(remember)


async def watch_ends(workers: Sequence[Worker], dask_scheduler: Any = None) -> None:
    """Let nannies remember how their workers end."""
    await _ask_nannies(dask_scheduler, [(worker, watching()) for worker in workers])


async def processes(workers: Sequence[Worker], dask_scheduler: Any = None) -> list[Process | None]:
    """Return how the nannies of these workers see their processes; None for one that does not answer."""
    answers = await _ask_nannies(dask_scheduler, [(worker, looking(worker.pid)) for worker in workers])
    return [Process(*found) if there and found else None for there, found in answers]


async def ends(workers: Sequence[Worker], dask_scheduler: Any = None) -> list[Death]:
    """Return how each of these workers died."""
    answers = await _ask_nannies(dask_scheduler, [(worker, remembering(worker.pid)) for worker in workers])
    events = [event for _, event in dask_scheduler.get_events("worker-restart-memory")]
    by_dask = {(event["worker"], event["pid"]): event["rss"] for event in events}
    return [
        Death(
            End(*known) if known else None,
            there,
            by_dask.get((worker.address, worker.pid)),
            _why_closed(dask_scheduler, worker.address),
        )
        for worker, (there, known) in zip(workers, answers, strict=True)
    ]


def _why_closed(scheduler: Scheduler, address: str) -> str:
    """Return the reason for which the last worker of this address was closed, "" if it was not."""
    for _, event in reversed(scheduler.get_events(address)):
        action = event.get("action") if isinstance(event, dict) else None
        if action in ("closing-worker", "add-worker"):
            return event.get("reason", "")
    return ""


async def ask_nanny(scheduler: Scheduler, worker: Worker, function: bytes) -> tuple[bool, Any]:
    """Return (whether the worker's nanny is there, what the function returned on it), whenever it answers.

    Only the scheduler reaches the nanny of a dead worker.
    """
    return await ask(scheduler, worker.slot, function) if worker.has_nanny else (False, None)


async def ask(scheduler: Scheduler, address: str, function: bytes) -> tuple[bool, Any]:
    """Return (whether the nanny or worker at this address answers, what the function returned there)."""
    try:
        answer = await scheduler.rpc(address).run(function=function)
    except Exception:  # each way of being away has its own
        return False, None
    result = answer.get("result")  # none where the function failed
    if isinstance(result, Serialized):  # a scheduler passes on unread what it is sent
        result = deserialize(result.header, result.frames)
    if isinstance(result, Serialize):  # from a worker in the scheduler's process
        result = result.data
    return True, result


async def _ask_nannies(scheduler: Scheduler, orders: Sequence[tuple[Worker, bytes]]) -> list[tuple[bool, Any]]:
    """Return what `ask_nanny` returns for each order; a nanny that does not answer in time is not there."""

    async def ask(worker: Worker, function: bytes) -> tuple[bool, Any]:
        try:
            return await asyncio.wait_for(ask_nanny(scheduler, worker, function), ANSWER_S)
        except TimeoutError:
            return False, None

    return await asyncio.gather(*(ask(*order) for order in orders))
