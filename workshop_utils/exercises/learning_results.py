"""Checks of notebook 07 · Learning from results."""

import pandas as pd

from workshop_utils.exercises import Answer, exercise, expect, passed


@exercise
def check_quickest(answer: Answer, rows: pd.DataFrame) -> None:
    expect(answer is not None, "quickest is still None.")
    reached = _seconds_to_90_percent(rows)
    expect(isinstance(answer, str), f"quickest should be the name of a run, such as {reached.index[0]!r}.")
    expect(answer in reached.index, f"{answer!r} is no run on sketches that reached 90 %: {list(reached.index)} did.")
    expect(answer == reached.idxmin(), f"{answer!r} took {reached[answer]:.1f} s, and another run was quicker.")
    passed(f"{answer} took {reached[answer]:.1f} s.")


@exercise
def check_cost(answer: Answer, rows: pd.DataFrame, n_cores: int) -> None:
    expect(answer is not None, "cost is still None.")
    expect(isinstance(answer, pd.Series), "cost should be a Series: one number per run.")
    reached = _seconds_to_90_percent(rows)
    expect(set(answer.index) == set(reached.index), f"the index should be the runs on sketches: {list(reached.index)}.")
    sketches = rows[rows.data == "sketches"].drop_duplicates("run_of").set_index("run_of")
    uncapped = (sketches.workers * sketches.threads)[reached.index]
    expected, answer = reached * uncapped.clip(upper=n_cores), answer[reached.index].astype(float)
    right = _all_close(answer, expected)
    expect(right or not _all_close(answer, reached), "these are seconds: multiply by the cores that were in use.")
    too_many = _all_close(answer, reached * uncapped) and not right
    expect(not too_many, f"some run has more workers than the machine has cores: cap it with clip(upper={n_cores}).")
    expect(right, "seconds times workers times threads, with at most all cores.")
    passed(f"The cheapest was {expected.idxmin()}, with {expected.min():.0f} core-seconds.")


def _seconds_to_90_percent(rows):
    there = rows[(rows.data == "sketches") & (rows.val_accuracy >= 0.9)]
    return there.groupby("run_of").seconds.min()


def _all_close(one, other):
    return ((one - other).abs() < 1e-3 * other.abs()).all()
