"""nbval, as `make test` calls it, notices one changed character in a stored output."""

import re
import subprocess
import sys

import nbformat
import pytest
from lessons import RENDERED, ROOT, code_cells, read

MAKEFILE = (ROOT / "Makefile").read_text()
OPTIONS = re.search(r"^NBVAL := (.*)$", MAKEFILE, flags=re.MULTILINE).group(1).split()


@pytest.fixture
def twin():
    """The rendered notebook 03, up to its first stored output."""
    notebook = read(RENDERED / "03-single-inference.ipynb")
    first = next(cell for cell in code_cells(notebook) if cell.outputs)
    notebook.cells = notebook.cells[: notebook.cells.index(first) + 1]
    return notebook


def nbval(notebook, folder):
    copy = folder / "notebook_output" / "03.ipynb"
    copy.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, copy)
    options = [str(ROOT / option) if option.endswith(".cfg") else option for option in OPTIONS]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(copy)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def test_an_unchanged_output_passes(twin, tmp_path):
    result = nbval(twin, tmp_path)
    assert result.returncode == 0, result.stdout


def test_one_changed_character_fails(twin, tmp_path):
    output = twin.cells[-1].outputs[0]
    assert "sketches" in output.text
    output.text = output.text.replace("sketches", "sketchez")
    result = nbval(twin, tmp_path)
    assert result.returncode == 1 and "1 failed" in result.stdout, result.stdout


def test_measured_seconds_may_change_but_not_the_words_around_them(twin, tmp_path):
    output = twin.cells[-1].outputs[0]
    twin.cells[-1].source = "print('a  task per image: 17.3 s, 7 images/s')"
    output.text = "a  task per image: 4,012.9 s, 1,234 images/s\n"
    assert nbval(twin, tmp_path).returncode == 0
    output.text = output.text.replace("per image:", "per photo:")
    assert nbval(twin, tmp_path).returncode == 1
