"""The numbers that pages print are those that were recorded."""

from pathlib import Path

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
