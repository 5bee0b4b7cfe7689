"""Notebook 07: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import numpy as np
import pandas as pd
import pytest

from workshop_utils.exercises import NotYet, learning_results, ours

START = pd.DataFrame({"loss": [2.6, 2.9, 6.1, 9.0, 3.0], "lr": [0.0333, 0.0667, 0.1, 0.099, 0.05]}, index=range(1, 6))
ACTED = [0.0333, 0.0667, 0.1]  # before step 4

RUNS = pd.DataFrame({"run_of": ["one", "two", "four"], "workers": [1, 2, 4], "threads": 1})
REACHED = pd.DataFrame({0: [40.0, 30, 25], 1: [44.0, 31, 28], 2: [42.0, 60, 26]}, index=["one", "two", "four"])
COST = {"one": 42.0, "two": 62.0, "four": 52.0}  # on two cores


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        (0.1, "should be a list"),
        ("0.0333", "should be a list"),
        ({0.0333: 1}, "should be a list"),
        ([], "acted is empty"),
        ([0.0333, 0.0667, 0.1, 0.099], "forward pass"),
        (list(START.lr), "had not acted"),
        ([0.0333, 0.0667], "3 updates"),
        ([0.1, 0.0667, 0.0333], "in another order"),
        ([0.0667, 0.1, 0.099], "before step 4"),
        ([1, 2, 3], "before step 4"),
        (["a", "b"], "cannot read.*convert"),
    ],
)
def test_no_wrong_rates_pass(answer, hint):
    with pytest.raises(NotYet, match=hint):
        learning_results.check_acted(answer, START)


@pytest.mark.parametrize("kind", [list, tuple, np.array, pd.Series])
def test_the_rates_that_acted_pass_in_any_type(kind, capsys):
    learning_results.check_acted(kind(ACTED), START)
    assert capsys.readouterr().out.startswith("Correct. 3 updates, with rates up to 0.1000")


def test_rounded_rates_pass():
    learning_results.check_acted([0.03333, 0.06667, 0.1], START)


def test_the_solution_is_named_as_ours(capsys):
    learning_results.check_acted(ours(list(ACTED)), START)
    assert capsys.readouterr().out.startswith("That was our solution.")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        (40.0, "should be a Series"),
        ([42, 62, 52], "should be a Series"),
        (REACHED, "should be a Series"),
        (pd.Series({"one": 42, "two": 62}), "its index should be"),
        (pd.Series({"one": 42, "two": 31, "four": 26}), "these are seconds"),
        (pd.Series({"one": 42, "two": 62, "four": 104}), "cores"),
        (REACHED.mean(axis=1) * [1, 2, 2], "the mean of the rounds"),
        (REACHED.min(axis=1) * [1, 2, 2], "the min of the rounds"),
        (REACHED.sum(axis=1) * [1, 2, 2], "the sum of the rounds"),
        (pd.Series({"one": 42, "two": 62, "four": 53}), "median"),
        (pd.Series({"one": "a", "two": "b", "four": "c"}), "cannot read.*convert"),
    ],
)
def test_no_wrong_cost_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        learning_results.check_cost(answer, REACHED, RUNS, 2)


def test_the_cost_passes_in_any_order_and_the_message_says_what_it_shows(capsys):
    learning_results.check_cost(pd.Series(COST)[["four", "one", "two"]], REACHED, RUNS, 2)
    expected = "Correct. The cheapest was one, with 42 core-seconds. four finished first, and cost 52.\n"
    assert capsys.readouterr().out == expected


def test_on_one_core_the_cost_is_the_seconds(capsys):
    learning_results.check_cost(REACHED.median(axis=1), REACHED, RUNS, 1)
    assert "It also finished first." in capsys.readouterr().out
