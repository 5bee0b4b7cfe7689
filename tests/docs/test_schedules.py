"""The instructor's schedules add up, and their minutes are those that the notebooks say."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/instructor/schedules.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d\d):(\d\d) \| (\d+) \| (.+) \|$", re.MULTILINE)
CUT = re.compile(r"^\| (.+, sections? .+) \| (\d+) \| .+ \|$", re.MULTILINE)
LINK = re.compile(r"notebook_output/(\d\d-[\w-]+\.ipynb)")


def part(heading):
    return TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]


def minutes_of(row):
    """Return the minutes of the notebook, or of its section, that a row names; None where it names no lesson."""
    if not (link := LINK.search(row)):
        return None
    notebook = nbformat.read(PAGE.parent / "../../notebook_output" / link[1], as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    if not (section := re.search(r", section (\d+)$", row)):
        return int(re.search(r"\*\*Time:\*\* (\d+) minutes in class", prose)[1])
    return int(re.search(rf"^## {section[1]} · .+\n\n\*(\d+) minutes?\*", prose, re.MULTILINE)[1])


def clock(minutes):
    return f"{minutes // 60:02}:{minutes % 60:02}"


def recomputed(table):
    """Return the rows of a schedule with the minutes of the notebooks, each beginning where the one before ends."""
    rows = ROW.findall(table)
    at, computed = 60 * int(rows[0][0]) + int(rows[0][1]), []
    for _, _, minutes, what in rows:
        lasts = minutes_of(what)
        computed.append(f"| {clock(at)} | {minutes if lasts is None else lasts} | {what} |")
        at += int(minutes) if lasts is None else lasts
    return computed


@pytest.mark.parametrize("heading", ["Half a day on inference", "A day on training"])
def test_each_row_begins_where_the_one_before_ends_and_lasts_as_its_notebook_says(heading):
    written = [row[0] for row in re.finditer(ROW, part(heading))]
    computed = recomputed(part(heading))
    assert written == computed, "write instead:\n" + "\n".join(computed)
    assert len(LINK.findall(part(heading))) >= 4 and written[-1].endswith("| 0 | End |")


def test_what_a_schedule_teaches_comes_after_what_it_needs():
    for heading in ("Half a day on inference", "A day on training"):
        rows = [LINK.search(row[3]) for row in ROW.findall(part(heading))]
        taught = [link[1] for link in rows if link]
        for position, name in enumerate(taught):
            title = nbformat.read(ROOT / "notebook_output" / name, as_version=4).cells[0].source
            needed = re.findall(r"\((\d\d-[\w-]+\.ipynb)\)", title.split("**Necessary:**")[1].split("**Helpful:**")[0])
            missing = set(needed) - set(taught[:position])
            assert not missing - ({"04-parallel-inference.ipynb"} if name.startswith("10") else set()), (heading, name)


def test_a_section_that_is_left_out_saves_its_minutes():
    rows = CUT.findall(part("When time runs out"))
    assert len(rows) >= 5
    for row, saved in rows:
        assert int(saved) == minutes_of(row), row


def test_a_schedule_that_does_not_add_up_is_told():
    row = "[01](../../notebook_output/01-getting-started.ipynb)"
    table = f"| 09:00 | 5 | Welcome |\n| 09:10 | 1 | {row} |\n| 09:11 | 0 | End |"
    _, lesson, end = recomputed(table)
    assert lesson == f"| 09:05 | {minutes_of(row)} | {row} |" and end == f"| {clock(545 + minutes_of(row))} | 0 | End |"
