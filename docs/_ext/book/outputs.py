"""Stored outputs that only work where they were made are left out of the book's pages."""

import json

from sphinx.application import Sphinx

LIVE = "tensorboard-frame"  # an iframe onto a server that ran beside the notebook


def leave_out_live_outputs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Drop from a notebook's JSON, in place, each output that shows another server's page."""
    if not docname.startswith("notebook_output/"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if LIVE not in json.dumps(output)]
    source[0] = json.dumps(notebook)


def setup(app: Sphinx) -> None:
    """Have Sphinx call this for each source that it reads."""
    app.connect("source-read", leave_out_live_outputs)
