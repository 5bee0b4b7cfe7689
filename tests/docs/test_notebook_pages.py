"""The instructor's page has a part for each notebook, with a row for each guess that is made in class."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
PARTS = re.split(r"^## ", (ROOT / "docs/instructor/notebooks.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
LESSONS = sorted((ROOT / "notebook_output").glob("[0-9]*.ipynb"))


def guesses_in_class(path):
    n = 0
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown" and "## Going further" in cell.source:
            break
        n += "guess" in cell.metadata.get("tags", [])
    return n


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_notebook_has_one_sentence_and_something_to_say_before_each_guess(path):
    title = nbformat.read(path, as_version=4).cells[0].source.split("\n")[0].removeprefix("# ")
    (part,) = [part for part in PARTS if part.startswith(f"{title}\n")]
    assert re.match(r".+\n\n> .+[.]\n", part)
    rows = re.findall(r"^\| (?!before|---)(.+) \| (.+) \|$", part, re.MULTILINE)
    assert len(rows) == guesses_in_class(path)
    assert "- **Dashboards.**" in part and "- **No time?**" in part
