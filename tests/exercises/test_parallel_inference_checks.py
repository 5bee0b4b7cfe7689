"""Notebook 04: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import islice

import pytest
from answers import judged

from workshop_utils.exercises import parallel_inference


@pytest.fixture
def little_patience(monkeypatch):
    """Let the check see soon that a wrong answer goes no further."""
    monkeypatch.setattr(parallel_inference, "PATIENCE", 50)


def repaired(fetch, paths):
    with ThreadPoolExecutor(len(paths)) as pool:
        reads = [pool.submit(fetch, path) for path in paths]
        return [read.result() for read in reads]


def by_map(fetch, paths):
    with ThreadPoolExecutor(len(paths)) as pool:
        return tuple(pool.map(fetch, paths))


def by_a_pool_of_the_usual_size(fetch, paths):
    with ThreadPoolExecutor() as pool:
        return list(pool.map(fetch, paths))


test_read_all = pytest.mark.smoke(
    judged(
        lambda function, little_patience: parallel_inference.check_read_all(function),
        (repaired, "Correct"),
        (by_map, "Correct"),
        (parallel_inference.given_read_all, "the storage answered"),
        (lambda fetch, paths: parallel_inference.given_read_all(fetch, paths)[::-1], "wrong order"),
        (lambda fetch, paths: [fetch(path) for path in paths], "of 40 photos it requests 1 at a time"),
        (by_a_pool_of_the_usual_size, r"of 40 photos it requests \d+ at a time"),
        (lambda fetch, paths: {path: fetch(path) for path in paths}, "a list, .*, not {"),
        (lambda fetch, paths: by_map(fetch, paths)[1:], "of 40 photos it returns 39"),
        (lambda fetch, paths: paths, "what `fetch` returns"),
        (lambda fetch, paths: (by_map(fetch, paths), by_map(fetch, paths))[1], "twice"),
    )
)


def ahead(load, batches, depth, *, submit=None, waits_for_all=False, last=True):
    """Read ahead rightly, or with a fault: more or fewer submitted, too many waited for, the last ones forgotten."""
    futures = deque()
    with ThreadPoolExecutor(depth) as pool:
        for batch in batches:
            futures.append(pool.submit(load, batch))
            if len(futures) > (depth if submit is None else submit):
                if waits_for_all:
                    wait(futures)
                yield futures.popleft().result()
        while futures and last:
            yield futures.popleft().result()


def for_ever(load, batches, depth):
    yield from ahead(load, batches, depth)
    while True:
        yield "batch 0"


def submits_first(load, batches, depth):
    with ThreadPoolExecutor(depth) as pool:
        waiting = iter(batches)
        futures = deque(pool.submit(load, batch) for batch in islice(waiting, depth + 1))
        while futures:
            done = futures.popleft().result()
            yield done
            futures.extend(pool.submit(load, batch) for batch in islice(waiting, 1))


def one_ahead(load, batches, depth):
    yield from ahead(load, batches, 1)


test_read_ahead = judged(
    lambda function, little_patience: parallel_inference.check_read_ahead(function),
    (ahead, "Correct"),
    (submits_first, "Correct"),
    (one_ahead, "1 of .*2 should"),
    (lambda load, batches, depth: [load(batch) for batch in batches], "a generator, not ..batch 0"),
    (partial(ahead, submit=2), "2 of .*5 should"),
    (partial(ahead, submit=3), "3 of the later ones.*depth is 2"),
    (partial(ahead, waits_for_all=True), "does not need yet"),
    (partial(ahead, last=False), "yields 4"),
    (lambda load, batches, depth: ahead(str, batches, depth), "call `load`"),
    (lambda load, batches, depth: ahead(load, batches[::-1], depth), "in order: number 0 is 'batch 5'"),
    (for_ever, "more than 6"),
)


def test_right_answers_pass_where_the_machine_lets_threads_begin_late(monkeypatch):
    begin = threading.Thread.run

    def begin_late(thread):
        time.sleep(0.1)  # twice as long as the turns below take of themselves
        begin(thread)

    monkeypatch.setattr(parallel_inference, "PATIENCE", 5)
    monkeypatch.setattr(threading.Thread, "run", begin_late)
    parallel_inference.check_read_ahead(ahead)
    parallel_inference.check_read_all(repaired)
