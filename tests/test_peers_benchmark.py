"""The peers of inference and of many models are timed fairly, and a contestant that is not there says so."""

import importlib.util
import json
import time

import pytest
from click.testing import CliRunner


def test_the_clock_of_a_peer_leaves_its_start_and_its_end_out(benchmark, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def two_processes():
        """Two processes need 2 s for a part of 5 photos. The first one ends, in pairs, just before the second."""
        nonlocal now
        now = 100  # they start slowly
        for _ in range(10):
            now += 1.5
            yield [0] * 5
            now += 0.5
            yield [0] * 5

    # 10 photos in 2 s; from the first part after a quarter to the last one, 65 photos seem to take 12.5 s.
    assert benchmark("inference_peers").steady_seconds(two_processes(), 100) == pytest.approx(20)


def test_a_peer_that_loses_photos_has_no_figure(benchmark):
    with pytest.raises(ValueError, match="3 of 4 photos"):
        benchmark("inference_peers").steady_seconds(iter([[0], [0], [0]]), 4)


def test_a_peer_that_is_not_installed_is_named_with_the_cure(benchmark, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    contestants, not_run = benchmark("inference_peers").peers([], "weights.pt")
    assert not contestants
    assert set(not_run) == {"Ray Data", "Daft"} and all("[peers]" in why for why in not_run.values())


def test_all_ways_to_train_many_models_come_to_the_same_losses(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark("record"), "RESULTS", tmp_path)
    many_models = benchmark("many_models")
    ran = CliRunner().invoke(many_models.main, ["--names", "60", "--rounds", "1"])
    assert ran.exit_code == 0, ran.output
    (path,) = tmp_path.glob("*-many-models.json")
    result = json.loads(path.read_text())
    assert result["seconds"].keys() >= {"sequential", "Dask", "joblib"}, result["not_run"]
    assert len(result["losses"]) == len(many_models.SETTINGS) and len(set(result["losses"])) == len(
        many_models.SETTINGS
    )
