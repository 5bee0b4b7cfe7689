"""Copies of the rendered notebooks for nbval, in .nbval: with the checks of stubs, or with every cell twice.

After each stub there is one more cell: the exercise's check, which has to fail there, and to name what is still None.
One execution by nbval then proves both: stubs get a hint, and solutions pass. The copies lie as deep as the originals,
since notebooks open files beside them.
"""

import re
import shutil
import textwrap

import nbformat
from lessons import DEEP_DIVES, RENDERED, ROOT, SOURCES, name_of, read, rendered_twin, tags, without_bars

COPIES = ROOT / ".nbval"
FAILED_AS_IT_SHOULD = "the stub gets a hint"


def with_stub_checks(notebook):
    """Return the notebook with a cell between each stub and its solution, which expects NotYet of the check."""
    cells = []
    for position, cell in enumerate(notebook.cells):
        if "solution" in tags(cell):
            cells.append(expecting_not_yet(notebook.cells[position - 1], notebook.cells[position + 1]))
        cells.append(cell)
    notebook.cells = cells
    return notebook


def expecting_not_yet(stub, check):
    shown, said = f"hint if 'cannot read this answer' in str(hint) else {FAILED_AS_IT_SHOULD!r}", FAILED_AS_IT_SHOULD
    if none := re.search(r"^(\w+) = None", stub.source, re.MULTILINE):
        shown, said = "hint", f"{none[1]} is still None."
    source = "import workshop_utils.exercises\ntry:\n" + textwrap.indent(check.source, "    ")
    source += "\nexcept workshop_utils.exercises.NotYet as hint:\n"
    source += f"    print({shown})"
    expected = nbformat.v4.new_output("stream", name="stdout", text=f"{said}\n")
    return nbformat.v4.new_code_cell(source, id=f"{check.id[:58]}-stub", execution_count=0, outputs=[expected])


def with_every_cell_twice(notebook):
    """Return the notebook with each code cell twice in place, but the last, which shuts the cluster down."""
    cells = []
    for position, cell in enumerate(notebook.cells):
        cells.append(cell)
        if cell.cell_type == "code" and position < len(notebook.cells) - 1:
            cells.append(nbformat.from_dict({**cell, "id": f"{cell.id[:58]}-again"}))
    notebook.cells = cells
    return notebook


def copy_all(changed=with_stub_checks):
    """Make the copies anew, each changed by this function; return {name of a notebook: path of its copy}.

    A lesson's name is its number, a deep dive's that of its file."""
    shutil.rmtree(COPIES, ignore_errors=True)
    (COPIES / "deep-dives").mkdir(parents=True)
    copies = {}
    for source in (*SOURCES, *DEEP_DIVES):
        copy = copies[name_of(source)] = COPIES / rendered_twin(source).relative_to(RENDERED)
        nbformat.write(changed(without_bars(read(rendered_twin(source)))), copy)
    return copies
