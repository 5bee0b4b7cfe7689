"""The numbers that pages print are those that were recorded, and ratios say what they should."""

from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/figures.md"])
def test_a_page_has_the_figures_that_were_recorded(benchmark, page):
    figures, text = benchmark("figures"), (ROOT / page).read_text(encoding="utf-8")
    assert figures.filled(text, figures.stored(figures.DEVICE)) == text, "make figures"


def test_the_page_on_rooms_has_the_figures_that_were_recorded(benchmark, tmp_path):
    room, page = benchmark("room"), tmp_path / "room.md"
    page.write_text(room.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    room.fill(page, room.newest())
    assert page.read_text(encoding="utf-8") == room.PAGE.read_text(encoding="utf-8"), "python benchmarks/room.py --page"


def test_the_schedules_have_the_minutes_of_the_notebooks(tmp_path):
    from schedules import PAGE, fill_schedules

    page = tmp_path / "docs/instructor/schedules.md"
    page.parent.mkdir(parents=True)
    page.write_bytes(PAGE.read_bytes())
    (tmp_path / "notebook_output").symlink_to(ROOT / "notebook_output")
    fill_schedules(page)
    assert page.read_bytes() == PAGE.read_bytes(), "run: python tools/schedules.py"


def results(ours=4.0):
    """Results that are easy to reckon with: photos, seconds of the rounds, and seconds from a kill to the next step."""
    seconds = {"upstream: slow": [10.0, 10.0, 20.0], "classify": [2.0, 2.5, 2.5], "bound": [2.0, 2.0, 2.0]}
    inference = {"photos": 100, "rounds": 3, "real_weights": True, "precision": "bf16", "seconds": seconds}
    runs = {}
    for tool, again_s in (("this on Dask", ours), ("torchrun", 8.0), ("Accelerate", 2.0)):
        killed = {"again_s": again_s, "same_loss": "no" if again_s is None else "yes", "restarts_left": []}
        runs[tool] = [{"cold_s": 10.0, **killed}, {"cold_s": 10.0}]
    return {"inference": inference, "launchers": {"runs": runs}}


def judged(benchmark, results, what):
    return {line["peer"]: line for line in benchmark("table").judge_all(results) if line["what"].startswith(what)}


def test_rates_are_to_be_at_least_as_high_and_seconds_at_most_as_long(benchmark):
    photos = judged(benchmark, results(), "classify photos, ResNet-50")
    recipe, bound = photos["upstream's recipe"], photos["bound of these cores"]
    assert (recipe["ours"], recipe["theirs"]) == (40, 10)  # photos/s of the median rounds
    assert (recipe["reached"], recipe["least"], recipe["most"], recipe["met"]) == (5, 4, 8, "met")
    assert (bound["reached"], bound["met"]) == (pytest.approx(0.8), "missed")
    assert photos["Daft"]["met"] == "not measured"
    restarts = judged(benchmark, results(), "DDP, from a kill")
    assert (restarts["torchrun"]["reached"], restarts["torchrun"]["met"]) == (0.5, "met")
    assert (restarts["Accelerate"]["reached"], restarts["Accelerate"]["met"]) == (2, "missed")


def test_a_restart_that_fails_lasts_for_ever(benchmark):
    assert judged(benchmark, results(ours=None), "DDP, from a kill")["torchrun"]["met"] == "missed"


def rows(*steps):
    """The rows of (time, pid, rank, epoch) as ranks note them."""
    return [
        {"time": at, "pid": pid, "rank": rank, "epoch": epoch, "step": 0, "loss": 1.0} for at, pid, rank, epoch in steps
    ]


def test_a_job_that_begins_again_is_not_taken_for_one_that_resumed(benchmark):
    before = rows((1, 10, 0, 0), (2, 11, 1, 0), (3, 10, 0, 1), (4, 11, 1, 1))

    def reborn(*later):
        job = SimpleNamespace(killed=5, left=[], jobs=[before + rows(*later)])
        return benchmark("launchers").rebirth(job, expected=1.0)

    assert reborn((6, 10, 0, 1))["resumed"] == "no"  # the survivor, ending its step
    assert reborn(*[(8 + n, 12 + n % 2, n % 2, 0) for n in range(6)])["resumed"] == "from start"
    resumed = reborn((6, 10, 0, 1), *[(8 + n, 12 + n % 2, n % 2, 1) for n in range(6)])
    assert (resumed["resumed"], resumed["again_s"]) == ("from checkpoint", 4)
    kept = reborn(*[(8 + n, (10, 12)[n % 2], n % 2, 1) for n in range(6)])  # rank 0 keeps its process
    assert (kept["resumed"], kept["again_s"]) == ("from checkpoint", 4)
