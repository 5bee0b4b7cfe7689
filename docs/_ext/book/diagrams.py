"""On a phone a diagram's narrow version takes its place, from the folder `phone`."""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

PHONE = "phone"  # a folder beside the drawings, with drawings of the same names that fit a phone


def add_narrow_diagrams(app: Sphinx, doctree: nodes.document) -> None:
    """Put the narrow version behind each drawing, for book.css to choose."""
    for image in list(doctree.findall(nodes.image)):
        drawing = Path(image["uri"])
        if drawing.suffix != ".svg" or "sd-card-img-top" in image["classes"]:
            continue
        narrow = image.deepcopy()
        narrow["uri"] = str(drawing.parent / PHONE / drawing.name)
        image["classes"].append("wide")
        narrow["classes"].append("narrow")
        image.parent.insert(image.parent.index(image) + 1, narrow)


def setup(app: Sphinx) -> None:
    """Have Sphinx call this for each page that it has read, before it collects the images."""
    app.connect("doctree-read", add_narrow_diagrams, priority=100)
