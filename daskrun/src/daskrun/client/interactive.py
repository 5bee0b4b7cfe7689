"""Ranks that stay, and run the cells of a notebook: `interactive`, and the magic ``%%ranks``."""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, count
from typing import Any
from weakref import ref

import cloudpickle
from distributed import CancelledError, Client

from daskrun.child.interactive import CellError, CellResult, run_cell, serve, set_variables, value_of
from daskrun.client.job import Job
from daskrun.client.limits import Limits, seconds
from daskrun.errors import CellFailed, Interrupted, JobError, add_note, ranks_do
from daskrun.pickling import pickled, unpacked
from daskrun.protocol import Function

INTERRUPT_S = 1.5  # that ranks have to end an interrupted cell; one that waits in a collective can't
LOOK_S = 3  # between two looks whether a rank has raised that others may wait for

SUCCEED_S = 10  # until the workers of the ranks before are idle

_latest: "ref[Ranks] | None" = None


def interactive(
    client: Client,
    *,
    n_workers: int | tuple[int, int] | None = None,
    backend: str | None = "auto",
    idle_timeout: float | str | None = "30 min",
    workers: str | Sequence[str | int] | None = None,
    wait_for_workers: float | str = 0,
    start_method: str | None = None,
    virtual_local_rank: bool = False,
    debug_timeout: float | str = 600,
) -> "Ranks":
    """Start ranks that stay, with a process group, and wait for cells: after ``%load_ext daskrun``, ``%%ranks``.

    They're a job like any other: they own their workers, are on ``/ranks``, and end with this process. Another call
    ends them, too, so a notebook's cell can run again.

    Args:
        client: A connected ``distributed.Client``.
        n_workers: As in `launch`.
        backend: As in `launch`.
        idle_timeout: After which time without a cell the ranks end; None for never.
        workers, wait_for_workers, start_method, virtual_local_rank, debug_timeout: As in `launch`.

    Raises:
        ValueError, JobError, WorkersBusy: As in `launch`.

    >>> from distributed import LocalCluster
    >>> with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
    ...     with interactive(cluster.get_client()) as ranks:
    ...         ranks.run("import torch.distributed as dist; square = dist.get_rank() ** 2")
    ...         ranks["square"]
    [0, 1]
    """
    global _latest
    earlier = _latest() if _latest else None
    if earlier is not None and earlier.job.done():
        earlier = None
    idle_s = None if idle_timeout is None else seconds("idle_timeout", idle_timeout)
    program = Function(pickled(serve, (idle_s,), {}), backend)
    limits = Limits(
        n_workers=n_workers,
        workers=workers,
        wait_for_workers=wait_for_workers or (SUCCEED_S if earlier is not None else 0),
        stall_after=None,
        start_method=start_method,
        virtual_local_rank=virtual_local_rank,
        debug_timeout=debug_timeout,
    )
    if earlier is not None:
        earlier.close()
    ranks = Ranks(lambda: Job(client, program, "interactive", limits))
    _latest = ref(ranks)
    return ranks


class Ranks:
    """Ranks that run cells, and keep their variables; see `interactive`. As a context manager, it ends them.

    Attributes:
        job: Their `Job`.
    """

    def __init__(self, start: Callable[[], Job]) -> None:
        self._start, self._numbers = start, count()
        self.job = start()

    def __len__(self) -> int:
        return len(self.job.workers)

    def __repr__(self) -> str:
        return f"<Ranks: {self.job!r}>"

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks."""
        self.job.cancel()

    def run(self, cell: str, ranks: Iterable[int] | None = None) -> None:
        """Run code on all ranks, or on some, and print what they print. ``%%ranks`` does the same.

        Raises:
            CellFailed: If the code raises an error on some of them, which its ``errors`` has by rank.
            WorkerDied: If a rank's process is gone.
        """
        __tracebackhide__ = True
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        results: dict[int, CellResult] = self._ask(partial(run_cell, cell, getattr(shell, "execution_count", 0)), ranks)
        for data, metadata in chain.from_iterable(result.displayed for result in results.values()):
            from IPython.display import publish_display_data

            publish_display_data(data, metadata)
        if errors := {rank: result.error for rank, result in results.items() if result.error}:
            raise CellFailed(errors)

    def __getitem__(self, name: str) -> list[Any]:
        """Return a variable's value on each rank, in rank order; tensors come on the CPU."""
        return list(self._ask(partial(value_of, name)).values())

    def push(self, **variables: Any) -> None:
        """Set variables on all ranks."""
        self._ask(partial(set_variables, variables))

    def _ask(self, call: Callable, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return what ranks answer. Raises CellFailed if some can't."""
        __tracebackhide__ = True  # IPython shows the caller
        asked, number = self._chosen(ranks), next(self._numbers)
        request = cloudpickle.dumps(call)
        try:
            self.job._tell_ranks(asked, "request", number, request)
            raised: list[int] = []
            while (answers := self.job._wait_for_replies(asked, number, LOOK_S)) is None and not self.job.done():
                before, raised = raised, self.job._raised(asked, number)
                if raised and not before:
                    who = ranks_do(raised, "has", "have").capitalize()
                    print(f"{who} raised an error. If other ranks wait for that, press stop.")
        except KeyboardInterrupt:
            self._interrupt(asked, number)
            raise Interrupted from None
        if answers is None:
            try:
                self.job.result()
            except JobError as error:
                if not getattr(error, "__notes__", None):  # of a cell before
                    add_note(error, "The ranks have ended, and their variables are lost: call interactive again.")
                raise
            except CancelledError:
                pass
            raise JobError(
                "The ranks have ended, because you closed them or no cell came for a long time: call interactive again."
            )
        values = {rank: unpacked(rank, answer) for rank, answer in answers.items()}
        if errors := {rank: value for rank, value in values.items() if isinstance(value, CellError)}:
            raise CellFailed(errors)
        return values

    def _chosen(self, ranks: Iterable[int] | None) -> Sequence[int]:
        chosen = range(len(self)) if ranks is None else sorted(set(ranks))
        if unknown := [rank for rank in chosen if rank not in range(len(self))]:
            raise ValueError(f"There are ranks 0 to {len(self) - 1}, and no rank {unknown[0]}.")
        return chosen

    def _interrupt(self, asked: Sequence[int], number: int) -> None:
        """Interrupt a cell, and say who waits for whom; start ranks again that don't come out of it."""
        answers = None
        try:
            print(self.job.explain())
            self.job._leave_debuggers()
            self.job._tell_ranks(asked, "interrupt")
            answers = self.job._wait_for_replies(asked, number, INTERRUPT_S)
            if answers is None and not self.job._waits_in_collectives():
                print("Some ranks are still ending the cell. To start all ranks again, without variables, press stop.")
                answers = self.job._wait_for_replies(asked, number)
        except KeyboardInterrupt:  # again
            pass
        if answers is not None:
            print(
                "Each rank was interrupted where it was, and keeps its variables. Those that were changing, as a "
                "model's weights, may differ between ranks now."
            )
            return
        self.job.cancel()
        self.job = self._start()
        print("All ranks were started again, without variables: not all could be interrupted.")


def load_ipython_extension(shell: Any) -> None:
    """Add ``%%ranks`` to IPython."""

    def run_on_ranks(line: str, cell: str) -> None:
        """Run a cell on all ranks of the latest `interactive`, or on those that the line names: ``%%ranks 0 2``."""
        ranks = _latest() if _latest else None
        if ranks is None:
            raise JobError("There are no ranks yet: ranks = daskrun.interactive(client).")
        try:
            chosen = [int(rank) for rank in line.replace(",", " ").split()] or None
        except ValueError:
            raise ValueError(f"%%ranks {line}: write numbers of ranks, as in %%ranks 0 2.") from None
        first = "" if cell.startswith("%%") else f"# %%ranks {line}\n"  # lines count as in the notebook
        ranks.run(first + cell, chosen)

    shell.register_magic_function(run_on_ranks, "cell", "ranks")
