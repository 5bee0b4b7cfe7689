"""Notebook 07: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import numpy as np
import pytest
from answers import judged

from workshop_utils.exercises import learning_results


def means(values, size, seed=0):
    return np.random.default_rng(seed).choice(values, size).mean(axis=1)


def right_interval(values):
    return np.percentile(means(values, (2000, len(values))), [2.5, 97.5])


def without_replacement(values):
    drawn = [values.sample(frac=1).mean() for _ in range(200)]
    return np.percentile(drawn, [2.5, 97.5])


test_interval = pytest.mark.smoke(
    judged(
        learning_results.check_interval,
        (lambda values: list(right_interval(values)), "Correct"),
        (lambda values: np.percentile(means(values, (500, len(values)), seed=128), [2.5, 97.5]), "Correct"),
        (lambda values: None, "two numbers, .low, high., not None"),
        (lambda values: right_interval(values)[::-1], "high end comes first"),
        (without_replacement, "with replacement"),
        (lambda values: np.percentile(values, [2.5, 97.5]), "nor single values"),
        (lambda values: [means(values, (2000, len(values))).mean()] * 2, "average each by itself"),
        (lambda values: len(values) * right_interval(values), "not its sum"),
        (lambda values: np.sort(means(values, (2000, len(values))))[[0, -1]], "then the 2.5th and the 97.5th"),
        (lambda values: np.percentile(means(values, (2000, len(values))), [0.025, 0.975]), "counts to 100"),
        (lambda values: np.percentile(means(values, (2000, len(values))), [5, 95]), "too narrow"),
        (lambda values: np.percentile(means(values, (2000, 100)), [2.5, 97.5]), "as many values as"),
        (lambda values: np.percentile(means(values, (2000, len(values) - 1)), [2.5, 97.5]), "too wide"),
        (lambda values: values.mean() + np.array([-2.3, 2.3]) * values.sem(), "percentile method.*Student's t"),
        (lambda values: (-1.0, 1.0), "misses the mean"),
        (lambda values: right_interval(values) + 0.3 * values.std() / len(values) ** 0.5, "off to one side"),
    )
)
