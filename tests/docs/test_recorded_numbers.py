"""The numbers that pages print are those that were recorded, and their sentences say what these numbers say."""

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "daskrun/README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md")))]
FILLED = re.compile(r"<!-- (?:figures|filled).*?<!-- end.*?-->|^```.*?^```", re.DOTALL | re.MULTILINE)
WITH_A_UNIT = re.compile(r"(?<![\w.])\d[\d,.]*\u00a0?[ ]?(?:TB|GB|GiB|MB|MiB|kB|s|ms|µs|%|×|(?:photos|images)/s)(?!\w)")
NOT_MEASURED = {  # what is typed into prose all the same
    "0.6 GB": "computed from the sizes of packages",
    "2 GB": "computed from the sizes of packages",
    "20 GB": "computed: thirty times 0.6 GB",
    "0.8 GB": "the size of Stanford Dogs",
    "4 GiB": "what `workshop check` asks for",
    "30 s": "Dask's setting",
    "45 s": "a limit of the launcher",
    "60 s": "an example of a setting",
    "600 s": "an example of a setting",
    "40 ms": "a delay that notebook 07 sets",
    "80 %": "a limit that notebook 11 sets",
    "95 %": "how much of the resampled means an interval holds",
    "3 s": "an example of a guess",
}


def recorded(name):
    return json.loads((ROOT / f"benchmarks/results/cpu2-{name}.json").read_text(encoding="utf-8"))


def sentences():
    """Return (page, sentence, whether the figures bear it out)."""
    launchers, faults = recorded("launchers")["rows"], recorded("faults")["table"]
    ours, torchrun, script = (launchers[tool] for tool in ("this on Dask", "torchrun", "daskrun train.py"))
    peers = [row for tool, row in launchers.items() if tool not in ("this on Dask", "daskrun train.py")]
    within_2_s = ours["warm_s"] < 2
    first_back = all(ours["again_s"] < peer["again_s"] for peer in peers)
    ray = launchers["Ray Train"]
    ray_is_last = all(ray[when] >= row[when] for when in ("cold_s", "warm_s") for row in peers if when in row)
    said = {case["kind"]: [case[tool]["said"] for tool in ("daskrun.launch", "torchrun")] for case in faults}
    silent = [kind for kind, both in said.items() if all(one.startswith("nothing") for one in both)]
    half_silent = 2 * len(silent) == len(faults)
    n_dead = sum(case["branch"] == "dead" for case in faults)
    leak_ends_well = said["memory leak"][1].startswith("nothing: it ends as if all were well")
    known = [row[when] for row in launchers.values() for when in ("says_s", "knows_s")]
    seats = {row["seats"]: row["seconds"] for row in recorded("room")["seats"]}
    slower = [seats[2][cell]["median"] / seats[1][cell]["median"] for cell in seats[1]]
    return [
        ("docs/figures.md", "Notebook 12 hides sixteen faults", len(faults) == 16),
        ("docs/figures.md", "Half of these faults say nothing under either launcher", half_silent),
        ("docs/figures.md", "The leak ends well under torchrun", leak_ends_well),
        ("docs/figures.md", "it started sooner than a cluster did", torchrun["cold_s"] < ours["cold_s"]),
        ("docs/figures.md", "it started later than torchrun here", script["cold_s"] > torchrun["cold_s"]),
        ("docs/figures.md", "was back later after a kill", script["again_s"] > torchrun["again_s"]),
        ("docs/figures.md", "in fewer lines of yours", launchers["Accelerate"]["lines"] < torchrun["lines"]),
        ("docs/figures.md", "past its first step within two seconds", within_2_s),
        ("docs/figures.md", "took longest to start here, cold and warm", ray_is_last),
        ("docs/figures.md", "This workshop's job was back at training first", first_back),
        (
            "docs/slides/index.md",
            "torchrun is at its first step long before",
            torchrun["cold_s"] < 0.8 * ours["cold_s"],
        ),
        ("docs/slides/index.md", "the next job is past its first step within two seconds", within_2_s),
        ("docs/slides/index.md", "You want the next job at work within two seconds", within_2_s),
        ("docs/slides/index.md", "a death is known within four seconds", max(known) < 4),
        ("docs/slides/index.md", "Our launcher is back at training first", first_back),
        ("docs/slides/index.md", "Half of all faults say nothing under any launcher", half_silent),
        ("docs/slides/index.md", "One of the two deaths is a memory leak", n_dead == 2 and leak_ends_well),
        ("docs/instructor/room.md", "With one core a seat, cells take twice as long", 1.5 < max(slower) < 2.5),
    ]


@pytest.mark.parametrize(("page", "sentence", "holds"), sentences(), ids=[sentence[1] for sentence in sentences()])
def test_a_sentence_says_what_the_figures_say(page, sentence, holds):
    assert sentence in (ROOT / page).read_text(encoding="utf-8"), "the page has changed: change this test"
    assert holds, "the figures have changed: change the sentence"


@pytest.mark.parametrize("page", PAGES)
def test_a_number_with_a_unit_in_prose_was_recorded_or_is_none_of_a_measurement(page):
    installed = recorded("installing")["runs"]["make setup CPU=0"]
    fetched, disk = (statistics.median(run[what] for run in installed) for what in ("fetched_gb", "disk_gb"))
    known = {f"{fetched:.1f} GB", f"{disk:.0f} GB", *NOT_MEASURED}
    prose = FILLED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    assert set(WITH_A_UNIT.findall(prose)) <= known, "read it from the figures, or say it in words"


def test_the_slides_find_what_they_print(benchmark, monkeypatch):
    benchmark("figures")
    for folder in ("docs/slides", "docs/_ext"):
        monkeypatch.syspath_prepend(ROOT / folder)
    import measured

    used = re.findall(r"\{\{(\w+)\}\}", (ROOT / "docs/slides/index.md").read_text(encoding="utf-8"))
    assert set(used) - {"begin", "address"} == set(measured.numbers())


@pytest.mark.parametrize("page", ["README.md", "docs/figures.md"])
def test_a_page_has_the_figures_that_were_recorded(benchmark, page):
    figures, text = benchmark("figures"), (ROOT / page).read_text(encoding="utf-8")
    assert figures.filled(text, figures.stored(figures.DEVICE)) == text, "make figures"


def test_the_page_on_rooms_has_the_figures_that_were_recorded(benchmark, tmp_path):
    room, page = benchmark("room"), tmp_path / "room.md"
    page.write_text(room.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    room.fill(page, room.newest())
    assert page.read_text(encoding="utf-8") == room.PAGE.read_text(encoding="utf-8"), "python benchmarks/room.py --page"


def test_the_guide_says_what_the_seeds_for_a_room_hide():
    from workshop_utils.exercises.gym.faults import draw

    page = (ROOT / "docs/instructor/notebooks.md").read_text(encoding="utf-8").partition("### Seeds for a room")[2]
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.*?) ?\| (\d*) ?\| .+ \|$", page, re.MULTILINE)
    assert len(rows) > 5
    for seed, fault, rank, step in rows:
        truth = draw(int(seed))
        of_all = "" if truth.step is None else "all"
        assert fault == truth.fault
        assert rank == (of_all if truth.rank is None else str(truth.rank))
        assert step == ("" if truth.step is None else str(truth.step))
