"""One sheet of paper for each notebook, made from the notebook and from the instructor's part on it.

    ```{handouts}
    ```
The upper part is for before the lesson. It has what one can do afterwards, a table for guesses, and room for notes. The
lower part, below a line to fold at, has what would give the guesses away: the sentence to remember, and key points.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from book.lessons import Lesson, read_lesson

GUIDE = "docs/instructor/notebooks.md"
SENTENCE = re.compile(r"^> (.+)$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")

GUESS = re.compile(r"^(?P<name>my_guess\w*) = None +# (?P<what>.+)$", re.MULTILINE)
UNIT = re.compile(r"^simple estimate +\S+ (?P<unit>.+)$", re.MULTILINE)  # as `reconcile` prints it
HEADING = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)
SAID_ANYWAY = re.compile(r"^your guess\b[,:]?\s*|\bin (?:seconds|percent)\b,?\s*")  # by the table's head, and the unit


class Guess(NamedTuple):
    """A number that a notebook asks for before it measures it. what: its section, and what its cell says of it."""

    what: str
    unit: str


def read_sentence(root: str | Path, number: str) -> str:
    """Return what the instructor's page would have people remember of notebook `number`, or raise LookupError."""
    text = Path(root, GUIDE).read_text(encoding="utf-8")
    part = text.partition(f"\n## {number} ·")[2].partition("\n## ")[0]
    if not (sentence := SENTENCE.search(part)):
        raise LookupError(f"{GUIDE} lacks a sentence to remember, '> …', under '{number} · …'.")
    return sentence.group(1)


def read_guesses(path: Path) -> list[Guess]:
    """Return the guesses of a stored notebook, in its order; raise LookupError if one was never measured."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    heading, guesses = "", []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for found in HEADING.finditer(source):
                heading = found[1]
        elif found := GUESS.search(source):
            what = SAID_ANYWAY.sub("", found["what"]).strip()
            unit = _unit_of(found["name"], cells)
            if not unit:
                raise LookupError(f"No cell of {path.name} has measured {found['name']}: python tools/render.py")
            guesses.append(Guess(f"{heading} ({what})" if what else heading, unit))
    return guesses


class Handouts(SphinxDirective):
    """A section for each numbered notebook, which is one page when it is printed."""

    def run(self) -> list[nodes.Node]:
        """Return the sections; end the build if a notebook or its part of the guide lacks something."""
        self.env.note_dependency(str(Path(self.env.srcdir, GUIDE)))
        paths = sorted(Path(self.env.srcdir, "notebook_output").glob("[0-9]*.ipynb"))
        try:
            return [self._sheet(path) for path in paths]
        except (ValueError, LookupError) as error:
            raise ExtensionError(f"{self.get_location()}: {error}") from error

    def _sheet(self, path: Path) -> nodes.section:
        number = path.name[:2]
        self.env.note_dependency(str(path))
        lesson, sentence = read_lesson(self.env.srcdir, number), read_sentence(self.env.srcdir, number)
        sheet = nodes.section(ids=[f"handout-{number}"], classes=["handout"])
        sheet += nodes.title("", lesson.title)
        sheet += self.parse_text_to_nodes("\n".join(_before(lesson, read_guesses(path))))
        sheet += nodes.container(classes=["handout-notes"])
        sheet += nodes.container(
            "", *self.parse_text_to_nodes("\n".join(_after(lesson, sentence))), classes=["handout-fold"]
        )
        return sheet


def _unit_of(name: str, cells: list[dict[str, Any]]) -> str:
    for cell in cells:
        if re.search(rf"\breconcile\(\s*{name},", "".join(cell["source"])):
            printed = "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))
            if found := UNIT.search(printed):
                return found["unit"]
    return ""


def _before(lesson: Lesson, guesses: list[Guess]) -> list[str]:
    lines = ["**Afterwards you can**", "", *map(_item, lesson.able)]
    lines += ["", "**Guess first, in your own hand**", "", "| what | your guess | measured | in |", "|---|---|---|---|"]
    lines += [f"| {what} | | | {unit} |" for what, unit in guesses]
    return [*lines, "", "**Notes**"]


def _after(lesson: Lesson, sentence: str) -> list[str]:
    lines = ["*Fold the sheet back at this line, and open it when the notebook is over.*", "", f"> {sentence}"]
    return [*lines, "", "**Key points**", "", *map(_item, lesson.key_points)]


def _item(line: str) -> str:
    return "- " + LINK.sub(r"\1", line)  # a link is of no use on paper


def setup(app: Sphinx) -> None:
    """Register the list of sheets, and how they are printed."""
    app.add_directive("handouts", Handouts)
    app.add_css_file("handouts.css")
