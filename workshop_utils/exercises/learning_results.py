"""Checks of notebook 07 · Learning from results."""

from collections.abc import Iterable

import pandas as pd

from workshop_utils.exercises import Answer, exercise, expect, passed, which_mistake


@exercise
def check_acted(answer: Answer, start: pd.DataFrame) -> None:
    """start: the columns `loss` and `lr` of one run, by step."""
    peak = int(start.loss.idxmax())
    expected = [float(rate) for rate in start.lr[start.index < peak]]
    expect(answer is not None, "acted is still None.")
    expect(isinstance(answer, Iterable) and not isinstance(answer, str | dict), "acted should be a list of rates.")
    rates = [float(rate) for rate in answer]
    expect(rates, f"acted is empty, but updates changed the weights before step {peak}: give their rates.")
    one_more = [*expected, float(start.lr[peak])]
    expect(
        not _equal(rates, one_more),
        f"the loss of step {peak} was computed in its forward pass, before the update of the same "
        "step: that rate came too late.",
    )
    expect(len(rates) <= len(expected), f"the loss was highest in step {peak}: what came after that had not acted.")
    expect(
        len(rates) == len(expected),
        f"acted has {len(rates)} rates: {len(expected)} updates came before the loss of step {peak}.",
    )
    if _equal(sorted(rates), sorted(expected)):
        expect(_equal(rates, expected), "these are the rates, but in another order: give them as they acted.")
    expect(_equal(rates, expected), f"give the rates of the updates before step {peak}: see the column lr of start.")
    passed(f"{len(rates)} updates, with rates up to {max(rates):.4f}, came before the loss of step {peak}.")


@exercise
def check_cost(answer: Answer, reached: pd.DataFrame, runs: pd.DataFrame, n_cores: int) -> None:
    """reached: seconds to the goal, run_of x round. runs: the columns run_of, workers and threads."""
    expect(answer is not None, "cost is still None.")
    expect(isinstance(answer, pd.Series), "cost should be a Series: one number for each run_of.")
    expect(set(answer.index) == set(reached.index), f"its index should be {list(reached.index)}.")
    kinds = runs.drop_duplicates("run_of").set_index("run_of").loc[reached.index]
    all_threads = kinds.workers * kinds.threads
    cores, seconds, answer = (
        all_threads.clip(upper=n_cores),
        reached.median(axis=1),
        answer[reached.index].astype(float),
    )
    mistakes = {
        "these are seconds: multiply by the cores that were in use.": seconds,
        f"some run has more workers than the machine has cores: cap it with clip(upper={n_cores}).": (
            seconds * all_threads
        ),
    }
    for name in ("mean", "min", "max", "sum"):
        mistakes[f"this is the {name} of the rounds: take their median."] = reached.agg(name, axis=1) * cores
    right = "the median over the rounds of the seconds, times workers times threads, with at most all cores."
    expect(_same(answer, seconds * cores), which_mistake(lambda wrong: _same(answer, wrong), mistakes, right))
    cheapest, first = answer.idxmin(), seconds.idxmin()
    also = "It also finished first." if cheapest == first else f"{first} finished first, and cost {answer[first]:.0f}."
    passed(f"The cheapest was {cheapest}, with {answer.min():.0f} core-seconds. {also}")


def _equal(ones, others):
    return len(ones) == len(others) and all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(ones, others, strict=True))


def _same(one, other):
    return ((one - other).abs() < 1e-3 * other.abs()).all()
