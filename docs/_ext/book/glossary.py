"""On each notebook's page, the first use of a term of docs/glossary.md is a link to it, with its meaning as tooltip."""

import re
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

PAGE = "docs/glossary"
TERM = re.compile(r"^### (?P<term>.+)\n\n(?P<meaning>.+)", re.MULTILINE)
# How a term is found where it is not the term itself, with or without an "s".
FORMS = {
    "sketches": "sketch(?:es)?",
    "photos": "photos?",
    "logits": "logits?",
    "DDP": "DDP|DistributedDataParallel",
    "bf16": "bf16|bfloat16",
    "batch normalisation": "BatchNorm",
}
# These are ordinary words, too, or have a second meaning: they are linked where a notebook introduces them in bold.
ONLY_IN_BOLD = {"backend", "bucket", "chunk", "client", "head", "step", "task", "transform", "worker"}
NOT_IN = (nodes.title, nodes.reference, nodes.literal, nodes.literal_block, nodes.raw, nodes.caption, nodes.comment)


@cache
def read_terms(root: Path) -> dict[str, str]:
    """Return the terms of the glossary and the first paragraph of each, as plain text."""
    text = (root / f"{PAGE}.md").read_text(encoding="utf-8")
    return {found["term"]: _plain(found["meaning"]) for found in TERM.finditer(text)}


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
        for text in doctree.findall(nodes.Text):
            found = pattern.search(text)
            if found and _may_be_linked(text, found.group(), term):
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


def note_glossary(app: Sphinx, doctree: nodes.document) -> None:
    """Have a notebook's page built again when the glossary has changed."""
    if app.env.docname.startswith("notebook_output/"):
        app.env.note_dependency(f"{PAGE}.md")


def setup(app: Sphinx) -> None:
    """Have Sphinx call these."""
    read_terms.cache_clear()
    app.connect("doctree-read", note_glossary)
    app.connect("doctree-resolved", link_terms)


def _may_be_linked(text: nodes.Text, words: str, term: str) -> bool:
    introduced = isinstance(text.parent, nodes.strong) and text == words
    node = text.parent
    while node is not None and not isinstance(node, NOT_IN):
        node = node.parent
    return node is None and (introduced or term not in ONLY_IN_BOLD)


def _plain(markdown: str) -> str:
    return re.sub(r"[*`]|\]\([^)]*\)|\[", "", markdown)
