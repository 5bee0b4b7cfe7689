"""nbval, as `make test` calls it, notices one changed character in a stored output."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from compare import NBVAL, QUIET

PRINTED = "4 breeds of sketches in 17.3 s, 7 images/s\n"
STORED = {
    "as printed": PRINTED,
    "one letter": PRINTED.replace("sketches", "sketchez"),
    "other seconds": "4 breeds of sketches in 4,012.9 s, 1,234 images/s\n",
    "other seconds and words": "4 photos of sketches in 4,012.9 s, 1,234 images/s\n",
    "another number": "5 breeds of sketches in 17.3 s, 7 images/s\n",
}
WARNED = {  # what dask-cuda and PyTorch say in some containers with a GPU, and something else
    "hidden cores": "'Cannot get CPU affinity for device with index 0, setting default affinity'",
    "old name of nvml": "'The pynvml package is deprecated. Please install nvidia-ml-py instead.', FutureWarning",
    "other warning": "'Port 8787 is busy'",
}


def run_nbval(folder, *notebooks, timeout=200):
    """Return {name of a notebook: what became of its cells} and all that nbval printed.

    timeout: seconds.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", folder, "-rA", *NBVAL, *notebooks]
    env = os.environ | QUIET
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S*?([^/]*)\.ipynb::", result.stdout, flags=re.MULTILINE)
    return {name: {one for one, whose in found if whose == name} for _, name in found}, result.stdout


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What nbval says of notebooks whose one cell prints PRINTED, and which store something else or warn as well."""
    folder = tmp_path_factory.mktemp("nbval") / "notebook_output"
    folder.mkdir()
    for name in [*STORED, *WARNED]:
        output = nbformat.v4.new_output("stream", name="stdout", text=STORED.get(name, PRINTED))
        warned = f"import warnings\nwarnings.warn({WARNED[name]})\n" if name in WARNED else ""
        cell = nbformat.v4.new_code_cell(f"{warned}print({PRINTED[:-1]!r})", execution_count=1, outputs=[output])
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / f"{name.replace(' ', '-')}.ipynb")
    found, said = run_nbval(folder.parent, *sorted(folder.iterdir()))
    assert len(found) == len(STORED) + len(WARNED), said
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


def test_what_a_container_says_about_nvml_fails_no_notebook_but_other_warnings_do(outcomes):
    assert outcomes["hidden-cores"] == outcomes["old-name-of-nvml"] == {"PASSED"}
    assert outcomes["other-warning"] == {"FAILED"}
