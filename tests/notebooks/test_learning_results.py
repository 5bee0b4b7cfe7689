"""Notebook 07 promises: two logs disagree about two rates, and agree where both have the same schedule."""

import json

import pandas as pd
from lessons import ROOT

RESULTS = ROOT / "benchmarks/results"


def of_rates(runs):
    """Return, for each round, by how much the smaller rate's accuracy is higher."""
    accuracy = pd.DataFrame(runs).pivot(index="round", columns="lr", values="accuracy")
    return accuracy[0.003] - accuracy[0.01]


def test_two_rates_change_places_with_their_schedule_in_both_logs():
    heads = json.loads((RESULTS / "cpu2-heads.json").read_text())["runs"]
    runs = json.loads((RESULTS / "cpu2-runs.json").read_text())["runs"]
    by_schedule = {
        schedule: of_rates(run for run in heads if (run["statistics"], run["schedule"]) == ("stored", schedule))
        for schedule in ("constant", "warm-up, cosine")
    }
    in_runs = of_rates(run for run in runs if "learning rate" in run["studies"])
    assert by_schedule["constant"].mean() > 0 > in_runs.mean()
    assert (by_schedule["warm-up, cosine"] < 0).all(), "the schedule alone turns the sign, in each round"
    assert {run["warmup_steps"] for run in runs} == {3}, "heads.py has the warm-up of the runs"
