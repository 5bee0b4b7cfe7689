"""The figures of README.md and docs/figures.md are what benchmarks/results hold, and the table what was reached."""

import importlib
import signal
import subprocess
import sys

import click
import psutil
import pytest
from built import ROOT


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("table")


@pytest.fixture
def figures(table):
    return importlib.import_module("figures")


def again(seconds, same_loss="yes"):
    """What a run says of a restart after a kill."""
    return {"again_s": seconds, "same_loss": same_loss, "restarts_left": []}


@pytest.fixture
def results():
    """Results with numbers that are easy to reckon with: photos, seconds of two or three rounds, runs of tools."""
    return {
        "inference": {
            "photos": 100,
            "rounds": 3,
            "real_weights": True,
            "precision": "bf16",
            "seconds": {
                "upstream: slow": [10.0, 10.0, 20.0],
                "DataLoader, fp32, a": [9.0, 8.0, 10.0],
                "DataLoader, bf16, a": [4.0, 4.0, 4.0],
                "DataLoader, bf16, b": [3.0, 2.0, 3.0],
                "classify": [2.0, 2.5, 2.5],
                "bound": [2.0, 2.0, 2.0],
            },
            "not_run": {"Ray Data, two actors": "ray is not installed"},
        },
        "launchers": {
            "runs": {
                "this on Dask": [{"cold_s": 20.0, **again(4.0)}, {"cold_s": 10.0}],
                "torchrun": [{"cold_s": 10.0, **again(8.0)}, {"cold_s": 10.0}],
                "Accelerate": [{"cold_s": 5.0, **again(2.0)}, {"cold_s": 5.0}],
            }
        },
    }


@pytest.mark.parametrize("page", ["README.md", "docs/figures.md"])
def test_a_page_has_the_figures_that_were_recorded(figures, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    written = figures.filled(text, figures.stored(figures.DEVICE))
    assert text == written, "make figures"


@pytest.mark.parametrize("page", ["README.md", "docs/figures.md"])
def test_a_digit_that_somebody_changes_is_found(figures, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    classify = f"{figures.stored(figures.DEVICE)['inference']['images_per_s']['classify']:.1f}"
    changed = text.replace(classify, "1" + classify)
    assert changed != text and figures.filled(changed, figures.stored(figures.DEVICE)) == text


def judged(table, results, what, **failed):
    return {line["peer"]: line for line in table.judge_all(results, failed) if line["what"].startswith(what)}


def test_a_photos_time_has_goals_at_least_as_fast(table, results):
    lines = judged(table, results, "classify photos, ResNet-50")
    recipe, loop, bound = (
        lines[name] for name in ("upstream's recipe", "best DataLoader loop", "bound of these cores")
    )
    assert (recipe["ours"], recipe["theirs"]) == (40, 10)  # photos/s of the median rounds
    assert (recipe["reached"], recipe["least"], recipe["most"], recipe["met"]) == (5, 4, 8, "met")
    assert (loop["theirs"], loop["reached"], loop["met"]) == (pytest.approx(100 / 3), pytest.approx(1.2), "met")
    assert (bound["reached"], bound["goal"], bound["met"]) == (pytest.approx(0.8), "≥ 0.97 ×", "missed")


def test_seconds_have_goals_at_most_as_long_and_a_round_without_a_kill_does_not_count(table, results):
    lines = judged(table, results, "DDP, from a kill")
    assert (lines["torchrun"]["reached"], lines["torchrun"]["rounds"], lines["torchrun"]["met"]) == (0.5, 1, "met")
    assert (lines["Accelerate"]["reached"], lines["Accelerate"]["met"]) == (2, "missed")
    assert judged(table, results, "DDP, cold")["torchrun"]["reached"] == 1.5


@pytest.mark.parametrize("lost", [again(None, "no"), again(5.0, "no")])
def test_a_restart_that_fails_or_comes_to_another_loss_lasts_for_ever(table, results, lost):
    results["launchers"]["runs"]["this on Dask"] = [{"cold_s": 10.0, **lost}, {"cold_s": 10.0, **again(4.0)}]
    results["launchers"]["runs"]["torchrun"] = [{"cold_s": 10.0, **again(8.0)}] * 2
    line = judged(table, results, "DDP, from a kill")["torchrun"]
    assert (line["rounds"], line["met"]) == (2, "missed")
    assert "never" in "\n".join(table.as_text([line]))


def test_a_contestant_that_stopped_to_run_has_no_ratio(table, results):
    results["launchers"]["not_run"] = {"torchrun": "it hung in round 2"}
    assert judged(table, results, "DDP, from a kill")["torchrun"]["met"] == "not measured: it hung in round 2"


def test_the_reason_of_one_way_to_install_is_not_that_of_the_other(table):
    runs = {"make setup CPU=0": [{"seconds": 50.0, "fetched_gb": 3.0, "disk_gb": 7.0}], "make setup CPU=1": []}
    lines = table.judge_all({"installing": {"runs": runs, "not_run": {"make setup CPU=1": "no network"}}})
    said = {line["what"]: (line["ours"], line["met"]) for line in lines if line["result"] == "installing"}
    assert said["make setup CPU=0"] == (50.0, "")
    assert said["make setup CPU=1"] == said["make setup CPU=1, fetched"] == (None, "not measured: no network")


def test_a_figure_of_ours_that_was_not_measured_is_no_row_on_the_page(figures, results):
    runs = {"make setup CPU=0": [{"seconds": 50.0, "fetched_gb": 3.0, "disk_gb": 7.0}], "make setup CPU=1": []}
    results["installing"] = {"runs": runs, "not_run": {"make setup CPU=1": "no network"}}
    written = figures.goals(results)
    assert "| make setup CPU=0 | 50.0 s |" in written and "CPU=1" not in written and "no network" not in written
    assert "Not measured, Ray Data: ray is not installed" in written


def test_a_damaged_result_is_named(table, tmp_path):
    (tmp_path / "cpu2-ddp.json").write_text("{")
    with pytest.raises(click.ClickException, match="cpu2-ddp.json is no JSON"):
        table.stored("cpu2", tmp_path)


def test_each_part_has_its_place_on_a_page(figures):
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in figures.PAGES]
    assert sorted(part[2] for page in pages for part in figures.PART.finditer(page)) == sorted(figures.PARTS)


def test_the_table_says_what_was_not_measured_and_why(table, results):
    lines = judged(table, results, "classify photos, ResNet-50")
    assert lines["Daft"]["met"] == "not measured"
    assert lines["Ray Data"]["met"] == "not measured: ray is not installed"
    lines = judged(table, {}, "classify photos, ResNet-50", inference="out of memory")
    assert {line["met"] for line in lines.values()} == {"not measured: out of memory"}
    printed = "\n".join(table.as_text(table.judge_all(results)))
    assert "5.00 × as fast (4.00–8.00)" in printed and "0.500 × as long  " in printed


def test_a_benchmark_that_fails_is_named_and_the_others_run(table, tmp_path, capfd):
    (tmp_path / "first.py").write_text("import sys\nprint('KeyError: 1', file=sys.stderr)\nraise ValueError('no S3')")
    (tmp_path / "second.py").write_text("print('measured')")
    failed = table.run_all(["first", "second", "third"], tmp_path)
    assert failed == {"first": "ValueError: no S3", "third": "there is no third.py"}
    assert "measured" in capfd.readouterr().out


def test_a_benchmark_ends_with_the_table(table, tmp_path):
    # By the first line of slow.py the table waits for its end: just before it waits, Python can miss a Ctrl-C.
    slow = "import os, time\ntime.sleep(2)\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    (tmp_path / "slow.py").write_text(slow)
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nimport pathlib, table\n"
    code += f"table.run_all(['slow'], pathlib.Path({str(tmp_path)!r}))"
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert "slow" in running.stdout.readline()
    process = psutil.Process(int(running.stdout.readline()))
    running.send_signal(signal.SIGINT)
    assert running.wait(60) and not process.is_running()
    running.stdout.close()


def test_a_rate_is_photos_by_the_median_of_seconds_and_a_ratio_the_median_of_the_rounds(figures, results):
    written = figures.classifying(results)
    assert "100 JPEGs of 500×375, ResNet-50 with ImageNet weights; medians of 3 rounds." in written
    assert "fp32 | 10.0 | 1.00 |" in written and "loop in bf16 | 33.3 | 5.00 |" in written
    assert "| **`classify` on two workers** | **40.0** | **5.00** |" in written
    assert "Ray Data" not in written


def test_a_result_names_its_commit_and_none_outside_git(table, tmp_path):
    record = importlib.import_module("record")
    assert "commit" in record.machine() and record.commit(tmp_path) is None
    assert record.versions(["click", "no-such-package"])["no-such-package"] is None
