"""Copy the rendered notebooks to .nbval, with one more cell per exercise: its check, run on the stub, has to fail.

One execution by nbval then proves both: stubs get a hint, and solutions pass. The copies lie as deep as the originals,
since notebooks open files beside them.
"""

import shutil
import textwrap

import nbformat
from lessons import NUMBERED, RENDERED, ROOT, read, tags, without_bars

COPIES = ROOT / ".nbval"
FAILED_AS_IT_SHOULD = "the stub gets a hint\n"


def with_stub_checks(notebook):
    """Return the notebook with a cell between each stub and its solution, which expects NotYet of the check."""
    cells = []
    for position, cell in enumerate(notebook.cells):
        if "solution" in tags(cell):
            cells.append(expecting_not_yet(notebook.cells[position + 1]))
        cells.append(cell)
    notebook.cells = cells
    return notebook


def expecting_not_yet(check):
    source = "import workshop_utils.exercises\ntry:\n" + textwrap.indent(check.source, "    ")
    source += "\nexcept workshop_utils.exercises.NotYet as hint:\n"
    source += f"    print(hint if 'cannot read this answer' in str(hint) else {FAILED_AS_IT_SHOULD[:-1]!r})"
    expected = nbformat.v4.new_output("stream", name="stdout", text=FAILED_AS_IT_SHOULD)
    return nbformat.v4.new_code_cell(source, id=f"{check.id[:58]}-stub", execution_count=0, outputs=[expected])


def copy_all():
    """Make the copies anew; return their paths in order."""
    shutil.rmtree(COPIES, ignore_errors=True)
    COPIES.mkdir()
    for path in sorted(RENDERED.glob(NUMBERED)):
        nbformat.write(with_stub_checks(without_bars(read(path))), COPIES / path.name)
    return sorted(COPIES.iterdir())


if __name__ == "__main__":
    copy_all()
