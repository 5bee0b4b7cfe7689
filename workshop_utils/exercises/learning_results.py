"""Checks of notebook 07 · Learning from results."""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import conv2d, interpolate
from torch.profiler import record_function

from workshop_utils.exercises import Answer, Function, exercise, expect, expect_equal, expect_type, number, pair, passed

THUMBNAIL, LARGE = 64, 1024  # pixels a side
CLOSE = 0.15  # of the mean's standard error, averaged over the scenes; 2,000 resamples of each come within 0.06
ENDS = "take the 2.5th and the 97.5th percentile of means of as many values as there are rounds."


@exercise
def check_interval(interval: Function) -> None:
    """interval: returns (low, high) of the mean of a Series of differences, by resampling them."""
    errors = []
    scenes = [np.random.default_rng(n).gamma(2.0, 3.0, n) - 2 for n in (8, 9, 10, 12)]  # no two ends look alike
    # Of three 0 and three 5, no 5 comes in 1.6 % of the resamples of six, but in 3.1 % of those of five.
    scenes += [np.array([0.0, 0.0, 0.0, 5.0, 5.0, 5.0]), np.array([5.0, 0.0, 5.0, 0.0, 5.0, 0.0])]
    for scene in scenes:
        errors.append(_interval_error(interval, pd.Series(scene)))
    low, high = np.mean(errors, axis=0)  # in standard errors of the mean, from the ends expected
    expect(low - high < CLOSE, f"your interval is too narrow: {ENDS}")
    expect(high - low < CLOSE, f"your interval is too wide: {ENDS}")
    expect(max(abs(low), abs(high)) < CLOSE, "both ends are off to one side: take the mean of each resample.")
    passed("19 of 20 resampled means lie in your interval.")


def _interval_error(interval, values):
    hint = "interval should return two numbers, (low, high)"
    low, high = (number(end, hint) for end in pair(interval(values.copy()), hint))
    expect(low <= high, "the high end comes first: return (low, high).")
    n = len(values)
    means = np.random.default_rng(99).choice(values, (20_000, n)).mean(axis=1)
    ends, error = np.percentile(means, [2.5, 97.5]), means.std()
    expect(high - low > 1e-9, "all your resamples are the same: draw with replacement, anew for each.")
    expect(not low <= high < ends[0] and not ends[1] < low, f"your interval misses the mean, {values.mean():.2f}.")
    single = float(np.subtract(*np.percentile(values, [97.5, 2.5])))
    expect(
        n < 8 or high - low < 0.8 * single,
        "this is where single differences lie: take the mean of each resample, then the percentiles of the means.",
    )
    expect(
        high - low > 0.4 * (ends[1] - ends[0]), "far too narrow: each resample has as many values as there are rounds."
    )
    return (low - ends[0]) / error, (high - ends[1]) / error


@exercise
def check_traced(traced: Function) -> None:
    """traced: runs what it is given under the profiler, exports the trace, returns ms by event's name."""
    calls = []

    def steps():
        calls.append(1)
        for name, seconds in (("load", 0.012), ("load", 0.004), ("step", 0.006)):
            with record_function(name):
                time.sleep(seconds)
        conv2d(torch.zeros(1, 3, 32, 32), torch.zeros(4, 3, 3, 3))  # its events contain each other

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        try:
            answer = traced(steps, path)
        except AttributeError as error:
            expect("'save'" not in str(error), "export after the `with` block has ended: only then is there a trace.")
            raise
        expect(len(calls) == 1, f"steps() was called {len(calls)} times: call it once, under the profiler.")
        expect(Path(path).exists(), "there is no file at path: export the trace there, export_chrome_trace(path).")
        events = [event for event in json.loads(Path(path).read_text())["traceEvents"] if event.get("ph") == "X"]
    ms = pd.DataFrame(events).groupby("name").dur.agg(["sum", "mean", "max", "count"]) / 1000
    expect({"load", "step"} <= set(ms.index), "the trace lacks what steps() did: call it inside the with block.")
    with suppress(AttributeError):
        answer = answer.to_dict()
    expect_type(answer, Mapping, "traced should return a dict, {name of an event: milliseconds}")
    lacks = max(set(ms.index) - set(answer), default=None)
    expect(lacks is None, f"{lacks} is missing: read the file, and take each event whose ph is 'X', of whatever kind.")
    mine = [float(answer.get(name, 0)) for name in ms.index]
    last = pd.Series({event["name"]: event["dur"] / 1000 for event in events})[ms.index]
    mistakes = {
        "these are microseconds, as the file has them: divide by 1000.": ms["sum"] * 1000,
        "this is one event of each name: add up all that have the same name.": ms["max"],
        "this is the mean: add up all events that have the same name.": ms["mean"],
        "these are counts: add up dur.": ms["count"] * 1000,
        "a later event has overwritten the earlier one of its name: add them up.": last,
    }
    otherwise = "add up dur of the events whose ph is 'X', by name, in milliseconds."
    expect_equal(mine, ms["sum"], otherwise, mistakes, within=0.001 * ms["sum"] + 0.002)
    passed("Your function exported a trace, and read it back.")


def batches(
    n: int, rank: int, world_size: int, batch_size: int = 4, *, shrunk: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield n batches of thumbnails, (batch_size, 3, 64, 64), and labels; something is the matter with one rank's.

    shrunk: all images are stored small, and nothing is the matter.
    """
    large = rank == _late_rank(world_size) and not shrunk
    stored, labels = _stored(rank, LARGE if large else THUMBNAIL, batch_size)
    for _ in range(n):
        images = stored
        if images.shape[-1] > THUMBNAIL:
            images = interpolate(images, (THUMBNAIL, THUMBNAIL), mode="bicubic", antialias=True)
        yield images, labels


@cache  # drawn once, before the profiler records
def _stored(rank, size, batch_size):
    drawn = torch.Generator().manual_seed(rank)
    return torch.rand(batch_size, 3, size, size, generator=drawn), torch.randint(12, (batch_size,), generator=drawn)


@exercise
def check_late(late: Answer, totals: Sequence[Mapping[str, float]]) -> None:
    """late: (rank, event's name). totals: each rank's ms by event's name."""
    rank, event = pair(late, 'late should be two things, (rank, "name of the event")')
    expect_type(event, str, "the second should be the event's name, as the trace has it")
    n = len(totals)
    expect(not isinstance(rank, bool) and rank in range(n), f"there is no rank {rank!r}: they are 0 to {n - 1}.")
    known = {name for one in totals for name in one}
    expect(event in known, f"no rank has an event named {event!r}: copy the name from the table.")
    expect(
        not any(word in event for word in ("all_reduce", "allreduce", "broadcast", "barrier")),
        "ranks meet there, so it is where they wait: whoever waits long waits for another. What kept that one?",
    )
    expect(
        rank == _late_rank(n),
        f"rank {rank} is not late: compare what each rank computes, and leave out gloo's events, which contain waits.",
    )
    elsewhere = [of_rank.get(event, 0) for of_rank in totals]
    here = elsewhere.pop(int(rank))
    expect(
        "upsample" in event,
        f"{event} took {here:.0f} ms on rank {rank} and {max(elsewhere, default=0):.0f} ms on another: find "
        "one that takes far longer on this rank than on any other.",
    )
    passed("One rank's images are far larger, and it shrinks them in each step while the others wait.")


def _late_rank(world_size):
    return 5 * world_size // 7
