"""Notebook 07: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import json
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from answers import judged
from torch.profiler import ProfilerActivity, profile

from workshop_utils.exercises import learning_results


def means(values, size, seed=0):
    return np.random.default_rng(seed).choice(values, size).mean(axis=1)


def right_interval(values):
    return np.percentile(means(values, (2000, len(values))), [2.5, 97.5])


def in_a_loop(values):
    drawn = sorted(values.sample(frac=1, replace=True, random_state=seed).mean() for seed in range(1000))
    return [drawn[25], drawn[974]]


def without_replacement(values):
    drawn = [values.sample(frac=1).mean() for _ in range(200)]
    return np.percentile(drawn, [2.5, 97.5])


test_interval = pytest.mark.smoke(
    judged(
        learning_results.check_interval,
        (right_interval, "Correct"),
        (in_a_loop, "Correct"),
        (lambda values: None, "two numbers, .low, high., not None"),
        (lambda values: right_interval(values)[::-1], "high end comes first"),
        (without_replacement, "with replacement"),
        (lambda values: np.percentile(values, [2.5, 97.5]), "single differences"),
        (lambda values: np.percentile(means(values, (2000, len(values))), [5, 95]), "too narrow"),
        (lambda values: np.percentile(means(values, (2000, 100)), [2.5, 97.5]), "as many values as"),
        (lambda values: np.percentile(means(values, (2000, len(values) - 1)), [2.5, 97.5]), "too wide"),
        (lambda values: (-1.0, 1.0), "misses the mean"),
        (lambda values: right_interval(values) + 0.3 * values.std() / len(values) ** 0.5, "off to one side"),
    )
)


def recorded_events(steps, path):
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        steps()
    recorded.export_chrome_trace(path)
    return [event for event in json.loads(Path(path).read_text())["traceEvents"] if event["ph"] == "X"]


def right_totals(steps, path):
    ms = Counter()
    for event in recorded_events(steps, path):
        ms[event["name"]] += event["dur"] / 1000
    return ms


def as_a_series(steps, path, of_a_name="sum"):
    events = pd.DataFrame(recorded_events(steps, path))
    return events.groupby("name").dur.agg(of_a_name) / 1000


def never_exported(steps, path):
    steps()
    return {"load": 16.0, "step": 6.0}


def recorded_nothing(steps, path):
    steps()
    return Counter(event["name"] for event in recorded_events(lambda: None, path))


def exported_too_early(steps, path):
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        steps()
        recorded.export_chrome_trace(path)
    return {}


def only_annotations(steps, path):
    ms = Counter()
    for event in recorded_events(steps, path):
        if event["cat"] == "user_annotation":
            ms[event["name"]] += event["dur"] / 1000
    return ms


def contained_left_out(steps, path):
    ms, ends = Counter(), 0.0
    for event in sorted(recorded_events(steps, path), key=lambda event: event["ts"]):
        ms[event["name"]] += 0 if event["ts"] < ends else event["dur"] / 1000
        ends = max(ends, event["ts"] + event["dur"])
    return ms


test_traced = judged(
    learning_results.check_traced,
    (right_totals, "Correct"),
    (as_a_series, "Correct"),
    (exported_too_early, "after the `with` block has ended"),
    (only_annotations, "aten::.* is missing"),
    (contained_left_out, "add up dur"),
    (lambda steps, path: {}, "called 0 times"),
    (never_exported, "no file at path"),
    (recorded_nothing, "inside the with block"),
    (lambda *given: recorded_events(*given), "a dict, .*, not"),
    (lambda *given: {name: ms * 1000 for name, ms in right_totals(*given).items()}, "microseconds"),
    (lambda *given: {one["name"]: one["dur"] / 1000 for one in recorded_events(*given)}, "overwritten"),
    (partial(as_a_series, of_a_name="max"), "one event of each name"),
    (partial(as_a_series, of_a_name="mean"), "this is the mean"),
    (lambda *given: Counter(one["name"] for one in recorded_events(*given)), "counts"),
)


SHRINKS = "aten::_upsample_bicubic2d_aa"
TOTALS = [
    {"PyTorch Profiler (0)": 355.0, "aten::convolution": 50.0, "gloo:all_reduce": 300.0},
    {"PyTorch Profiler (0)": 351.0, "aten::convolution": 40.0, "gloo:all_reduce": 5.0, SHRINKS: 290.0},
]


test_late = judged(
    lambda answer: learning_results.check_late(answer, TOTALS),
    ((1, SHRINKS), "Correct"),
    ([np.int64(1), SHRINKS], "Correct"),
    (1, "two things"),
    ((SHRINKS, 1), "the event's name"),
    ((1, "gloo:all_reduce"), "whoever waits long waits for another"),
    ((0, SHRINKS), "rank 0 is not late"),
    ((2, SHRINKS), "no rank 2"),
    ((1, "resize"), "no rank has an event"),
    ((1, "aten::convolution"), "40 ms on rank 1 and 50 ms on another"),
)
