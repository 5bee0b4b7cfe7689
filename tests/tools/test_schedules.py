"""The instructor's schedules add up and teach nothing before what it needs."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_notebook
from schedules import PAGE, fill_schedules

RENDERED = Path(__file__).parents[2] / "notebook_output"
SCHEDULES = PAGE.read_text(encoding="utf-8").split("\n## ")[1:3]


def test_the_page_is_up_to_date(tmp_path):
    page = tmp_path / "docs/instructor/schedules.md"
    page.parent.mkdir(parents=True)
    page.write_bytes(PAGE.read_bytes())
    (tmp_path / "notebook_output").symlink_to(RENDERED)
    fill_schedules(page)
    assert page.read_bytes() == PAGE.read_bytes(), "run: python tools/schedules.py"


def test_times_and_minutes_are_filled_in_from_the_notebooks(tmp_path):
    text = (
        "# Try\n\n**Time:** 25 minutes in class; its cells run for 3.0 minutes.\n\n## 4 · Trees\n\n*6 minutes*\n\nGrow."
    )
    nbformat.write(new_notebook(cells=[new_markdown_cell(text)]), tmp_path / "01-try.ipynb")
    page = tmp_path / "schedules.md"
    page.write_text(
        "| 09:50 | 5 | Welcome |\n| 09:00 | 1 | [01](./01-try.ipynb) |\n| 09:00 | 0 | End |\n\nThen\n\n"
        "| 13:00 | 7 | Lunch |\n\n| [01](./01-try.ipynb), section 4 | 1 | trees |\n"
    )
    fill_schedules(page)
    assert page.read_text() == (
        "| 09:50 | 5 | Welcome |\n| 09:55 | 25 | [01](./01-try.ipynb) |\n| 10:20 | 0 | End |\n\nThen\n\n"
        "| 13:00 | 7 | Lunch |\n\n| [01](./01-try.ipynb), section 4 | 6 | trees |\n"
    )


def test_a_row_whose_section_is_gone_is_named(tmp_path):
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Try")]), tmp_path / "01-try.ipynb")
    page = tmp_path / "schedules.md"
    page.write_text("| [01](./01-try.ipynb), section 9 | 1 | trees |\n")
    with pytest.raises(ValueError, match="section 9"):
        fill_schedules(page)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.split("\n")[0])
def test_what_a_schedule_teaches_comes_after_what_it_needs(schedule):
    taught = re.findall(r"^\| \d\d:\d\d .+/(\d\d-[\w-]+\.ipynb)", schedule, re.MULTILINE)
    assert len(taught) >= 4
    for position, name in enumerate(taught):
        title = nbformat.read(RENDERED / name, as_version=4).cells[0].source
        needed = re.findall(r"\((\d\d-[\w-]+\.ipynb)\)", title.split("**Necessary:**")[1].split("**Helpful:**")[0])
        missing = set(needed) - set(taught[:position])
        if name.startswith("10"):
            missing -= {"04-parallel-inference.ipynb"}  # the page has a sentence that stands in for 04
        assert not missing, name
