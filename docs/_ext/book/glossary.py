"""Notebooks and docs/glossary.md lead to each other: a term's first use to its entry, an entry to where it is taught.

Where it is taught is in the book's index, so the search finds it at once.
"""

import re
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

PAGE = "docs/glossary"
ENTRY = re.compile(
    r"^### (?P<term>.+)\n\n(?P<meaning>.+?)(?: \(\[[^\]]+\]\(\.\./(?P<path>[^)#]+)\.ipynb#(?P<slug>[^)]+)\)\))?$",
    re.MULTILINE,
)
# How a term is found where it is not the term itself, with or without an "s".
FORMS = {
    "logits": "logits?",
    "DDP": "DDP|DistributedDataParallel",
    "bf16": "bf16|bfloat16",
    "loader process": "loader process(?:es)?",
    "meta device": "meta(?: device)?",
    "normalize": "normaliz(?:e|es|ed|ing)",
    "padding": "padding|pads",
    "pure function": "pure(?: functions?)?",
}
# These are ordinary words, too, or have a second meaning: they are linked where a notebook introduces them in bold.
ONLY_IN_BOLD = {
    "backend",
    "broadcast",
    "bucket",
    "client",
    "Dataset",
    "head",
    "leak",
    "meta device",
    "pure function",
    "step",
    "task",
    "temperature",
    "transform",
    "unit",
    "worker",
}
NOT_IN = (nodes.title, nodes.reference, nodes.literal, nodes.literal_block, nodes.raw, nodes.caption, nodes.comment)


@cache
def read_terms(root: Path) -> dict[str, str]:
    """Return the terms of the glossary and the meaning of each, as plain text."""
    text = (root / f"{PAGE}.md").read_text(encoding="utf-8")
    return {found["term"]: _plain(found["meaning"]) for found in ENTRY.finditer(text)}


@cache
def read_homes(root: Path) -> dict[str, tuple[str, str]]:
    """Return where terms are taught: the notebook's page, and the anchor of the section."""
    text = (root / f"{PAGE}.md").read_text(encoding="utf-8")
    return {found["term"]: (found["path"], found["slug"]) for found in ENTRY.finditer(text) if found["path"]}


def slug(term: str) -> str:
    """Return a heading's anchor as GitHub, JupyterLab and this book have it.

    >>> slug("world size"), slug("top-1")
    ('world-size', 'top-1')
    """
    return re.sub(r"[^\w -]", "", term.lower()).replace(" ", "-")


def link_terms(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Link the first use of each term on a notebook's page."""
    if not docname.startswith("notebook_output/"):
        return
    terms = read_terms(Path(app.srcdir))
    page = app.builder.get_relative_uri(docname, PAGE)
    for term in sorted(terms, key=len, reverse=True):  # "task graph" before "task"
        pattern = re.compile(
            rf"(?<![\w/-])(?:{FORMS.get(term, re.escape(term) + 's?')})(?![\w/-])",
            0 if term.isupper() else re.IGNORECASE,
        )
        home = _home(app, doctree, docname, term)
        for text in doctree.findall(nodes.Text):
            found = pattern.search(text)
            if found and _may_be_linked(text, found.group(), term, home):
                link = nodes.reference(
                    "",
                    found.group(),
                    internal=True,
                    refuri=f"{page}#{slug(term)}",
                    reftitle=terms[term],
                    classes=["term"],
                )
                before, after = nodes.Text(text[: found.start()]), nodes.Text(text[found.end() :])
                text.parent.replace(text, [before, link, after])
                break


def index_terms(app: Sphinx, doctree: nodes.document) -> None:
    """Put each section that teaches a term of the glossary into the index."""
    docname = app.env.docname
    if docname.startswith("notebook_output/"):
        app.env.note_dependency(f"{PAGE}.md")  # so that the page is built again when the glossary has changed
    for term in read_homes(Path(app.srcdir)):
        if section := _home(app, doctree, docname, term):
            entry = ("single", term, section["ids"][0], "main", None)
            section.insert(1, addnodes.index(entries=[entry]))  # behind the heading


def setup(app: Sphinx) -> None:
    """Have Sphinx call these."""
    read_terms.cache_clear()
    read_homes.cache_clear()
    app.connect("doctree-read", index_terms)
    app.connect("doctree-resolved", link_terms)


def _section(doctree: nodes.document, anchor: str) -> nodes.section | None:
    return next((node for node in doctree.findall(nodes.section) if node.get("slug") == anchor), None)


def _home(app: Sphinx, doctree: nodes.document, docname: str, term: str) -> nodes.section | None:
    """Return the section of this page that teaches a term."""
    page, anchor = read_homes(Path(app.srcdir)).get(term, ("", ""))
    return _section(doctree, anchor) if page == docname else None


def _may_be_linked(text: nodes.Text, words: str, term: str, home: nodes.section | None) -> bool:
    introduced = isinstance(text.parent, nodes.strong) and text == words
    around, node = [], text.parent
    while node is not None:
        around.append(node)
        node = node.parent
    taught = any(node is home for node in around)
    barred = any(isinstance(node, NOT_IN) for node in around)
    return not barred and (introduced or taught or term not in ONLY_IN_BOLD)


def _plain(markdown: str) -> str:
    return re.sub(r"[*`]|\]\([^)]*\)|\[", "", markdown)
