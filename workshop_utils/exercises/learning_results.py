"""Checks of notebook 07 · Learning from results."""

import numpy as np
import pandas as pd

from workshop_utils.exercises import Function, exercise, expect, number, pair, passed

CLOSE = 0.15  # of the mean's standard error, averaged over the scenes; 500 resamples of each come within 0.14
ENDS = (
    "this exercise asks for the percentile method: the 2.5th and the 97.5th percentile of the means of a thousand "
    "resamples, each of as many values as `differences` has (which isn't always 16)."
)


@exercise
def check_interval(interval: Function) -> None:
    """interval: returns (low, high) of the mean of a Series of differences, by resampling them."""
    errors = []
    scenes = [np.random.default_rng(n).gamma(2.0, 3.0, 6 + n % 6) - 2 for n in range(12)]  # no two ends look alike
    # Of three 0 and three 5, no 5 comes in 1.6 % of the resamples of six, but in 3.1 % of those of five.
    scenes += [np.array([0.0, 0.0, 0.0, 5.0, 5.0, 5.0]), np.array([5.0, 0.0, 5.0, 0.0, 5.0, 0.0])]
    # One value that is far from all others: a mean and its standard deviation would reach below the lowest.
    scenes += [np.array([0.0] * 9 + [10.0]), np.array([0.0] * 7 + [8.0])]
    for scene in scenes:
        errors.append(_interval_error(interval, pd.Series(scene)))
    low, high = np.mean(errors, axis=0)  # in standard errors of the mean, from the ends expected
    expect(low - high < CLOSE, f"your interval is too narrow: {ENDS}")
    expect(
        high - low < CLOSE, f"your interval is too wide: {ENDS} (If yours is Student's t or BCa, it may cover better.)"
    )
    expect(max(abs(low), abs(high)) < CLOSE, f"both ends are off to one side: {ENDS}")
    passed("19 of 20 resampled means lie in your interval.")


def _interval_error(interval, values):
    hint = "interval should return two numbers, (low, high)"
    low, high = (number(end, hint) for end in pair(interval(values.copy()), hint))
    expect(not np.isnan([low, high]).any(), f"an end of your interval is no number: {low}, {high}.")
    expect(low <= high, "the high end comes first: return (low, high).")
    n = len(values)
    means = np.random.default_rng(99).choice(values, (20_000, n)).mean(axis=1)
    ends, error = np.percentile(means, [2.5, 97.5]), means.std()
    expect(
        high - low > 1e-9,
        "both ends are the same: draw with replacement, again for each resample, and average each by itself, with "
        "mean(axis=1).",
    )
    expect(
        ends[0] <= high and low <= ends[1],
        f"your interval misses the mean, {values.mean():.2f}: take the mean of each resample, not its sum; and "
        "np.percentile counts to 100, np.quantile to 1.",
    )
    single = float(np.subtract(*np.percentile(values, [97.5, 2.5])))
    expect(
        n < 8 or high - low < 0.8 * single,
        "far too wide: take the mean of each resample, neither its median nor single values, and then the 2.5th and "
        "the 97.5th percentile of the means.",
    )
    expect(
        high - low > 0.4 * (ends[1] - ends[0]),
        "far too narrow: take the mean of each of a thousand resamples, which have as many values as there are rounds.",
    )
    return (low - ends[0]) / error, (high - ends[1]) / error
