"""The files of deploy/slurm, on a real Slurm: workers as jobs for a notebook, and training in one allocation."""

import ast
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from hosts import PYTHONPATH
from slurm import missing, slurm
from waiting import until

import daskrun
from daskrun.settings import THREADS
from workshop_utils.checkpoint import checkpoint_exists, load_checkpoint
from workshop_utils.classify import classify
from workshop_utils.cluster import describe_workers, start_cluster, unfit_for_pytorch
from workshop_utils.photos import HELD_OUT, find_data, list_photos

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "slurm"
pytestmark = [pytest.mark.clusters, pytest.mark.skipif(bool(missing()), reason=f"Slurm {missing()}")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def environment(folder):
    with shell(folder) as environment:
        yield environment


@contextmanager
def shell(folder, **nodes):
    """What the user's shell has: Slurm's commands, the workshop's, a cache that holds the sketches."""
    (folder / "daemons").mkdir()
    with pytest.MonkeyPatch.context() as patch, slurm(folder / "daemons", **nodes) as environment:
        patch.setenv("WORKSHOP_CACHE", str(folder / "cache"))
        find_data(breeds=HELD_OUT)
        bin = Path(sys.executable).parent
        paths = {"PYTHONPATH": PYTHONPATH, "PATH": f"{bin}:{environment['PATH']}"}
        for name in ("MALLOC_TRIM_THRESHOLD_", *THREADS):  # nannies of other tests left them in this process
            environment.pop(name, None)
        yield environment | paths | {"WORKSHOP_CACHE": str(folder / "cache"), "WORKSHOP_WEIGHTS": "sketches"}


def told(environment, *command):
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def no_job_is_left(environment):
    return not told(environment, "squeue", "--noheader")


@pytest.fixture
def client(environment, folder):
    with notebooks_client(environment, folder, 2) as client:
        yield client


@contextmanager
def notebooks_client(environment, folder, n_workers, *words):
    """Yield a client of the cluster that a user starts with the few lines of cluster.py."""
    heeding_ctrl_c = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell's & would leave ignored
    process = subprocess.Popen(
        [sys.executable, DEPLOY / "cluster.py", str(n_workers), *words],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        preexec_fn=heeding_ctrl_c,
    )
    try:
        (address,) = re.findall(r"export DASK_SCHEDULER_ADDRESS=(\S+)", process.stdout.readline())
        with start_cluster(address=address) as client:
            client.wait_for_workers(n_workers, timeout=240)
            yield client
        process.send_signal(signal.SIGINT)
        process.wait(240)
        until(lambda: no_job_is_left(environment))
    finally:
        process.kill()


def test_workers_that_are_jobs_classify_photos_and_are_the_ranks_of_a_job(client, environment):
    nodes = client.run(lambda: os.environ["SLURMD_NODENAME"])
    assert sorted(nodes.values()) == ["n1", "n2"] and len(told(environment, "squeue", "--noheader").splitlines()) == 2
    photos = list_photos(Path(environment["WORKSHOP_CACHE"], "sketches-v1-8"))[:32]
    frame = classify(client, photos, batch_size=8, weights="sketches")
    assert list(frame.path) == [str(photo) for photo in photos] and not frame.error.any()

    def node():
        import torch
        import torch.distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
        return os.environ["SLURMD_NODENAME"], total.item(), os.environ["OMP_NUM_THREADS"]  # of the job's prologue

    assert sorted(daskrun.run(client, node, time_limit=240)) == [("n1", 2.0, "4"), ("n2", 2.0, "4")]


before_its_time_is_over = ("scancel", "--signal=TERM")  # what #SBATCH --signal=TERM@120 does


@pytest.mark.parametrize("end", [before_its_time_is_over, pytest.param(("scancel",), marks=pytest.mark.weekly)])
def test_training_that_slurm_ends_goes_on_with_the_next_job_from_the_step_that_all_ranks_saved(
    environment, folder, end, tmp_path
):
    checkpoint, logs = tmp_path / "dogs.pt", []

    def submit():
        """Start the next job; the test's nodes share two cores, whatever they say."""
        logs.append(tmp_path / f"{len(logs)}.log")
        command = ("sbatch", "--parsable", "--cpus-per-task=1", f"--output={logs[-1]}", DEPLOY / "train.sbatch")
        return told(environment, *command, checkpoint, "8")

    def step():
        return load_checkpoint(checkpoint)["training"]["step"] if checkpoint_exists(checkpoint) else 0

    job = submit()
    until(lambda: step() or no_job_is_left(environment))
    told(environment, *end, job)
    until(lambda: no_job_is_left(environment))
    (saved,) = re.findall(r"Preempted: Rank \S+(?:, \d)* got SIGTERM.* after step (\d+),", logs[-1].read_text())
    assert step() == int(saved) >= 3
    submit()
    until(lambda: no_job_is_left(environment))
    (resumed_at,) = re.findall(r"'resumed_at': (\d+)", logs[-1].read_text())
    assert resumed_at == saved and step() == 16


@pytest.mark.weekly  # the test above, with other checkpoints
def test_a_model_in_shards_goes_on_with_the_next_job(environment, folder):
    for n_steps in (1, 2):
        log = folder / f"sharded-{n_steps}.log"
        words = ("sbatch", "--parsable", "--cpus-per-task=1", f"--output={log}", DEPLOY / "train.sbatch")
        script = {"SCRIPT": str(DEPLOY / "train_sharded.py")}
        told(environment | script, *words, folder / "sharded", str(n_steps))
        until(lambda: no_job_is_left(environment))
        assert f"'resumed_at': {n_steps - 1}, 'steps': {n_steps}" in log.read_text()
    files = {file.name for file in (folder / "sharded" / "step-00000002").iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp"}


@pytest.fixture(scope="module")
def gpu_nodes(tmp_path_factory):
    """A shell on two nodes of two GPUs, which have a number and nothing else."""
    folder = tmp_path_factory.mktemp("gpus")
    with shell(folder, cpus=8, gpus=2) as environment:
        yield environment | {"FOLDER": str(folder)}


def own_gpu_before_the_other(node):
    return [(node, "0,1"), (node, "1,0")]


@pytest.mark.weekly
def test_a_job_has_a_worker_for_each_gpu_of_its_node(gpu_nodes):
    def seen():
        return os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"]

    # `dask cuda worker` as it is; under this variable of dask-cuda's own tests, it asks no driver for anything.
    without_driver = gpu_nodes | {"DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC": "1"}
    with notebooks_client(without_driver, Path(gpu_nodes["FOLDER"]), 4, "2") as client:
        assert told(gpu_nodes, "squeue", "--noheader", "--format=%D %b").splitlines() == ["1 gres:gpu:2"] * 2
        assert sorted(client.run(seen).values()) == own_gpu_before_the_other("n1") + own_gpu_before_the_other("n2")
        workers = describe_workers(client)
        assert set(zip(workers.threads, workers.memory_gib, strict=True)) == {(1, 7.4)}  # 8 GB
        assert set(client.run(lambda: os.environ["OMP_NUM_THREADS"]).values()) == {"4"}
        assert unfit_for_pytorch(client)[0] == []


WITHOUT_TRAINING = """
import os, runpy, sys
import daskrun

def seen():
    return os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("LOCAL_RANK")

def run(client, function, *args):
    return [{"scheduler": client.run_on_scheduler(seen), "script": seen(), "ranks": sorted(in_ranks(client, seen))}]

if __name__ == "__main__":
    in_ranks, daskrun.run = daskrun.run, run
    runpy.run_path(os.environ["TRAIN"], run_name="__main__")
"""


@pytest.mark.parametrize("script", ["train.py", pytest.param("train_sharded.py", marks=pytest.mark.weekly)])
def test_in_one_allocation_each_rank_has_a_gpu_and_scheduler_and_script_have_none(gpu_nodes, script, tmp_path):
    (tmp_path / "script.py").write_text(WITHOUT_TRAINING)
    given = gpu_nodes | {"SCRIPT": str(tmp_path / "script.py"), "TRAIN": str(DEPLOY / script)}
    gpus = "--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1"
    told(given, "sbatch", *gpus, f"--output={tmp_path / 'log'}", DEPLOY / "train.sbatch", "unused", "1")
    until(lambda: no_job_is_left(given))  # sbatch --wait would ask twice a minute
    (seen,) = map(ast.literal_eval, re.findall(r"^{'scheduler'.*}$", (tmp_path / "log").read_text(), re.MULTILINE))
    assert seen["scheduler"] == seen["script"] == ("n1", "", None)
    assert seen["ranks"] == [("n1", "0,1", "0"), ("n1", "0,1", "1")]
