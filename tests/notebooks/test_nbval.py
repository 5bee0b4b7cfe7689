"""nbval, as `make test` calls it, notices one changed character in a stored output."""

import re
import subprocess

import nbformat
import pytest
from compare import nbval

PRINTED = "4 breeds of sketches in 17.3 s, 7 images/s\n"
STORED = {  # what one cell has stored, and whether that is the same as what it prints
    PRINTED: True,
    PRINTED.replace("sketches", "sketchez"): False,
    "4 breeds of sketches in 4,012.9 s, 1,234 images/s\n": True,
    "4 photos of sketches in 4,012.9 s, 1,234 images/s\n": False,
    "5 breeds of sketches in 17.3 s, 7 images/s\n": False,
}
WARNED = {  # what dask-cuda and PyTorch say in some containers with a GPU, and something else
    "'Cannot get CPU affinity for device with index 0, setting default affinity'": True,
    "'The pynvml package is deprecated. Please install nvidia-ml-py instead.', FutureWarning": True,
    "'Port 8787 is busy'": False,
}


pytestmark = pytest.mark.weekly


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What nbval says of each cell of a notebook: all print PRINTED, and some store something else, or warn."""

    def cell(stored=PRINTED, warned=""):
        output = nbformat.v4.new_output("stream", name="stdout", text=stored)
        return nbformat.v4.new_code_cell(f"{warned}print({PRINTED[:-1]!r})", execution_count=1, outputs=[output])

    cells = [cell(stored) for stored in STORED]
    cells += [cell(warned=f"import warnings\nwarnings.warn({warning})\n") for warning in WARNED]
    path = tmp_path_factory.mktemp("nbval") / "cells.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    said = nbval("-rA", path, stdout=subprocess.PIPE).stdout
    found = re.findall(r"^(PASSED|FAILED) \S*::Cell (\d+)", said, flags=re.MULTILINE)
    assert len(found) == len(cells), said
    in_order = sorted((int(position), outcome == "PASSED") for outcome, position in found)
    return [passed for _, passed in in_order]


def test_measured_seconds_may_change_but_no_other_character(outcomes):
    assert outcomes[: len(STORED)] == list(STORED.values())


def test_what_a_container_says_about_nvml_fails_no_notebook_but_other_warnings_do(outcomes):
    assert outcomes[len(STORED) :] == list(WARNED.values())
