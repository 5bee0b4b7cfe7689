"""What a job has come to, for those who work on it and those who wait for it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from daskrun.attempt import Attempt
from daskrun.cluster import Cluster
from daskrun.errors import WorkerDied
from daskrun.limits import Limits


class State:
    """A job, as it stands. It changes on the client's event loop alone.

    doing: a phrase for `repr`. attempt: None until workers are claimed. size: its world size, or the last one's.
    failures: the deaths that the job survived. rows: metrics so far; last_row_at: when the last one came. warnings: for
    whoever launched the job. stopped: why the job has to end, None while it may go on. is_last: no attempt may follow
    this one. is_over: `results` or `error` is there, and the workers are free.
    """

    def __init__(self, cluster: Cluster, job: str, limits: Limits) -> None:
        self.cluster, self.job, self.limits = cluster, job, limits
        self.loop = cluster.loop
        self.doing = "waiting for workers"
        self.attempt: Attempt | None = None
        self.size = 0
        self.failures: list[WorkerDied] = []
        self.rows: list[dict[str, Any]] = []
        self.last_row_at = 0.0
        self.warnings: list[str] = []
        self.stopped: BaseException | None = None
        self.is_last = False
        self.results: list[bytes] = []
        self.error: BaseException | None = None
        self.is_over = False
        self._news = asyncio.Event()

    def stop(self, error: BaseException) -> None:
        """End the job with this error, or now if its end is certain; to be called on the loop."""
        if self.stopped is None and not self.is_over:
            self.stopped = error
            self.tell_all()

    async def until(self, condition: Callable[[], object], seconds: float | None = None) -> None:
        """Wait until the condition holds, or for so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._news.wait()

    def tell_all(self) -> None:
        """Let all who wait look again whether their condition holds."""
        self._news.set()
        self._news = asyncio.Event()
