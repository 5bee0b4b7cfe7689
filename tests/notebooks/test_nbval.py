"""nbval, as `make test` calls it, notices one changed character in a stored output."""

import re
import subprocess
import sys

import nbformat
import pytest
from lessons import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
OPTIONS = re.search(r"^NBVAL := (.*)$", MAKEFILE, flags=re.MULTILINE).group(1).split()
PRINTED = "4 breeds of sketches in 17.3 s, 7 images/s\n"
STORED = {
    "as printed": PRINTED,
    "one letter": PRINTED.replace("sketches", "sketchez"),
    "other seconds": "4 breeds of sketches in 4,012.9 s, 1,234 images/s\n",
    "other seconds and words": "4 photos of sketches in 4,012.9 s, 1,234 images/s\n",
    "another number": "5 breeds of sketches in 17.3 s, 7 images/s\n",
}


def run_nbval(folder, *notebooks, before=(), timeout=200):
    """Return {name of a notebook: what became of its cells} and all that nbval printed.

    before: what the command begins with. timeout: seconds.
    """
    options = [str(ROOT / option) if option.endswith(".cfg") else option for option in OPTIONS]
    command = [*before, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", folder, "-rA"]
    command += [*options, *notebooks]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S*?([^/]*)\.ipynb::", result.stdout, flags=re.MULTILINE)
    return {name: {one for one, whose in found if whose == name} for _, name in found}, result.stdout


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What nbval says of notebooks whose one cell prints PRINTED, and which store something else."""
    folder = tmp_path_factory.mktemp("nbval") / "notebook_output"
    folder.mkdir()
    for name, text in STORED.items():
        output = nbformat.v4.new_output("stream", name="stdout", text=text)
        cell = nbformat.v4.new_code_cell(f"print({PRINTED[:-1]!r})", execution_count=1, outputs=[output])
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / f"{name.replace(' ', '-')}.ipynb")
    found, said = run_nbval(folder.parent, *sorted(folder.iterdir()))
    assert len(found) == len(STORED), said
    return found


def test_an_unchanged_output_passes(outcomes):
    assert outcomes["as-printed"] == {"PASSED"}


def test_one_changed_character_fails(outcomes):
    assert outcomes["one-letter"] == {"FAILED"}


def test_measured_seconds_may_change_but_not_the_words_around_them(outcomes):
    assert outcomes["other-seconds"] == {"PASSED"}
    assert outcomes["other-seconds-and-words"] == {"FAILED"}


def test_other_numbers_may_not_change(outcomes):
    assert outcomes["another-number"] == {"FAILED"}
