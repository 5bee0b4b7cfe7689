"""A case of the gym: its job, the looks at it, a diagnosis, a rerun with a cure."""

import datetime
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import pandas as pd
from distributed import Client

import daskrun
from daskrun import Job
from workshop_utils.cluster import known_workers
from workshop_utils.dogs.sketches import DRAWING_VERSION, write_sketches
from workshop_utils.exercises import Answer, expect
from workshop_utils.exercises.gym.faults import (
    CURES,
    FULL,
    HEALTHY,
    MIDDLE_STEPS,
    PER_EPOCH,
    RESUMED_AT,
    Diagnosis,
    checked,
    draw,
    points,
    possible_with,
    solution,
)
from workshop_utils.exercises.gym.pieces import PIECES, Piece
from workshop_utils.exercises.gym.run import BATCH_SIZE, Plan, copy, train_sketches
from workshop_utils.exercises.gym.workers import log_lines, worker_rows
from workshop_utils.photos import HELD_OUT
from workshop_utils.shared import copy_for_workers, new_shared_folder
from workshop_utils.storage import cache_folder

N_RANKS = 2
N_EACH = PER_EPOCH * BATCH_SIZE // len(HELD_OUT)  # sketches of each breed
BEGIN_S = 60  # time limit for both ranks to log a step: they may have to import PyTorch first
QUIET_S = 30  # a rerun hangs if no rank logs a step for so long; a step takes milliseconds on free cores
CLOSE = 2e-5  # relative difference of losses from those of the clean run; the weakest fault makes 1.6e-4
SLOWEST = 2.5  # times the steps before any fault, that the faster ones of the later may take
WELL = "The job has ended well"
HIDDEN = ["attempt", "worker"]


@dataclass(frozen=True)
class Clean:
    """The run without a fault, of which all cases begin at step 9.

    folder: where its checkpoint is, and those of the cases. memory_limit: of the workers, in bytes, None where one has
    no limit.
    """

    folder: str
    photos: str
    memory_limit: int | None
    metrics: pd.DataFrame

    def plan(self, truth: Diagnosis, **mended: Piece) -> Plan:
        """Return the plan of a run that goes on from a copy of the checkpoint. mended: as in `Plan`."""
        checkpoint = f"{self.folder}/{uuid.uuid4().hex}.pt"
        copy(f"{self.folder}/start.pt", checkpoint)
        return Plan(self.photos, checkpoint, truth, self.memory_limit, mended=mended)


_clean: dict[str, Clean] = {}  # by client
_current: list["Case"] = []  # the case that runs


def start(client: Client, seed: int) -> "Case":
    """Start a training job that may have a fault, on two of the client's workers, and return its `Case`.

    It returns when both ranks have logged a step, as they do in every case, or after a minute.
    The same seed starts the same case on every cluster whose workers have a memory limit of 4 GiB or less, such as
    `start_cluster(2, memory_limit="1.25 GiB")`; elsewhere no case leaks memory. The job trains a small model on
    sketches of 32 pixels, from step 9 to step 36, in a few seconds. The first call makes the clean run, which takes
    longer. Starting a case ends the one before.
    Raises NotYet for a seed that is no whole number; what `daskrun.launch` raises.
    """
    whole = isinstance(seed, Integral) and not isinstance(seed, bool) and seed >= 0  # NumPy's are, too
    expect(whole, f"seed is {seed!r}: give a whole number from 0 on, such as the one that the room was told.")
    _stop_all()
    if client.id not in _clean:
        _clean[client.id] = make_clean(client)
    clean = _clean[client.id]
    case = Case(client, int(seed), clean, draw(int(seed), possible_with(clean.memory_limit)))
    _current.append(case)
    _wait_until_it_runs(case._job)
    return case


def today() -> int:
    """Return the seed of the case of the day: the date in UTC, such as 20261130."""
    return int(datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))


def _stop_all() -> None:
    while _current:
        _current.pop().stop()


class Case:
    """A job with a hidden fault, or none: looks at it, a diagnosis, and a rerun with a cure.

    As a context manager it frees the workers at the end.
    """

    def __init__(self, client: Client, seed: int, clean: Clean, truth: Diagnosis) -> None:
        self.seed = seed
        self._client, self._clean, self._truth = client, clean, truth
        self._looks: Counter[str] = Counter()
        self._first: dict[str, int] | None = None  # points of each part of the first answer
        self._began = time.time()
        self._job = self._launch(truth)

    def __enter__(self) -> "Case":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Case of seed {self.seed}, {'ended' if self._job.done() else 'running'}, {self._looks.total()} looks>"

    @property
    def clean(self) -> pd.DataFrame:
        """What `metrics()` shows of the clean run, from step 9 on. This is no look."""
        return self._clean.metrics.copy()

    # --- looks, which are counted

    def explain(self) -> str:
        """Return what `Job.explain()` says: who waits in which collective, and who does not run."""
        self._looks["explain"] += 1
        return self._job.explain()

    def stacks(self) -> str:
        """Return what `Job.stacks()` says: the Python stack of each rank that is at work."""
        self._looks["stacks"] += 1
        return self._job.stacks()

    def metrics(self) -> pd.DataFrame:
        """Return what the ranks logged so far, one row per step and rank.

        step from 1, epoch from 0, loss of this rank's images before the step; compute_s, comm_s and load_s in seconds;
        gradient: the length of this rank's gradient before the ranks take the mean, NaN if none was sent; weights and
        pixels: eight hex digits of the weights after the step, and of the images; momentum: the length of the
        optimizer's moments; images: how many; memory_mb (MiB) of the rank's process; torch_threads: how many PyTorch
        computes with; time: Unix seconds.
        """
        self._looks["metrics"] += 1
        rows = _tidy(self._job)
        return self.clean.iloc[:0] if rows.empty else rows

    def workers(self) -> pd.DataFrame:
        """Return one row per rank, in their order: its process on its worker, as the operating system sees it.

        worker, pid, state ("stopped", "sleeping"), cpu_percent of a core over half a second, memory_mb, limit_mb (MiB;
        of the worker with its rank), n_threads, torch_threads (the last that it logged), children (DataLoader workers).
        A process that has ended has NaN for what only a running one has.
        """
        self._looks["workers"] += 1
        return worker_rows(self._client, self._job)

    def logs(self) -> str:
        """Return what Dask's workers and nannies have logged since the case began."""
        self._looks["logs"] += 1
        return log_lines(self._client, since=self._began)

    def result(self, wait_s: float = 20) -> str:
        """Return what the job returned, or the error that ended it, as text; wait so many seconds for its end."""
        self._looks["result"] += 1
        return _outcome(self._job, wait_s)

    # --- what follows from them

    def diagnose(self, fault: Answer, rank: Answer = None, step: Answer = None, cure: Answer = None) -> int:
        """Print and return the points for an answer: 10 are all, a false alarm or an overlooked fault costs 4.

        fault: one of `FAULTS`. rank: None for a fault on all ranks. step: the first that it spoils. cure: of `CURES`.
        What was wrong is printed, too, so the first answer is the one that counts.
        Raises NotYet, which costs nothing, for answers that cannot be.
        """
        got = self.points_for(checked(fault, rank, step, cure, N_RANKS))
        assert self._first is not None
        total, first = sum(got.values()), sum(self._first.values())
        print(f"{total} of {FULL} points: " + ", ".join(f"{part} {n}" for part, n in got.items()) + ".")
        looks = ", ".join(f"{name} {n}" for name, n in self._looks.items()) or "none"
        print(f"{solution(self._truth)}\nYour looks: {looks}.")
        if total != first:
            print(f"Your first answer counts: {first} of {FULL}.")
        return first

    def share(self) -> None:
        """Print the first answer's points as a line of squares, for friends; it doesn't give the answer away.

        Green is right, white is not: the detection, the rank, the step, the kind of fault, the cure.
        """
        expect(self._first is not None, "there's nothing to share yet: answer with case.diagnose(fault=…) first.")
        assert self._first is not None
        squares = "".join("🟩" if got > 0 else "⬜" for got in self._first.values())
        looks = self._looks.total()
        print(f"PyTorch detective, case {self.seed}: {squares} {looks} look{'s' * (looks != 1)}")

    def rerun(self, cure: Answer = None, **mended: Any) -> bool:
        """Run the case again, print whether the run is as good as the clean one, and return that.

        After a diagnosis it also prints where the losses of this run leave those of the one before.

        cure: one of `CURES`: the right one takes the fault out, and any other leaves it in. mended: instead, your own
        version of a piece of the training, in the place of the one that may be broken. With keep=function,
        function(original, *args) is called where the training calls `RunCheckpoint.keep`, the original: see
        `gym.run.ORIGINALS`. A run hangs when no rank logs a step for half a minute; how long it takes is no matter.
        Raises NotYet for an unknown cure or piece, or more than one piece. A rerun counts as a look.
        """
        for piece in mended:
            expect(piece in PIECES, f"{piece} is no piece of the training: write one of {', '.join(PIECES)}.")
        expect(len(mended) <= 1, "mend one piece: a rerun should show which one was broken.")
        expect(cure is None or cure in CURES, f"cure is {cure!r}: write one of {', '.join(map(repr, CURES))}.")
        _stop_all()
        before = _tidy(self._job)
        self.stop()
        self._looks["rerun"] += 1
        truth = Diagnosis() if cure == self._truth.cure else self._truth
        with self._launch(truth, **mended) as job:
            said = _end_or_hang(job)
        now = _tidy(job)
        held = _invariants(now, self._clean, said)
        if said.startswith(WELL):
            held["a step's time"] = _as_fast_as_before(now)
        for invariant, (holds, figures) in held.items():
            print(f"{'holds ' if holds else 'FAILED'}  {invariant}: {figures}")
        if self._first is not None:  # before a diagnosis, both would help with the answer
            print("Nothing was wrong before, either." if self._truth.fault == HEALTHY else _side_by_side(before, now))
        return all(holds for holds, _ in held.values())

    def stop(self) -> None:
        """End the job, and free its workers."""
        self._job.cancel()

    def points_for(self, answer: Diagnosis) -> dict[str, int]:
        """Return the points of an answer; those of the first one are kept."""
        got = points(self._truth, answer)
        if self._first is None:
            self._first = got
        return got

    def _launch(self, truth: Diagnosis, **mended: Piece) -> Job:
        return launch(self._client, self._clean.plan(truth, **mended))


def launch(client: Client, plan: Plan) -> Job:
    """Launch a run of the plan on two of the client's workers."""
    # Without stall_after, whose warning would explain a hang to an attendee who hasn't asked.
    return daskrun.launch(
        client, train_sketches, plan, n_workers=N_RANKS, backend="gloo", wait_for_workers=60, stall_after=None
    )


def make_clean(client: Client) -> Clean:
    """Make the run without a fault, with a checkpoint of step 8, on two of the client's workers."""
    folder = cache_folder() / f"sketches-v{DRAWING_VERSION}-32px-{N_EACH}"
    write_sketches(folder, N_EACH, HELD_OUT, size=32)
    place, photos = new_shared_folder(), copy_for_workers(folder)
    plan = Plan(photos, f"{place}/clean.pt", start=f"{place}/start.pt")
    with launch(client, plan) as job:
        job.result()
    metrics = _tidy(job)
    metrics = metrics[metrics["step"] > RESUMED_AT].reset_index(drop=True)
    limits = [worker["memory_limit"] for worker in known_workers(client).values()]
    return Clean(place, photos, max(limits) if all(limits) else None, metrics)


def _wait_until_it_runs(job):
    give_up = time.monotonic() + BEGIN_S
    while not job.done() and time.monotonic() < give_up:
        rows = job.metrics()
        if not rows.empty and rows["rank"].nunique() == N_RANKS:
            return
        time.sleep(0.05)


def _tidy(job):
    rows = job.metrics()
    if rows.empty:
        return rows
    return rows.drop(columns=HIDDEN).sort_values(["step", "rank"], ignore_index=True)


def _side_by_side(before, now):
    """Return a table of the losses of two runs around the first step where they differ, which it marks with <."""
    runs = {"before": before, "now": now}
    if before.empty or now.empty:
        return "One of the two runs has logged nothing."
    tables = {
        run: rows.pivot_table("loss", "step", "rank", dropna=False).reindex(columns=range(N_RANKS))
        for run, rows in runs.items()
    }
    losses = pd.concat(tables, axis=1).sort_index()
    apart = ~((losses["before"] - losses["now"]).abs() <= CLOSE * losses["now"])  # True where a run has none
    if not apart.any(axis=None):
        return "The losses are those of the run before."
    first = apart.any(axis=1).idxmax()
    shown = losses.loc[first - 2 : first + 1].map(lambda loss: "none" if pd.isna(loss) else f"{loss:.5f}")
    for rank in apart.columns[apart.loc[first]]:
        shown.loc[first, ("before", rank)] += " <"
    table = f"losses before and now; < marks where step {first} differs:\n{shown.to_string()}"
    ended = first > before["step"].max()
    return f"{table}\nUp to there they are the same: the run before hung, died, or was ended." if ended else table


def _as_fast_as_before(metrics):
    """Compare a run with itself, as other programs may have kept the machine busy during another run.

    The fastest quarter of the later steps counts: a fault makes all of them slow, and another program only some.
    """
    seconds = metrics.assign(s=metrics[["load_s", "compute_s", "comm_s"]].sum(axis=1)).groupby("step")["s"].max()
    before = seconds[seconds.index < MIDDLE_STEPS.start].median()
    after = seconds[seconds.index >= MIDDLE_STEPS.stop].quantile(0.25)
    return bool(after <= SLOWEST * before), f"{before:.3f} s at first, {after:.3f} s later; {SLOWEST} times is allowed"


def _outcome(job, wait_s):
    give_up = time.monotonic() + wait_s
    while not job.done():
        if time.monotonic() > give_up:
            return f"The job has not ended within {wait_s} s; it has logged {len(job.metrics())} rows."
        time.sleep(0.05)
    try:
        return f"{WELL}: " + "; ".join(f"rank {n}: {got}" for n, got in enumerate(job.result()))
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {error}\n{notes}".strip()


def _end_or_hang(job):
    """Return the outcome, or what the ranks wait for once none of them has logged a step for `QUIET_S` seconds."""
    _wait_until_it_runs(job)  # ranks may take seconds to import PyTorch, which count for no step
    n_rows, logged_at = len(job.metrics()), time.monotonic()
    while not job.done():
        if len(job.metrics()) > n_rows:
            n_rows, logged_at = len(job.metrics()), time.monotonic()
        if time.monotonic() - logged_at > QUIET_S:
            return f"No rank has logged a step for {QUIET_S} s. {job.explain()}"
        time.sleep(0.05)
    return _outcome(job, 0)


def _invariants(metrics, clean, said):
    """Return {what a good run has: (whether this one has it, the figures)}."""
    ended = said.startswith(WELL)
    held = {"it ends": (ended, f"{WELL}." if ended else said.split("\n")[0][:200])}
    if metrics.empty:
        return held
    whole = metrics.groupby("step").filter(lambda rows: len(rows) == N_RANKS)
    apart = whole.groupby("step")["weights"].nunique()
    apart = apart[apart > 1]
    held["equal weights on all ranks"] = (
        apart.empty,
        f"in {whole['step'].nunique()} steps" if apart.empty else f"they differ from step {apart.index[0]} on",
    )
    both = metrics.merge(clean.metrics, on=["step", "rank"], suffixes=("", "_clean"))
    far = ((both["loss"] - both["loss_clean"]).abs() / both["loss_clean"]).fillna(float("inf"))
    held["the clean run's losses"] = (
        bool((far <= CLOSE).all()) and len(both) == len(clean.metrics),
        f"{len(both)} of {len(clean.metrics)}, largest relative difference {far.max():.2g} ({CLOSE:.5f} is allowed)",
    )
    return held
