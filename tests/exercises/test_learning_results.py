"""Notebook 07: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import pandas as pd
import pytest

from workshop_utils.exercises import (
    NotYet,
    learning_results,
)

LOG = pd.DataFrame(
    [
        (data, run_of, workers, 1, accuracy, seconds)
        for data, times in [("sketches", (40.0, 30.0, 25.0)), ("photos", (9.0, 8.0, 7.0))]
        for (run_of, workers), goal in zip([("one", 1), ("two", 2), ("four", 4)], times, strict=True)
        for accuracy, seconds in [(0.5, goal / 2), (0.95, goal), (0.99, goal + 10)]
    ],
    columns=["data", "run_of", "workers", "threads", "val_accuracy", "seconds"],
)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ("one", "took 40.0 s, and another run was quicker"),
        ("three", "no run on sketches"),
        (25.0, "the name of a run, such as 'four'"),
        (("sketches", "four"), "the name of a run"),
    ],
)
def test_no_wrong_quickest_run_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        learning_results.check_quickest(answer, LOG)


def test_the_quickest_run_passes():
    learning_results.check_quickest("four", LOG)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        (40.0, "should be a Series"),
        ([40, 60, 50], "should be a Series"),
        (pd.Series({"one": 40, "two": 60}), "the index should be the runs"),
        (pd.Series({"one": 40, "two": 30, "four": 25}), "these are seconds"),
        (pd.Series({"one": 40, "two": 60, "four": 100}), "more workers than the machine has cores"),
        (pd.Series({"one": 40, "two": 60, "four": 51}), "seconds times workers times threads"),
        (pd.Series({"one": "a", "two": "b", "four": "c"}), "cannot read this answer .*could not convert"),
    ],
)
def test_no_wrong_cost_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        learning_results.check_cost(answer, LOG, 2)


def test_the_cost_passes_in_any_order():
    learning_results.check_cost(pd.Series({"four": 50.0, "one": 40, "two": 60}), LOG, 2)


def test_on_one_core_the_cost_is_the_seconds():
    learning_results.check_cost(pd.Series({"four": 25.0, "one": 40, "two": 30}), LOG, 1)
