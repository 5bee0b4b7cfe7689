"""Write times and minutes into the instructor's schedules, and into the README's table, as the notebooks say them.

`tools/render.py` does this after each run; `python tools/schedules.py` does it after a change of the page.
A row of a schedule begins where the row before it ends, and CHANGE minutes later where one notebook follows another,
which has to be closed first. A row that names a notebook, or a section of one, lasts as
long as the notebook says; the minutes of any other row, and the time at which a schedule begins, are the page's own.
"""

import re
from pathlib import Path

import nbformat
from minutes import opening

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs/instructor/schedules.md", ROOT / "README.md"
OF_README = re.compile(r"(\| \d\d \| \[[^|]+\]\((\S+\.ipynb)\)) \| \d+ \|")
TIMED = re.compile(r"\| (\d\d):(\d\d) \| (\d*) ?\| (.+) \|")
LEFT_OUT = re.compile(r"\| (.+, sections? \d+(?: to \d+)?) \| \d+ \| (.+) \|")
CHANGE = 2  # minutes for closing a notebook and opening the next
LESSON = re.compile(r"\((\S+/\d\d-[\w-]+\.ipynb)\)(?:, sections? (\d+)(?: to (\d+))?)?$")
NAMED = re.compile(r"/\d\d-[\w-]+\.ipynb\)")


def fill_schedules(page: Path = PAGE) -> None:
    """Bring the times and minutes in the tables of `page` up to date with the notebooks that its rows link to."""
    lines, now = [], None  # minutes since midnight at which the next row begins
    before = None  # the notebook of the row before
    for line in page.read_text(encoding="utf-8").splitlines():
        if timed := TIMED.fullmatch(line):
            hours, minutes, lasts, what = timed.groups()
            now = 60 * int(hours) + int(minutes) if now is None else now
            lasts = _minutes(page.parent, what) or int(lasts or 0)
            notebook = what.partition(",")[0] if LESSON.search(what) else None
            if notebook and before not in (None, notebook):
                now += CHANGE
            before = notebook
            line = f"| {now // 60:02}:{now % 60:02} | {f'{lasts} ' if lasts else ''}| {what} |"
            now += lasts
        elif left_out := LEFT_OUT.fullmatch(line):
            line = f"| {left_out[1]} | {_minutes(page.parent, left_out[1])} | {left_out[2]} |"
        else:
            now = before = None
        lines.append(line)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def fill_readme(page: Path = README) -> None:
    """Bring the minutes in the table of notebooks in the README up to date."""

    def filled(row):
        return f"{row[1]} | {_minutes(page.parent, row[1].rpartition(' | ')[2])} |"

    page.write_text(OF_README.sub(filled, page.read_text(encoding="utf-8")), encoding="utf-8")


def _minutes(folder, row):
    """Return the minutes of the notebook, or of its sections, that a row names; None where it names none."""
    lesson = LESSON.search(row)
    if not lesson:
        if NAMED.search(row):
            raise ValueError(f"the row {row!r} should end with the notebook, ', section 2' or ', sections 1 to 3'")
        return None
    path, first, last = lesson.groups()
    notebook = nbformat.read(folder / path, as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    patterns = [r"\*\*Time:\*\* (\d+) minutes in class"]
    if first:
        sections = range(int(first), int(last or first) + 1)
        patterns = [rf"^## {section} · .+\n\n\*(\d+) minutes?\*" for section in sections]
    found = [re.search(said, prose, re.MULTILINE) for said in patterns]
    if not found or not all(found):
        raise ValueError(f"the row {row!r} names a lesson or section that says no minutes: correct the row, or render")
    return sum(int(one[1]) for one in found if one) + (opening(notebook) if first == "1" else 0)


if __name__ == "__main__":
    fill_schedules()
    fill_readme()
