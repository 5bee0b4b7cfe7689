"""The workshop works on a bare Debian 13 with its Python 3.13, for a user who is not root, and offline once set up."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from bare_debian import bare_debian

ROOT = Path(__file__).parents[2]
SUITE, PYTHON = "trixie", (3, 13)
NOTEBOOKS = "01"

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root on Linux can make a Debian"),
    pytest.mark.skipif(
        not (shutil.which("mmdebstrap") and shutil.which("ip")), reason="needs: apt install mmdebstrap iproute2"
    ),
]


@pytest.fixture(scope="module")
def debian():
    with bare_debian(SUITE, "make", "python3-venv") as machine:
        machine.copy(ROOT)
        yield machine
    assert not Path(machine.root).exists()


@pytest.fixture(scope="module")
def ready(debian):
    debian.run("make setup", online=True)
    return debian


@pytest.fixture(scope="module")
def ready_for_tests(ready):
    ready.run("make setup-test", online=True)
    return ready


def test_setup_needs_python_and_make_alone(ready):
    version = ready.run(".venv/bin/python --version; id --user")
    assert version.startswith("Python {}.{}.".format(*PYTHON)) and not version.endswith("\n0\n")
    assert "make: Nothing" in ready.run("make setup")


def test_the_command_finds_nothing_to_mend(ready):
    said = ready.run("TQDM_DISABLE=1 .venv/bin/workshop check")  # what takes long shows a bar
    assert "[OK]   Python: {}.{}.".format(*PYTHON) in said
    assert {line.split()[0] for line in said.splitlines()} == {"[OK]", "Starting"}


def test_what_proves_that_the_workshop_works_here_works_there(ready_for_tests):
    said = ready_for_tests.run(".venv/bin/pytest -q -m smoke", timeout_s=900)
    assert re.search(r"^\d{2,} passed", said, flags=re.MULTILINE), said


def test_a_notebook_prints_what_is_stored(ready_for_tests):
    said = ready_for_tests.run(f"make test-notebooks ONLY='{NOTEBOOKS}'")
    assert re.search(r"=+ \d{2,} passed(, \d+ warnings?)? in .* =+$", said, flags=re.MULTILINE), said
