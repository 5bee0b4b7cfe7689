"""Notebooks run on one core each, and a difference there is told."""

import os
import subprocess
import sys

import nbformat
import pytest
from compare import each_on_one_core
from lessons import ROOT


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="keeps a process on a core, as only Linux can")
def test_a_notebook_has_one_core_and_a_difference_is_told(tmp_path, capsys):
    cores, copies = os.sched_getaffinity(0), [tmp_path / "right.ipynb", tmp_path / "wrong.ipynb"]
    for copy, text in zip(copies, ("1 core\n", "4 cores\n"), strict=True):
        output = nbformat.v4.new_output("stream", name="stdout", text=text)
        source = "import os\nprint(len(os.sched_getaffinity(0)), 'core')"
        cell = nbformat.v4.new_code_cell(source, execution_count=1, outputs=[output])
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), copy)
    assert not each_on_one_core(copies, cores)
    said = capsys.readouterr().out
    assert "right, on one core: passed" in said and "wrong, on one core: differs" in said and "4 cores" in said
    assert os.sched_getaffinity(0) == cores


def test_a_notebook_that_is_not_there_is_named():
    command = [sys.executable, ROOT / "tests/notebooks/compare.py", "99"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode and "99" in done.stderr and "01" in done.stderr
