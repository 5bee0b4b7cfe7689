"""When a page's notebook was last run, with what and on what: `tools/render.py` writes that into the notebook."""

import json
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def last_run(path: Path) -> dict[str, str]:
    """Return what `tools/render.py` noted in a rendered notebook: date, python, torch, dask, device.

    Raises ExtensionError, which ends the build, if it noted nothing.
    """
    metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    if "verified" not in metadata:
        number = path.stem.split("-")[0]
        raise ExtensionError(
            f"{path.name} does not say when it was last run. Render it: python tools/render.py {number}"
        )
    return metadata["verified"]


def in_words(run: dict[str, str]) -> str:
    """Return a run as a page says it."""
    return (
        f"This notebook was last run on {run['date']}, with Python {run['python']}, PyTorch {run['torch']} and "
        f"Dask {run['dask']}, on {run['device']}."
    )


def of_all(runs: list[dict[str, str]]) -> str:
    """Return what a page that is no notebook says: between when the notebooks were last run, and with what."""
    dates = sorted({run["date"] for run in runs})
    when = f"on {dates[0]}" if len(dates) == 1 else f"between {dates[0]} and {dates[-1]}"
    torch, dask = (", ".join(sorted({run[name] for run in runs})) for name in ("torch", "dask"))
    return f"All notebooks of this book were last run {when}, with PyTorch {torch} and Dask {dask}."


def add_to_page(app: Sphinx, pagename: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    """Give a page's template the sentence that stands in its footer."""
    path = Path(app.srcdir, f"{pagename}.ipynb")
    notebooks = sorted(Path(app.srcdir, "notebook_output").rglob("*.ipynb"))
    context["verified"] = in_words(last_run(path)) if path in notebooks else of_all(list(map(last_run, notebooks)))


def setup(app: Sphinx) -> None:
    """Have Sphinx call this for each page that it writes."""
    app.connect("html-page-context", add_to_page)
