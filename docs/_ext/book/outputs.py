"""Stored notebooks as a page needs them: imports and charts folded, pictures with alt text, no dead output."""

import ast
import json
import re
from typing import Any

from sphinx.application import Sphinx

LIVE = "tensorboard-frame"  # an iframe onto a server that ran beside the notebook
ALIGNED = re.compile(r"\S {3,}\S")  # columns, which a narrow window must not wrap
LONG = 8  # lines: what is shorter stays open
IMPORTS, CHART = "Show imports and set-up", "Show the code of the chart"
PLAIN = "Show the code"  # of a cell that a notebook folds itself, but for a solution


def adapt_notebook(app: Sphinx, docname: str, source: list[str]) -> None:
    """Change a notebook's JSON, in place: fold what is no lesson, drop other servers' pages, head no empty column.

    A cell that prints sentences alone gets the tag `prose`, and its output is wrapped on a phone.
    """
    if not docname.startswith("notebook_output/"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if "outputs" in cell:
            outputs = [json.dumps(output).replace("<th></th>", "<td></td>") for output in cell["outputs"]]
            cell["outputs"] = [json.loads(output) for output in outputs if LIVE not in output]
            fold(cell)
            if "".join(cell["source"]).startswith("ask("):  # a part of the quiz
                cell["metadata"]["tags"].append("remove-input")
            describe_picture(cell)
            if not ALIGNED.search("".join("".join(output.get("text", "")) for output in cell["outputs"])):
                cell["metadata"]["tags"].append("prose")
    source[0] = json.dumps(notebook)


def fold(cell: dict[str, Any]) -> None:
    """Have myst-nb fold a long cell that is mostly imports, or mostly a chart of plotnine, but for one to fill in.

    A cell that the notebook folds itself is a solution only if its tags say so.
    """
    tags, prompt = cell["metadata"].setdefault("tags", []), folded("".join(cell["source"]))
    if "hide-input" in tags:
        prompt = "" if "solution" in tags else PLAIN
    if prompt and not {"exercise", "guess"} & set(tags):
        tags += [] if "hide-input" in tags else ["hide-input"]
        cell["metadata"]["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": prompt.replace("Show", "Hide")}


def describe_picture(cell: dict[str, Any]) -> None:
    """Give myst-nb the alt text of a cell's picture, which it would take from the cell's metadata alone.

    A picture with a width is a chart, whose PNG has two pixels for each of the page (see plots.py). book.css gives it
    that width, as Sphinx would make a link of a picture that has one.
    """
    for output in cell["outputs"]:
        picture = output.get("metadata", {}).get("image/png", {})
        if "alt" in picture:
            image = {"alt": picture["alt"], "classes": "chart" if picture.pop("width", None) else "gallery"}
            cell["metadata"].setdefault("mystnb", {})["image"] = image


def folded(source: str) -> str:
    """Return what the fold of a code cell says, or "" for a cell that stays open.

    >>> folded("import os\\n" * 8), folded("import os\\n" * 7), folded("import os\\n" + "n = 1\\n" * 9)
    ('Show imports and set-up', '', '')
    """
    lines = source.splitlines()
    if len(lines) < LONG or source.startswith("%"):
        return ""
    statements = ast.parse(source).body
    imports = [each for each in statements if isinstance(each, ast.Import | ast.ImportFrom)]
    if 2 * sum(each.end_lineno - each.lineno + 1 for each in imports) >= len(lines):
        return IMPORTS
    return CHART if 3 * sum("p9." in line for line in lines) >= len(lines) else ""


def setup(app: Sphinx) -> None:
    """Have Sphinx call this for each source that it reads."""
    app.connect("source-read", adapt_notebook)
