"""All notebooks as one file beside the pages: notebooks.zip, without outputs, with the pictures that they show."""

import zipfile
from pathlib import Path

from sphinx.application import Sphinx


def write_zip(app: Sphinx, error: Exception | None) -> None:
    """Write the file, once the pages are built."""
    if error or app.builder.format != "html":
        return
    with zipfile.ZipFile(Path(app.outdir, "notebooks.zip"), "w", zipfile.ZIP_DEFLATED) as bundle:
        for pattern in ("notebooks/*.ipynb", "img/*.png", "img/*.svg"):
            for path in sorted(Path(app.srcdir).glob(pattern)):
                bundle.write(path, path.relative_to(app.srcdir))


def setup(app: Sphinx) -> None:
    """Have Sphinx call this at the end."""
    app.connect("build-finished", write_zip)
