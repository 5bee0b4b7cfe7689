"""A lesson begins with a box: what it is good for, what it needs, what there is to do. It ends with one sentence.

All of it is said elsewhere already: in the notebook's first cell, by the tags of its cells, on the instructor's page.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

PAGE = "docs/instructor/notebooks.md"
ABLE = "After this notebook you can"
MINUTES = re.compile(r"\d+ minutes?")


def sentence_of(root: str | Path, title: str) -> str:
    """Return the sentence to remember of the notebook with this title; "" where the instructor's page has none."""
    text = Path(root, PAGE).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n\n> (.+)", text, re.MULTILINE)
    return found[1] if found else ""


def add_strip(app: Sphinx, doctree: nodes.document) -> None:
    """Put what the first cell says of its lesson into a box, and the sentence to remember above the key points."""
    if not app.env.docname.startswith("notebook_output/"):
        return
    heads = [node for node in doctree.findall(nodes.paragraph) if node.astext() == ABLE]
    points = [node for node in doctree.findall(nodes.section) if node[0].astext() == "Key points"]
    if not heads or not points:  # the quiz is no lesson
        return
    head, end = heads[0], points[0]
    parent, position = head.parent, head.parent.index(head)
    rest = parent.children[position + 1 : position + 3]  # what one can do; what is necessary, and the time
    box = nodes.admonition("", nodes.title("", ABLE), *rest, _to_do(doctree, end), classes=["lesson"])
    for node in (head, *rest):
        parent.remove(node)
    parent.insert(position, box)
    app.env.note_dependency(PAGE)
    if sentence := sentence_of(app.srcdir, next(doctree.findall(nodes.title)).astext()):
        parts = re.split(r"`([^`]+)`", sentence)  # every second one is code
        inline = [nodes.literal("", part) if n % 2 else nodes.Text(part) for n, part in enumerate(parts)]
        place = 2 if MINUTES.fullmatch(end[1].astext()) else 1
        end.insert(place, nodes.block_quote("", nodes.paragraph("", "", *inline), classes=["epigraph"]))


def setup(app: Sphinx) -> None:
    """Have Sphinx call this for each page that it reads."""
    app.connect("doctree-read", add_strip)


def _to_do(doctree: nodes.document, end: nodes.section) -> nodes.paragraph:
    cells = [node["classes"] for node in doctree.findall(nodes.container)]
    guesses, exercises = (sum(f"tag_{tag}" in classes for classes in cells) for tag in ("guess", "exercise"))
    words = f"{_counted(guesses, 'guess', 'guesses')} and {_counted(exercises, 'exercise', 'exercises')}. "
    link = nodes.reference("", "To the key points", internal=True, refid=end["ids"][0])
    return nodes.paragraph("", "", nodes.strong("", "To do:"), nodes.Text(f" {words}"), link, nodes.Text("."))


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
