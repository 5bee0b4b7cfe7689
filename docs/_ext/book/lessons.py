"""What the notebooks say of themselves, for pages about them: title, minutes in class, what one can do, key points.

    ```{lessons} 01 03 04
    ```
lists these notebooks, and {minutes}`01 03 04` is their minutes in class, added up.

    ```{cards}
    ```
shows a card for each notebook: two dogs, its minutes in class, and what the README says of it.
"""

import base64
import io
import json
import re
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

from workshop_utils.photos import BREEDS, draw_dog

TITLE = re.compile(r"^# (.+)", re.MULTILINE)
MINUTES = re.compile(r"\*\*Time:\*\* (\d+) minutes in class")
ABLE = re.compile(r"\*\*After this notebook you can\*\*\n\n((?:- .+\n)+)")
KEY_POINTS = re.compile(r"^## Key points\n\n(?:\*.+\*\n\n)?((?:- .+\n)+)", re.MULTILINE)

ROW = re.compile(r"^\| (\d\d) \| \[(.+?)\]\(notebook_output/(\S+)\.ipynb\) \| \d+ \| (.+) \|$", re.MULTILINE)
SIDE = 224  # pixels a side of each dog on a card


class Lesson(NamedTuple):
    """One notebook. path: its rendered file, relative to the project."""

    path: str
    title: str
    minutes: int
    able: list[str]
    key_points: list[str]


def read_lesson(root: str | Path, number: str) -> Lesson:
    """Return what notebook `number`, such as "04", says in its first cell, and under "Key points".

    Raises ValueError if there is no such notebook, or if it says nothing of the kind.
    """
    found = sorted(Path(root, "notebook_output").glob(f"{number}-*.ipynb"))
    if not found:
        raise ValueError(f"There is no notebook {number!r} in notebook_output/.")
    cells = json.loads(found[0].read_text(encoding="utf-8"))["cells"]
    first, *rest = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "markdown"]
    parts = [*(pattern.search(first) for pattern in (TITLE, MINUTES, ABLE)), KEY_POINTS.search("\n".join(rest))]
    if not all(parts):
        raise ValueError(
            f"{found[0].name} lacks a title, 'you can', '**Time:** … minutes in class' or '## Key points'."
        )
    title, minutes, able, points = (part.group(1) for part in parts if part)
    path = found[0].relative_to(root).as_posix()
    lists = ([line[2:] for line in lines.splitlines()] for lines in (able, points))
    return Lesson(path, title, int(minutes), *lists)


def in_words(minutes: int) -> str:
    """Return minutes as a reader says them.

    >>> [in_words(minutes) for minutes in (45, 60, 150, 61)]
    ['45 minutes', '1 hour', '2 hours and 30 minutes', '1 hour and 1 minute']
    """
    hours, rest = divmod(minutes, 60)
    parts = [f"{n} {unit}{'s' if n > 1 else ''}" for n, unit in ((hours, "hour"), (rest, "minute")) if n]
    return " and ".join(parts)


class Lessons(SphinxDirective):
    """A list of notebooks, with the minutes of each and what one can do afterwards."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the list's nodes."""
        up, lines = "../" * self.env.docname.count("/"), []
        for lesson in (read_lesson(self.env.srcdir, number) for number in self.arguments[0].split()):
            lines.append(f"- **[{lesson.title}]({up}{lesson.path})**, {in_words(lesson.minutes)}. Afterwards you can")
            lines += [f"  - {line}" for line in lesson.able]
        return self.parse_text_to_nodes("\n".join(lines))


class Minutes(SphinxRole):
    """The minutes in class of several notebooks, added up, in words."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the text's node."""
        total = sum(read_lesson(self.env.srcdir, number).minutes for number in self.text.split())
        return [nodes.Text(in_words(total))], []


class Cards(SphinxDirective):
    """A card for each notebook that the README's table has."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes of a grid."""
        readme = Path(self.env.srcdir, "README.md")
        self.env.note_dependency(str(readme))
        lines = ["::::{grid} 1 2 3 3", ":gutter: 3", ":class-container: lessons", ""]
        for number, title, name, able in ROW.findall(readme.read_text(encoding="utf-8")):
            lines += [
                f":::{{grid-item-card}} {number} · {title}",
                f":link: ../notebook_output/{name}",
                ":link-type: doc",
            ]
            address, alt = picture(number)
            lines += [f":img-top: {address}", f":img-alt: {alt}"]
            lines += [f"*{in_words(read_lesson(self.env.srcdir, number).minutes)}*: {able}", ":::"]
        return self.parse_text_to_nodes("\n".join([*lines, "::::"]))


def picture(number: str) -> tuple[str, str]:
    """Return two drawn dogs, of a breed that only this card has, side by side: an address `data:`, and their name."""
    breed, image = BREEDS[10 * int(number) - 1], Image.new("RGB", (2 * SIDE, SIDE))
    for seed in (0, 1):
        image.paste(draw_dog(breed, seed, SIDE), (seed * SIDE, 0))
    target = io.BytesIO()
    image.save(target, "jpeg", quality=85)
    written = base64.b64encode(target.getvalue()).decode()
    return f"data:image/jpeg;base64,{written}", f"Two drawn dogs: {breed.name.replace('_', ' ')}"


def note_notebooks(app: Sphinx, env: object, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Return the pages to read again because notebooks have changed: those that use these directives."""
    notebooks = {name for name in added | changed | removed if name.startswith("notebook_output/")}
    users = {name for name in app.env.found_docs if name.startswith("docs/") and "/" not in name.removeprefix("docs/")}
    return sorted(users - removed) if notebooks else []


def setup(app: Sphinx) -> None:
    """Register the directives and the role."""
    app.add_directive("lessons", Lessons)
    app.add_directive("cards", Cards)
    app.add_role("minutes", Minutes())
    app.connect("env-get-outdated", note_notebooks)
