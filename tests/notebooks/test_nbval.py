"""nbval, as `make test` calls it, notices one changed character in a stored output."""

import re
import subprocess
import sys

import nbformat
import pytest
from lessons import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
OPTIONS = re.search(r"^NBVAL := (.*)$", MAKEFILE, flags=re.MULTILINE).group(1).split()


@pytest.fixture
def twin():
    """A notebook of one cell, and its output as a run would store it."""
    output = nbformat.v4.new_output("stream", name="stdout", text="4 breeds of sketches in 17.3 s, 7 images/s\n")
    cell = nbformat.v4.new_code_cell(f"print({output.text[:-1]!r})", execution_count=1, outputs=[output])
    return nbformat.v4.new_notebook(cells=[cell])


def nbval(notebook, folder):
    copy = folder / "notebook_output" / "one.ipynb"
    copy.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, copy)
    options = [str(ROOT / option) if option.endswith(".cfg") else option for option in OPTIONS]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(copy)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def test_an_unchanged_output_passes(twin, tmp_path):
    result = nbval(twin, tmp_path)
    assert result.returncode == 0, result.stdout


def test_one_changed_character_fails(twin, tmp_path):
    output = twin.cells[0].outputs[0]
    output.text = output.text.replace("sketches", "sketchez")
    result = nbval(twin, tmp_path)
    assert result.returncode == 1 and "1 failed" in result.stdout, result.stdout


def test_measured_seconds_may_change_but_not_the_words_around_them(twin, tmp_path):
    output = twin.cells[0].outputs[0]
    output.text = "4 breeds of sketches in 4,012.9 s, 1,234 images/s\n"
    assert nbval(twin, tmp_path).returncode == 0
    output.text = output.text.replace("breeds", "photos")
    assert nbval(twin, tmp_path).returncode == 1


def test_other_numbers_may_not_change(twin, tmp_path):
    twin.cells[0].outputs[0].text = "5 breeds of sketches in 17.3 s, 7 images/s\n"
    assert nbval(twin, tmp_path).returncode == 1
