"""Notebook 04: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import pandas as pd
import pytest

from workshop_utils.exercises import (
    NotYet,
    parallel_inference,
)
from workshop_utils.inference import COLUMNS

SEEN = pd.DataFrame({"breed": ["pug", "pug", "boxer", "pug"], "prediction": ["boxer", "boxer", "pug", "pug"]}).assign(
    correct=pd.array([False, False, False, True], dtype="boolean")
)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ("pug", "should be a tuple"),
        (["pug"], "should be a tuple"),
        ([["pug"], "boxer"], "cannot read"),
        (("boxer", "pug"), "1 time.*commoner"),
        (("pug", "pug"), "wrong rows"),
        (("cat", "dog"), "no mistake in `seen`"),
    ],
)
def test_no_wrong_confusion_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        parallel_inference.check_confusion(answer, SEEN)


@pytest.mark.parametrize("answer", [("pug", "boxer"), ["pug", "boxer"], SEEN.iloc[0][["breed", "prediction"]].tolist()])
def test_the_commonest_confusion_passes(answer):
    parallel_inference.check_confusion(answer, SEEN)


CHECKED = pd.DataFrame(
    {"path": ["f/a.jpg", "f/empty.jpg", "f/letter.jpg"], "error": [None, "empty", "no image"]}, columns=COLUMNS
)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        (CHECKED, "all the rows"),
        (CHECKED[:1], "error.notna"),
        (CHECKED[:0], "`mixed` first"),
        (CHECKED[1:2], "other bad files"),
        (CHECKED[["path", "error"]][1:], "all the columns"),
        (CHECKED.error[1:], "should be a DataFrame"),
        (["f/empty.jpg"], "should be a DataFrame"),
    ],
)
def test_no_wrong_choice_of_bad_files_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        parallel_inference.check_bad_files(answer, list(CHECKED.path))


@pytest.mark.parametrize("folder", ["f/", "C:\\Users\\f\\", "s3://bucket/f/"])
def test_the_bad_files_pass_with_any_slash(folder):
    there = CHECKED.assign(path=CHECKED.path.str.replace("f/", folder, regex=False))
    parallel_inference.check_bad_files(there[1:].sample(frac=1), list(there.path))


def ahead(load, batches, depth, *, threads=None, submit=None, last=True):
    """Read ahead rightly, or with a fault: other threads, more or fewer submitted, the last ones forgotten."""
    futures = deque()
    with ThreadPoolExecutor(threads or depth) as pool:
        for batch in batches:
            futures.append(pool.submit(load, batch))
            if len(futures) > (depth if submit is None else submit):
                yield futures.popleft().result()
        while futures and last:
            yield futures.popleft().result()


def as_a_list(load, batches, depth):
    return [load(batch) for batch in batches]


def one_by_one(load, batches, depth):
    return map(load, batches)


def out_of_order(load, batches, depth):
    return ahead(load, batches[::-1], depth)


def for_ever(load, batches, depth):
    yield from ahead(load, batches, depth)
    while True:
        yield "batch 0"


def raises(load, batches, depth):
    yield load(batches[0])
    raise IndexError("pop from an empty deque")


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (None, "cannot read"),
        (lambda load, batches, depth: None, "returns None"),
        (as_a_list, "returns a list: yield"),
        (one_by_one, "0 of .*2 should"),
        (partial(ahead, submit=1), "1 of .*2 should"),
        (partial(ahead, submit=2), "2 of .*3 should"),
        (partial(ahead, submit=9), "depth is 2"),
        (partial(ahead, threads=1), "one after the other"),
        (partial(ahead, last=False), "yields 4"),
        (lambda load, batches, depth: ahead(str, batches, depth), "call `load`"),
        (out_of_order, "'batch 5', 'batch 4'"),
        (for_ever, "more than 6"),
        (raises, "before you yield"),
    ],
)
def test_no_wrong_way_of_reading_ahead_passes(function, hint, monkeypatch):
    monkeypatch.setattr(parallel_inference, "PATIENCE_S", 0.1)
    with pytest.raises(NotYet, match=hint):
        parallel_inference.check_read_ahead(function)


def submits_first(load, batches, depth):
    with ThreadPoolExecutor(depth) as pool:
        waiting = iter(batches)
        futures = deque(pool.submit(load, batch) for batch in islice(waiting, depth + 1))
        while futures:
            done = futures.popleft().result()
            yield done
            futures.extend(pool.submit(load, batch) for batch in islice(waiting, 1))


@pytest.mark.parametrize("function", [ahead, submits_first])
def test_reading_ahead_passes(function):
    parallel_inference.check_read_ahead(function)
