"""A diagram leads to itself at full size: on a phone it is too small to read."""

from docutils import nodes
from sphinx.application import Sphinx


def link_diagrams(app: Sphinx, doctree: nodes.document) -> None:
    """Mark each drawing as scaled, as Sphinx links those to their files."""
    for image in doctree.findall(nodes.image):
        if image["uri"].endswith(".svg"):
            image["scale"] = 100


def setup(app: Sphinx) -> None:
    """Have Sphinx call this for each page that it has read."""
    app.connect("doctree-read", link_diagrams)
