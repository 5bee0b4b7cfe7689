"""Checks of notebook 04 · Parallel inference."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import numpy as np

from workshop_utils.exercises import Function, exercise, expect, expect_type, passed

TURN_S = 0.01
PATIENCE = 300  # turns of a thread that waits; by then the others have had theirs, however busy the machine is
A_FEW = 3  # turns after which reads that are too many have been started, too
N_PATHS = 40  # more than a pool of threads has where nobody says how many: at most 32
END = object()  # what `next` returns at the end of an iterator


def given_read_ahead(load: Callable[[Any], Any], batches: Sequence, depth: int) -> Iterator:
    """Yield load(batch) for each batch and load one ahead, whatever depth says: the stub of exercise 1."""
    with ThreadPoolExecutor(1) as pool:
        ahead = None
        for batch in batches:
            following = pool.submit(load, batch)
            if ahead:
                yield ahead.result()
            ahead = following
        if ahead:
            yield ahead.result()


@partial(exercise, given=given_read_ahead)
def check_read_ahead(read_ahead: Function) -> None:
    for n_batches, depth in ((6, 2), (8, 5), (2, 4), (0, 2)):
        storage = _Storage()
        try:
            _read_ahead(read_ahead, storage, n_batches, depth)
        finally:
            storage.allow(range(n_batches))  # or threads of the attendee's pool wait for ever
    passed("In order, and as many reads under way as asked for.")


def _read_ahead(read_ahead, storage, n_batches, depth):
    answer = storage.patiently(read_ahead, storage.load, list(range(n_batches)), depth)
    expect_type(answer, Iterator, "with `yield`, read_ahead would return a generator")
    for number in range(n_batches):
        storage.allow(range(number + 1))
        batch = storage.patiently(next, answer, END)
        expect(batch is not END, f"of {n_batches} batches it yields {number}: yield those that are left.")
        said = f"number {number} is {batch!r}"
        expect(batch == f"batch {number}", f"call `load` for each batch, and yield what it returns, in order: {said}.")
        expect(not storage.gave_up, "you wait for batches that the caller does not need yet: wait for the next alone.")
        last = min(number + 1 + depth, n_batches)
        due, ahead = last - number - 1, storage.n_started(last) - number - 1
        state = f"while you hold batch {number + 1} of {n_batches}, {{}} of the later ones have been started"
        enough = ahead >= due
        expect(enough, f"{state.format(ahead)}; {due} should be. Submit them before you yield, to `depth` threads.")
        storage.allow(range(last))
        _patiently(time.sleep, A_FEW)
        ahead = storage.started - number - 1
        expect(ahead <= due, f"{state.format(ahead)}, but depth is {depth}: they all take memory.")
    expect(storage.patiently(next, answer, END) is END, f"of {n_batches} batches it yields more than {n_batches}.")


def given_read_all(fetch: Callable[[str], bytes], paths: Sequence[str]) -> list[bytes]:
    """Return what `fetch` returns for each path, in the wrong order: the stub of exercise 2."""
    with ThreadPoolExecutor(len(paths)) as pool:
        reads = [pool.submit(fetch, path) for path in paths]
        return [read.result() for read in as_completed(reads)]


@partial(exercise, given=given_read_all)
def check_read_all(read_all: Function) -> None:
    paths = [f"{17 * number % N_PATHS}.jpg" for number in range(N_PATHS)]
    storage = _Storage()

    def fetch(path):
        storage.load(paths.index(path))
        return path.encode()

    threading.Thread(target=storage.answer_unevenly, args=[len(paths)], daemon=True).start()
    answer = read_all(fetch, list(paths))
    expect_type(answer, Sequence | Iterator | np.ndarray, "return a list, with the bytes of each path, in order")
    contents, right = list(answer), [path.encode() for path in paths]
    expect(len(contents) == len(paths), f"of {len(paths)} photos it returns {len(contents)}.")
    expect(set(map(str, contents)) == set(map(str, right)), "return what `fetch` returns for each path.")
    as_answered = set(right[1::2]) == set(contents[: len(right) // 2])
    order = "the bytes come in the order in which the storage answered" if as_answered else "wrong order"
    expect(contents == right, f"{order}: return them in the order of `paths`, as they were given.")
    expect(storage.started == len(paths), "it reads photos twice: call `fetch` once for each path.")
    some = f"right, but slow: of {len(paths)} photos it requests {storage.at_once} at a time. Request all, then wait."
    expect(storage.at_once == len(paths), some)
    passed("In the order of the paths, and at the same time.")


class _Storage:
    """Lets only those reads end that are allowed to, and counts those that were started."""

    def __init__(self):
        self.changed, self.started, self.at_once = threading.Condition(), 0, 0
        self.allowed = range(0)
        self.gave_up = False

    def load(self, number):
        with self.changed:
            self.started += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: number in self.allowed or self.gave_up)
        return f"batch {number}"

    def allow(self, numbers):
        """Let the reads of these numbers end, now or later."""
        with self.changed:
            self.allowed = numbers
            self.changed.notify_all()

    def answer_unevenly(self, n_reads):
        """Once all reads have been started, or no more are, let every second one end first. Sets `at_once`."""
        self.at_once = self.n_started(n_reads)
        self.allow(range(1, n_reads, 2))
        _patiently(time.sleep, A_FEW)
        self.allow(range(n_reads))

    def patiently(self, function, *args):
        """Return what a function returns; where it waits for a read that may not end yet, let all reads end."""
        returned = threading.Event()
        threading.Thread(target=self._give_up_before, args=[returned], daemon=True).start()
        try:
            return function(*args)
        finally:
            returned.set()

    def _give_up_before(self, returned):
        if not _patiently(returned.wait):
            with self.changed:
                self.gave_up = True
                self.changed.notify_all()

    def n_started(self, expected):
        """Wait patiently for the expected number of reads, and return how many have been started."""
        _patiently(partial(self._have_started, expected))
        return self.started

    def _have_started(self, expected, seconds):
        with self.changed:
            return self.changed.wait_for(lambda: self.started >= expected, seconds)


def _patiently(wait: Callable[[float], bool | None], n_turns: int | None = None) -> bool:
    """Return whether `wait(seconds)` becomes true within so many turns of this thread, by default PATIENCE.

    A limit in seconds runs on while a busy machine lets no thread of this process run, and refuses a right answer. So
    a thread is started in each turn, and has to run: those that were started before have then had their turns, too.
    """
    for _ in range(n_turns or PATIENCE):
        if wait(TURN_S):
            return True
        another = threading.Thread(target=int)
        another.start()
        another.join()
    return False
