"""Stored outputs as a page needs them: without what only works where it was made, and as a screen reader wants them."""

import json

from sphinx.application import Sphinx

LIVE = "tensorboard-frame"  # an iframe onto a server that ran beside the notebook


def adapt_outputs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Drop from a notebook's JSON, in place, each output that shows another server's page; head no empty column."""
    if not docname.startswith("notebook_output/"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if "outputs" in cell:
            outputs = [json.dumps(output).replace("<th></th>", "<td></td>") for output in cell["outputs"]]
            cell["outputs"] = [json.loads(output) for output in outputs if LIVE not in output]
    source[0] = json.dumps(notebook)


def setup(app: Sphinx) -> None:
    """Have Sphinx call this for each source that it reads."""
    app.connect("source-read", adapt_outputs)
