"""What nannies are asked about their worker's process: to kill it, to look at it, and how it ended.

A nanny may lack this package, so it gets functions that hold nothing of ours, pickled by value.
"""

from typing import Any, NamedTuple

from distributed.protocol.pickle import dumps


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


def killing(address: str | None) -> bytes:
    """Return the function that kills the worker of this address; with None it only shows that the nanny is there."""

    def kill(dask_worker: Any) -> None:
        import os
        import signal

        if address and dask_worker.pid and dask_worker.worker_address == address:
            os.kill(dask_worker.pid, signal.SIGKILL)

    return dumps(kill)


def looking(address: str) -> bytes:
    """Return the function that looks at the process of this worker for half a second; it returns Process's fields."""

    async def look(dask_worker: Any) -> tuple:
        import asyncio
        import contextlib
        import os
        import signal
        from pathlib import Path

        import psutil

        def is_handled(pid: int) -> bool:
            """Return whether the process handles SIGUSR1, which would end it otherwise."""
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("SigCgt:"):
                        return bool(int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
            return True  # no Linux: the file of stacks says so

        if not dask_worker.pid or dask_worker.worker_address != address:  # a successor is no rank
            return (None,)
        file = Path(f"{dask_worker.worker_dir}.stacks")
        try:
            process = psutil.Process(dask_worker.pid)
            status, before = process.status(), file.stat().st_size if file.exists() else None
            if before is not None and status != psutil.STATUS_STOPPED and is_handled(process.pid):
                os.kill(process.pid, signal.SIGUSR1)
            process.cpu_percent()
            await asyncio.sleep(0.5)
            written = "" if before is None else file.read_text()[before:][:100_000]
            return process.pid, status, process.cpu_percent() / 100, written
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

        process, address, pid = dask_worker.process, dask_worker.worker_address, dask_worker.pid
        file, dask_worker.last_end = Path(f"{dask_worker.worker_dir}.stacks"), None
        tell, before = getattr(process.on_exit, "told", process.on_exit), killed_by_the_kernel()

        def on_exit(code: int) -> None:
            limit = dask_worker.memory_manager.memory_limit
            written = ""
            with contextlib.suppress(OSError):
                written = file.read_text()[-100_000:]
                file.unlink()
            dask_worker.last_end = address, pid, code, killed_by_the_kernel() - before, limit, written
            tell(code)

        on_exit.told = tell  # type: ignore[attr-defined]
        process.on_exit = on_exit

    return dumps(watch)


def remembering(address: str) -> bytes:
    """Return the function that says how the worker of this address ended; it waits up to two seconds for the end.

    It returns the fields of End, None where nobody watched.
    """

    async def remember(dask_worker: Any) -> tuple | None:
        import asyncio

        for _ in range(20):
            end = getattr(dask_worker, "last_end", None)
            if end and end[0] == address:
                return end[1:]
            await asyncio.sleep(0.1)
        return None

    return dumps(remember)
