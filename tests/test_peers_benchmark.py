"""The peers of inference and of many models are timed fairly, and a contestant that is not there says so."""

import importlib.util
import json
import time

import pytest
from click.testing import CliRunner


def test_the_clock_of_a_peer_leaves_its_start_out(benchmark):
    def slow_to_start():
        time.sleep(0.5)
        yield [0] * 25
        for _ in range(3):
            time.sleep(0.05)
            yield [0] * 25

    # 75 photos in 0.15 s, so 100 in 0.2 s.
    assert benchmark("inference_peers").steady_seconds(slow_to_start(), 100) == pytest.approx(0.2, rel=0.5)


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
