"""One sheet of paper for each notebook, made from the notebook and from the instructor's part on it.

    ```{handouts}
    ```
The upper part is for before: what one can do afterwards, a table for guesses, and room for notes. The lower part, below
a line to fold at, has what would give the guesses away: the sentence to remember, key points, and commands.
"""

import re
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from book.lessons import Lesson, read_lesson
from book.stored import read_stored

GUIDE = "docs/instructor/notebooks.md"
SENTENCE = re.compile(r"^> (.+)$", re.MULTILINE)
ROW = re.compile(r"^\| (.+?) \|.*\{stored\}`(\d\d) (\w+)` \|$", re.MULTILINE)
COMMANDS = re.compile(r"^- \*\*Worth remembering\.\*\* (.+)\.$", re.MULTILINE)
COMMAND = re.compile(r"(`[^`]+`) (.+?)(?:; (?=`)|$)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Guide(NamedTuple):
    """What the instructor's page says of a notebook. guesses: (what, its name); commands: (code, what it does)."""

    sentence: str
    guesses: list[tuple[str, str]]
    commands: list[tuple[str, str]]


def read_guide(root: str | Path, lesson: Lesson) -> Guide:
    """Return what the instructor's page says of a notebook; raise LookupError if it lacks a part of that."""
    text = Path(root, GUIDE).read_text(encoding="utf-8")
    part = text.partition(f"\n## {lesson.title}\n")[2].partition("\n## ")[0]
    sentence, commands = SENTENCE.search(part), COMMANDS.search(part)
    guesses = [(what, name) for what, _, name in ROW.findall(part)]
    if not (sentence and commands and guesses):
        raise LookupError(f"{GUIDE} lacks a sentence, a guess or '**Worth remembering.**' under '{lesson.title}'.")
    return Guide(sentence.group(1), guesses, COMMAND.findall(commands.group(1)))


class Handouts(SphinxDirective):
    """A section for each numbered notebook, which is one page when it is printed."""

    def run(self) -> list[nodes.Node]:
        """Return the sections; end the build if a notebook or its part of the guide lacks something."""
        self.env.note_dependency(str(Path(self.env.srcdir, GUIDE)))
        paths = sorted(Path(self.env.srcdir, "notebook_output").glob("[0-9]*.ipynb"))
        try:
            return [self._sheet(path.name[:2]) for path in paths]
        except (ValueError, LookupError) as error:
            raise ExtensionError(f"{self.get_location()}: {error}") from error

    def _sheet(self, number: str) -> nodes.section:
        lesson = read_lesson(self.env.srcdir, number)
        self.env.note_dependency(str(Path(self.env.srcdir, lesson.path)))
        guide = read_guide(self.env.srcdir, lesson)
        units = [read_stored(self.env.srcdir, number, name).unit for _, name in guide.guesses]
        sheet = nodes.section(ids=[f"handout-{number}"], classes=["handout"])
        sheet += nodes.title("", lesson.title)
        sheet += self.parse_text_to_nodes("\n".join(_before(lesson, guide, units)))
        sheet += nodes.container(classes=["handout-notes"])
        sheet += nodes.container(
            "", *self.parse_text_to_nodes("\n".join(_after(lesson, guide))), classes=["handout-fold"]
        )
        return sheet


def _before(lesson: Lesson, guide: Guide, units: list[str]) -> list[str]:
    lines = ["**Afterwards you can**", "", *map(_item, lesson.able)]
    lines += ["", "**Guess first, in your own hand**", "", "| what | your guess | measured | in |", "|---|---|---|---|"]
    lines += [f"| {what} | | | {unit} |" for (what, _), unit in zip(guide.guesses, units, strict=True)]
    return [*lines, "", "**Notes**"]


def _after(lesson: Lesson, guide: Guide) -> list[str]:
    lines = ["*Fold the sheet back at this line, and open it when the notebook is over.*", "", f"> {guide.sentence}"]
    lines += ["", "**Key points**", "", *map(_item, lesson.key_points)]
    lines += ["", "**Worth remembering**", "", "| code | what it does |", "|---|---|"]
    return lines + [f"| {code} | {meaning} |" for code, meaning in guide.commands]


def _item(line: str) -> str:
    return "- " + LINK.sub(r"\1", line)  # a link is of no use on paper


def setup(app: Sphinx) -> None:
    """Register the list of sheets, and how they are printed."""
    app.add_directive("handouts", Handouts)
    app.add_css_file("handouts.css")
