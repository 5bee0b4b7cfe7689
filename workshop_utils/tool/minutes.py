"""How long a notebook takes in class: its cells as they were measured, and the reading by a rule, written into it."""

import re
from collections import defaultdict
from pathlib import Path

import nbformat

WORDS, LINES = 130, 20  # of prose and of code, read in a minute
MINUTES = {"exercise": 4, "guess": 1, "solution": 0, "check": 0}  # for cells with such a tag, instead of their lines
FURTHER = "## Going further"  # is read at home
UNREAD = re.compile(r"<details>.*?</details>|!\[[^\]]*\]\([^)]*\)", re.DOTALL)  # folded hints, and pictures' alt text
SECTION = re.compile(r"^(## .+)\n*(?:\*\d+ minutes?\*)?\n*", re.MULTILINE)
TOTAL = re.compile(r"\*\*Time:\*\* .*")


def write_minutes(path: Path, notebook: nbformat.NotebookNode, seconds: list[float]) -> None:
    """Write the minutes of each section, which begins with a line `## …`, and of all into a notebook and its source.

    path: of the source. seconds: what each code cell of `notebook` took.
    """
    minutes, section, took = defaultdict[str, float](float), "", iter(seconds)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            rules = [MINUTES[tag] for tag in cell.metadata.get("tags", ()) if tag in MINUTES]
            minutes[section] += next(took) / 60 + (sum(rules) if rules else (cell.source.count("\n") + 1) / LINES)
            continue
        for part in re.split(r"^(?=## )", cell.source, flags=re.MULTILINE):
            section = part.split("\n")[0] if part.startswith("## ") else section
            minutes[section] += len(UNREAD.sub("", part).split()) / WORDS
    in_class = sum(minutes.values()) - minutes[FURTHER]
    total = f"**Time:** {5 * round(in_class / 5)} minutes in class; its cells run for {_for(sum(seconds))}."
    source = nbformat.read(path, as_version=4)
    for cell in [*source.cells, *notebook.cells]:
        if cell.cell_type == "markdown":
            cell.source = SECTION.sub(lambda found: f"{found[1]}\n\n{_about(minutes[found[1]])}\n\n", cell.source)
            cell.source = TOTAL.sub(total, cell.source).rstrip("\n")
    nbformat.write(source, path)


def _for(seconds):
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{10 * round(seconds / 10)} seconds"


def _about(minutes):
    return f"*{max(1, round(minutes))} minute{'s' if round(minutes) > 1 else ''}*"
