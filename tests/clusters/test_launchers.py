"""Whatever launcher starts `workshop join`, on each machine or many times on one, a notebook finds a cluster."""

import os
import re
import shutil
import socket
import sys
from contextlib import contextmanager
from multiprocessing import current_process
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from dask.system import CPU_COUNT
from distributed import LocalCluster
from hosts import lasting_port
from waiting import until

import daskrun
from workshop_utils.cluster import start_cluster
from workshop_utils.object_store import LOOPBACK
from workshop_utils.tool.cli import main
from workshop_utils.tool.join import LAUNCHERS

pytestmark = pytest.mark.clusters
BIN = Path(sys.executable).parent
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "SLURM_"))}


@contextmanager
def running(folder, *commands):
    """Run (command, variables) side by side; at the end, stop them as launchers do, and expect that nothing is left."""
    with open(folder / "log", "a") as log:
        started = [
            psutil.Popen(list(map(str, command)), env=PLAIN | variables, cwd=folder, stdout=log, stderr=log)
            for command, variables in commands
        ]
    try:
        yield folder / "log"
        everything = [child for process in started for child in process.children(recursive=True)]
    finally:
        for process in started:
            process.terminate()
        left = psutil.wait_procs(started, timeout=120)[1]
        for process in left:
            process.kill()
    assert not left
    assert not psutil.wait_procs(everything, timeout=120)[1]


def by_torchrun(port):
    torchrun = [BIN / "torchrun", "--nproc-per-node=3", "--no-python"]
    return [([*torchrun, BIN / "workshop", "join", "--port", port], {"CUDA_VISIBLE_DEVICES": "4,5"})]


def by_slurm(port):
    """What `srun` would set for three tasks on one machine."""
    shared = {"SLURM_STEP_NODELIST": "localhost", "SLURM_CONF": "slurm.conf"}
    command = [BIN / "workshop", "join", "--port", port, "--threads", 1]
    return [(command, shared | {"SLURM_PROCID": f"{rank}"}) for rank in range(3)]


def by_kubeflow(port):
    """What Kubeflow sets in three pods, each of which counts as a machine; of the first, it gives the name."""
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}
    command = [BIN / "workshop", "join", "--port", port, "--threads", 1]
    return [(command, shared | {"RANK": f"{rank}"}) for rank in range(3)]


@pytest.fixture
def about():
    def about():  # in here it is pickled by value
        names = "MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS", "RANK", "CUDA_VISIBLE_DEVICES"
        return current_process().daemon, *map(os.environ.get, names)

    return about


@pytest.fixture
def port():
    return lasting_port()


@pytest.mark.filterwarnings("ignore:Workers do not suit PyTorch")  # which are not all there yet, to share the cores
@pytest.mark.parametrize(
    "launcher", [by_torchrun, *(pytest.param(one, marks=pytest.mark.weekly) for one in (by_slurm, by_kubeflow))]
)
def test_a_launcher_starts_a_cluster_that_a_notebook_joins(launcher, port, about, sum_up, tmp_path):
    if launcher == by_slurm and not shutil.which("scontrol"):
        pytest.skip("needs: apt install slurm-client")

    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")  # or scontrol would not start
    with (
        running(tmp_path, *launcher(port)) as log,
        start_cluster(address=f"tcp://{LOOPBACK}:{port}", timeout_s=120) as client,
    ):
        until(lambda: len(client.nthreads()) == 2, log.read_text)
        assert daskrun.run(client, sum_up, time_limit=240) == [3.0, 3.0]
        threads = max(1, CPU_COUNT // 3) if launcher == by_torchrun else 1
        gpus = ["4,5", "5,4"] if launcher == by_torchrun else ["", ""]  # of those it sees, each takes another first
        assert sorted(client.run(about).values()) == [(False, None, str(threads), None, each) for each in gpus]


def test_with_an_address_it_is_one_worker(about, tmp_path):
    with (
        LocalCluster(n_workers=0, processes=False, protocol="tcp", host=LOOPBACK, dashboard_address=None) as cluster,
        running(tmp_path, ([BIN / "workshop", "join", cluster.scheduler_address], {})),
        start_cluster(address=cluster.scheduler_address) as client,
    ):
        assert list(client.run(about).values()) == [(False, None, str(CPU_COUNT), None, "")]
        assert list(client.nthreads().values()) == [1]


def test_a_port_that_is_taken_is_named_with_the_cure():
    with socket.create_server((LOOPBACK, 0)) as other:
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(main, ["join", "--port", port], env={"RANK": "0", "MASTER_ADDR": LOOPBACK})
    assert f"Cannot listen at {LOOPBACK}, port {port}: Address already in use. Choose another --port" in done.output


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (
            [],
            {},
            "Nothing says what to become .no address.*tcp://HOST:8786.*torchrun --no-python.*srun.*RANK and",
        ),
        ([], {"RANK": "one", "MASTER_ADDR": LOOPBACK}, "Nothing says what to become .*'one'"),
        ([], {"SLURM_PROCID": "1"}, "Nothing says what to become .*SLURM_STEP_NODELIST"),
        ([], {"RANK": "1", "MASTER_ADDR": "nowhere.invalid"}, "tcp://nowhere.invalid:8786' cannot be reached"),
        (["tcp://localhost"], {}, "'tcp://localhost' is not a scheduler's address: write tcp://HOST:PORT"),
    ],
)
def test_what_says_nothing_of_a_cluster_is_named_with_the_cure(words, variables, said, monkeypatch):
    for name in os.environ.keys() - PLAIN.keys():
        monkeypatch.delenv(name)
    done = CliRunner().invoke(main, ["join", *words], env=variables)
    assert done.exit_code == 1 and re.search(said, done.output), done.output
