"""How long a notebook takes in class: its cells as measured, its text by a rule; written into the notebook."""

import re
from collections import defaultdict
from pathlib import Path

import nbformat

WORDS, LINES = 130, 20  # words of prose and lines of code that are read in a minute
MINUTES = {"exercise": 2, "guess": 1, "check": 0}  # a cell with such a tag takes this, whatever it says
SOLVED = 2  # lines of our solution, beyond those of the stub, that an attendee writes in a minute
IMPORTS = re.compile(r"^(?:import|from) .*?(?:\(\n[^)]*\))?$", re.MULTILINE)  # nobody reads them line by line
FURTHER = "## Going further"  # the section for home, which does not count
UNREAD = re.compile(
    r"<details><summary>(?:Hint|Solution).*?</details>|!\[[^\]]*\]\([^)]*\)", re.DOTALL
)  # and alt texts
SECTION = re.compile(r"^(## .+)\n*(?:\*\d+ minutes?\*)?\n*", re.MULTILINE)
TOTAL = re.compile(r"\*\*Time:\*\* .*")


def write_minutes(path: Path, notebook: nbformat.NotebookNode, seconds: list[float]) -> None:
    """Write the minutes of each section and of the whole notebook into `notebook` and into its source.

    A section begins with a line `## …`. path: of the source. seconds: what each code cell of `notebook` took.
    """
    minutes = _of_sections(notebook, seconds)
    in_class = sum(minutes.values()) - minutes[FURTHER]
    total = f"**Time:** {5 * round(in_class / 5)} minutes in class; its cells run for {_run_time(sum(seconds))}."
    source = nbformat.read(path, as_version=4)
    for cell in [*source.cells, *notebook.cells]:
        if cell.cell_type == "markdown":
            cell.source = SECTION.sub(lambda found: f"{found[1]}\n\n{_rounded(minutes[found[1]])}\n\n", cell.source)
            cell.source = TOTAL.sub(total, cell.source).rstrip("\n")
    nbformat.write(source, path)


def opening(notebook: nbformat.NotebookNode) -> int:
    """Return the minutes of what stands before the first section, without those that its cells run."""
    n_cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    return round(_of_sections(notebook, [0] * n_cells)[""])


def _of_sections(notebook, seconds):
    minutes, section, took = defaultdict[str, float](float), "", iter(seconds)
    stub: set[str] = set()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            minutes[section] += next(took) / 60 + _of_code(cell, stub)
            if "exercise" in cell.metadata.get("tags", ()):
                stub = _lines(cell)
            continue
        for part in re.split(r"^(?=## )", cell.source, flags=re.MULTILINE):
            if part.startswith("## "):
                section = part.split("\n")[0]
            minutes[section] += len(UNREAD.sub("", part).split()) / WORDS
    return minutes


def _lines(cell):
    """Return the distinct lines that an attendee may have to write."""
    lines = {line.strip() for line in cell.source.splitlines()}
    return {line for line in lines if line and not line.startswith(("#", "@ours", "if unanswered("))}


def _of_code(cell, stub):
    tags = cell.metadata.get("tags", ())
    if "solution" in tags:
        return len(_lines(cell) - stub) / SOLVED
    n_lines = sum(bool(line.strip()) for line in IMPORTS.sub("", cell.source).splitlines())
    return next((MINUTES[tag] for tag in tags if tag in MINUTES), n_lines / LINES)


def _run_time(seconds):
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{10 * round(seconds / 10)} seconds"


def _rounded(minutes):
    whole = max(1, round(minutes))
    return "*1 minute*" if whole == 1 else f"*{whole} minutes*"
