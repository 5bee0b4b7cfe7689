"""What a job has come to, for those who work on it and those who wait for it."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from daskrun.client.attempt import Attempt
from daskrun.client.cluster import Cluster
from daskrun.client.limits import Limits
from daskrun.worker.output import Lines


class State:
    """A job, as it stands. It changes on the client's event loop alone.

    Attributes:
        doing: A phrase for ``repr``.
        attempt: None until workers are claimed.
        size: Its world size, or the last one's.
        failures: That the job survived.
        rows: Metrics so far.
        output: What ranks have printed and nothing has shown, as (rank, attempt, lines).
        heard_at: When a rank last logged or printed something.
        warnings: For the job's caller.
        stopped: Why the job has to end, None while it may go on.
        stop_signal: With which its user stopped it, 0 for none.
        is_over: Whether ``results`` or ``error`` is there, and the workers are free.
    """

    def __init__(self, cluster: Cluster, job: str, limits: Limits) -> None:
        self.cluster, self.job, self.limits = cluster, job, limits
        self.loop = cluster.loop
        self.doing = "waiting for workers"
        self.attempt: Attempt | None = None
        self.size = 0
        self.failures: list[BaseException] = []
        self.rows: list[dict[str, Any]] = []
        self.output: deque[tuple[int, int, Lines]] = deque()
        self.heard_at = 0.0
        self.warnings: list[str] = []
        self.stopped: BaseException | None = None
        self.stop_signal = 0
        self.results: list[bytes] = []
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None  # of the error, as it came from its rank
        self.is_over = False
        self._news = asyncio.Event()

    @property
    def is_last(self) -> bool:
        """Whether no attempt may follow this one."""
        return bool(self.stop_signal)

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
