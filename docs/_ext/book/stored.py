"""What came out of a guess: the numbers that `reconcile` printed in a notebook's stored run, for pages about it.

{stored}`06 my_guess_ms` is "552 → 728 ms": the simple estimate, and the measurement, of that guess in notebook 06.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxRole

PRINTED = re.compile(r"^simple estimate +(?P<estimate>\S+) (?P<unit>.+)\nmeasured +(?P<measured>\S+) (?P=unit)", re.M)


class Stored(NamedTuple):
    """What `reconcile` printed, as it printed it. path: the rendered notebook."""

    path: Path
    estimate: str
    measured: str
    unit: str


def read_stored(root: str | Path, number: str, guess: str) -> Stored:
    """Return what came out of the guess with the name `guess`, such as "my_guess_ms", in notebook `number`.

    Raises LookupError if there is no such notebook, no cell that passes that name to `reconcile`, or no such output.
    """
    found = sorted(Path(root, "notebook_output").glob(f"{number}-*.ipynb"))
    if not found:
        raise LookupError(f"There is no notebook {number!r} in notebook_output/.")
    for cell in json.loads(found[0].read_text(encoding="utf-8"))["cells"]:
        if f"reconcile({guess}," not in "".join(cell["source"]):
            continue
        printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        if part := PRINTED.search(printed):
            return Stored(found[0], part["estimate"], part["measured"], part["unit"])
    raise LookupError(
        f"No cell of {found[0].name} has printed an estimate and a measurement for {guess}. "
        f"Correct the name, or render the notebook: python tools/render.py {number}"
    )


class StoredRole(SphinxRole):
    """The simple estimate and the measurement of a guess, with their unit."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the text's node; end the build if nothing of the kind was stored."""
        try:
            number, guess = self.text.split()
            stored = read_stored(self.env.srcdir, number, guess)
        except (ValueError, LookupError) as error:
            raise ExtensionError(f"{self.get_location()}: {{stored}}`{self.text}`: {error}") from error
        self.env.note_dependency(str(stored.path))
        return [nodes.Text(f"{stored.estimate} → {stored.measured} {stored.unit}")], []


def setup(app: Sphinx) -> None:
    """Register the role."""
    app.add_role("stored", StoredRole())
