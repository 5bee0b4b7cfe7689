"""How long a notebook takes in class: its cells as they were measured, and the reading by a rule, written into it."""

import re
from pathlib import Path

import nbformat

WORDS, LINES, EXERCISE, GUESS = 130, 15, 4, 1  # words and lines of code a minute; minutes for one of each
FURTHER = "Going further"  # a section that is read at home
SECTION = re.compile(r"^(## .+)\n(?:\n\*\d+ minutes?\*\n)?", re.MULTILINE)
TOTAL = re.compile(r"\*\*Time:\*\* [^.\n]*\.")


def write_minutes(path: Path, notebook: nbformat.NotebookNode, seconds: list[float]) -> None:
    """Write the minutes of each section and of all into `notebook`, and into its source at `path`.

    seconds: what each code cell took. A section is what follows a line `## …`; one without code or exercise has none.
    """
    minutes, ran, section, took = {"": 0.0}, {"": False}, "", iter(seconds)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for part in re.split(r"^(?=## )", cell.source, flags=re.MULTILINE):
                if part.startswith("## "):
                    section = part.splitlines()[0]
                    minutes[section], ran[section] = 0.0, False
                minutes[section] += len(re.sub(r"<details>.*?</details>", "", part, flags=re.DOTALL).split()) / WORDS
            continue
        tags, ran[section] = cell.metadata.get("tags", ()), True
        minutes[section] += next(took) / 60 + EXERCISE * ("exercise" in tags) + GUESS * ("guess" in tags)
        if not {"solution", "check"}.intersection(tags):
            minutes[section] += len(cell.source.splitlines()) / LINES
    in_class = sum(value for name, value in minutes.items() if not name.endswith(FURTHER))
    times = f"**Time:** {5 * round(in_class / 5)} minutes in class, of which the cells run for {sum(seconds) / 60:.0f}."
    times = times.replace("run for 0.", "run for less than one.")

    def with_minutes(text):
        def noted(match):
            n = max(1, round(minutes.get(match[1], 0)))
            note = f"\n*{n} minute{'s' * (n > 1)}*\n" if ran.get(match[1]) else ""
            return f"{match[1]}\n{note}"

        return SECTION.sub(noted, TOTAL.sub(times, text))

    source = nbformat.read(path, as_version=4)
    for cell in [*source.cells, *notebook.cells]:
        if cell.cell_type == "markdown":
            cell.source = with_minutes(cell.source)
    nbformat.write(source, path)
