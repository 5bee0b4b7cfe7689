"""What this book needs beyond myst-nb: glossary links, minutes, launch links, and when each page was last run."""

from sphinx.application import Sphinx

from book import diagrams, download, glossary, handouts, lessons, outputs, outside, reference, strip, verified


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the parts with Sphinx."""
    app.add_config_value("book_repository", "", "env", types=str)
    app.add_config_value("book_branch", "main", "env", types=str)
    for part in (diagrams, download, glossary, handouts, lessons, outputs, outside, reference, strip, verified):
        part.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
