"""A program's workers start wherever the program comes from, or the last line that is printed says what to write."""

import os
import subprocess
import sys

import pytest

FROM_A_SCRIPT = "from workshop_utils.cluster import start_cluster\nstart_cluster(1)\n"
SUM_IN_A_WORKER = """
from workshop_utils.cluster import start_cluster

def total():
    import torch

    numbers = torch.utils.data.TensorDataset(torch.arange(4))
    return sum(int(batch.sum()) for (batch,) in torch.utils.data.DataLoader(numbers, num_workers=1, timeout=60))

if __name__ == "__main__":
    with start_cluster(1) as client, client.cluster:
        print(client.submit(total).result(), __file__)
"""


def python(*arguments, forks=True, **settings):
    environment = {**os.environ, "DASK_WORKSHOP__DASHBOARD_PORT": "0", "DASK_WORKSHOP__FORK_WORKERS": str(forks)}
    environment |= settings.pop("env", {})
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, **settings)


SPAWNED = pytest.param(False, marks=pytest.mark.weekly)


@pytest.mark.parametrize("forks", [True, SPAWNED])
@pytest.mark.parametrize("through", ["script", pytest.param("helper", marks=pytest.mark.weekly)])
def test_the_last_line_of_a_script_that_each_worker_would_run_again_says_what_to_write(through, forks, tmp_path):
    (tmp_path / "script.py").write_text("import helper" if through == "helper" else FROM_A_SCRIPT)
    (tmp_path / "helper.py").write_text(FROM_A_SCRIPT)
    done = python(tmp_path / "script.py", forks=forks)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 1 and last.startswith("workshop_utils.joining.ClusterError")
    assert last.endswith("if __name__ == '__main__':")
    assert done.stderr.count("Traceback") == 1  # not one of each worker's


@pytest.mark.parametrize("forks", [True, SPAWNED])
def test_a_script_on_standard_input_has_workers(forks, tmp_path):
    done = python("-", input=SUM_IN_A_WORKER, forks=forks, cwd=tmp_path)
    assert done.stdout == "6 <stdin>\n", done.stderr


@pytest.mark.weekly
def test_where_the_name_of_tmpdir_is_long_workers_start_and_have_children(tmp_path):
    (tmp_path / "script.py").write_text(SUM_IN_A_WORKER)
    long = tmp_path / ("x" * 95)
    long.mkdir(parents=True)
    done = python(tmp_path / "script.py", env={"TMPDIR": str(long)})
    assert done.stdout == f"6 {tmp_path}/script.py\n", done.stderr
    assert not list(long.glob("pymp-*"))
