"""The notebooks run on one core each, on all cores, or on the GPU, and a difference on any of them is told."""

import os
import subprocess
import sys

import nbformat
import pytest
import torch
from compare import cluster, each_on_one_core, plan
from dask.system import CPU_COUNT
from lessons import ROOT

NAMES = ["01", "06", "07", "09"]


def test_on_several_cores_all_run_alone_with_the_longest_first_and_the_named_ones_also_on_all_cores():
    assert plan(NAMES, ["07"], True, {0, 1}) == (["07"], ["06", "09", "01", "07"])


def test_on_one_core_each_runs_once():
    assert plan(NAMES, ["07"], True, {0}) == ([], ["06", "09", "01", "07"])


def test_with_a_gpu_or_without_a_way_to_stay_on_a_core_all_run_on_the_cluster():
    assert plan(NAMES, ["07"], True, set()) == (NAMES, [])


def test_without_more_said_the_named_ones_run_on_the_cluster_or_all_of_them():
    assert plan(NAMES, ["07"], False, {0, 1}) == (["07"], [])
    assert plan(NAMES, [], False, {0, 1}) == (NAMES, [])


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
    assert done.returncode and "There is no notebook 99: choose among 01, " in done.stderr


def test_the_last_line_says_how_many_processes_and_cores():
    n_workers = min(4, CPU_COUNT)
    assert cluster() == f"{n_workers} local processes on {CPU_COUNT // n_workers * n_workers} cores"


@pytest.mark.gpu
def test_the_last_line_names_the_gpu():
    assert cluster().startswith(f"LocalCUDACluster with {torch.cuda.get_device_name(0)}")
