"""Checks of notebook 04 · Parallel inference."""

import threading
import time
from collections.abc import Iterator
from pathlib import PureWindowsPath

import pandas as pd

from workshop_utils.exercises import Answer, exercise, expect, passed
from workshop_utils.inference import COLUMNS

N_BATCHES, READ_S, PATIENCE_S = 6, 0.03, 1.0


@exercise
def check_read_ahead(function: Answer) -> None:
    for depth in (2, 3):
        storage = _Storage()
        answer = function(storage.load, list(range(N_BATCHES)), depth)
        expect(answer is not None, "read_ahead returns None; with `yield` it is a generator.")
        expect(isinstance(answer, Iterator), f"it returns a {type(answer).__name__}: yield the batches one by one.")
        loaded = []
        for batch in answer:
            loaded.append(batch)
            expect(len(loaded) <= N_BATCHES, f"of {N_BATCHES} batches it yields more than {N_BATCHES}.")
            due = min(depth, N_BATCHES - len(loaded))
            ahead = storage.n_started(len(loaded) + due) - len(loaded)
            state = f"while you hold batch {len(loaded)} of {N_BATCHES}, {ahead} of the later ones have been started"
            expect(ahead >= 0, "call `load` for each batch, and yield what it returns.")
            expect(ahead <= due, f"{state}, but depth is {depth}: they all take memory.")
            expect(ahead >= due, f"{state}; {due} should be under way. Submit them before you yield.")
        expect(len(loaded) == N_BATCHES, f"of {N_BATCHES} batches it yields {len(loaded)}: yield those that are left.")
        in_order = [f"batch {number}" for number in range(N_BATCHES)]
        expect(loaded == in_order, f"yield what `load` returns, in order: it yields {loaded[0]!r}, {loaded[1]!r}, …")
        parallel = storage.most_at_once >= depth
        expect(parallel, "the reads run one after the other: give the pool `depth` threads.")
    passed("In order, and as many reads under way as asked for.")


@exercise
def check_bad_files(answer: Answer, paths: list[str]) -> None:
    expect(answer is not None, "bad is still None.")
    expect(isinstance(answer, pd.DataFrame), "bad should be a DataFrame, some of the rows that classify returned.")
    expect(set(COLUMNS) <= set(answer), "bad should have all the columns of classify.")
    expect(len(answer) < len(paths), "these are all the rows; keep those where error is not missing.")
    expect(len(answer), "it has no rows: classify `mixed` first, and choose among the rows that this returns.")
    expect(answer.error.notna().all(), "use error.notna() to choose the rows.")
    names = {PureWindowsPath(path).name for path in answer.path}  # splits on both kinds of slash
    expect(names == {"empty.jpg", "letter.jpg"}, "there are other bad files.")
    passed(f"{len(answer)} bad files named, {len(paths) - len(answer)} classified all the same.")


@exercise
def check_confusion(answer: Answer, frame: pd.DataFrame) -> None:
    expect(answer is not None, "confusion is still None.")
    pair = isinstance(answer, tuple | list) and len(answer) == 2
    expect(pair, "confusion should be a tuple (breed, prediction).")
    answer = tuple(answer)
    counts = frame[frame.correct.eq(False).fillna(False)].value_counts(["breed", "prediction"])
    expect(answer[0] != answer[1], f"{answer!r} is a right answer: count the wrong rows, with ~seen.correct.")
    expect(
        answer in counts.index,
        f"{answer!r} is no mistake in `seen`: count its wrong rows by (breed, prediction), in this order.",
    )
    expect(counts[answer] == counts.max(), f"{answer!r} is there {counts[answer]} time(s); another is commoner.")
    passed(f"{answer[0]}, taken for {answer[1]}: {counts.max()} of them.")


class _Storage:
    """A slow `load` that counts how many reads were started, and how many ran at once."""

    def __init__(self):
        self.changed, self.started, self.running, self.most_at_once = threading.Condition(), 0, 0, 0

    def load(self, number):
        with self.changed:
            self.started += 1
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
            self.changed.notify_all()
        time.sleep(READ_S)
        with self.changed:
            self.running -= 1
        return f"batch {number}"

    def n_started(self, expected):
        """Wait a moment for the expected number of reads, and return how many have been started."""
        with self.changed:
            self.changed.wait_for(lambda: self.started >= expected, PATIENCE_S)
        time.sleep(READ_S)
        return self.started
