"""Local workers suit PyTorch, are back soon after a death, and are like new ones in all else."""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from functools import partial
from types import ModuleType

import dask
import numpy as np
import psutil
import pytest
import torch
from distributed import Client
from processes import command_of
from waiting import until, until_replaced

import daskrun
from daskrun import ClusterError, local, start_local
from daskrun.local import LOOPBACK
from daskrun.settings import own_gpu_first

weekly = partial(pytest.param, marks=pytest.mark.weekly)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")


def has_torch():
    return "torch" in sys.modules and "daskrun" in sys.modules


def python(*arguments, **settings):
    environment = {**os.environ, **settings.pop("env", {})}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, **settings)


@pytest.mark.smoke
@on_linux
def test_a_worker_that_died_is_back_with_pytorch_imported_and_what_suits_it():
    with start_local(2) as client, client.cluster:
        (server,) = set(client.run(os.getppid).values())
        assert server != os.getpid()
        os.kill(server, signal.SIGTERM)  # as Slurm does to all processes of a job: the server stays
        for deadly in (signal.SIGKILL, signal.SIGTERM):
            os.kill(victim := min(client.run(os.getpid).values()), deadly)
            until_replaced(client, victim)
        assert all(client.run(has_torch).values()) and set(client.run(os.getppid).values()) == {server}
        share = max(1, os.cpu_count() // 2)
        threads = set(client.run(lambda: (os.environ["OMP_NUM_THREADS"], torch.get_num_threads())).values())
        assert threads == {(str(share), share)}
        assert set(client.run(lambda: os.environ.get("MALLOC_TRIM_THRESHOLD_")).values()) == {None}
        assert set(client.run(lambda: multiprocessing.current_process().daemon).values()) == {False}


@pytest.mark.smoke
def test_workers_draw_other_numbers(client):
    for draw in (lambda: np.random.random(), lambda: random.random(), lambda: torch.rand(1).item()):
        assert len(set(client.run(draw).values())) == 2


@pytest.mark.weekly
@on_linux
def test_workers_outlive_the_fork_server_no_longer_than_others_take_their_place():
    with start_local(2) as client, client.cluster:
        (server,) = set(client.run(os.getppid).values())
        before = set(client.run(os.getpid).values())
        os.kill(server, signal.SIGKILL)

        def all_new():
            now = set(client.run(os.getpid, on_error="ignore").values())
            return len(now) == 2 and not now & before

        until(all_new)
        assert len(daskrun.run(client, os.getpid)) == 2


def a_free_port():
    with socket.create_server((LOOPBACK, 0)) as server:
        return server.getsockname()[1]


def is_taken(port):
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def test_the_stop_button_keeps_the_workers():
    """Jupyter sends SIGINT to all processes of the kernel's group."""
    with start_local(1) as client, client.cluster:
        (before,) = client.run(os.getpid).values()
        os.kill(before, signal.SIGINT)
        assert client.submit(os.getpid).result(timeout=120) == before


@pytest.mark.parametrize("presses", [1, 2])
def test_a_start_that_is_stopped_leaves_no_cluster(presses, monkeypatch):
    before, main, port = set(psutil.Process().children()), threading.main_thread().ident, a_free_port()
    register = Client.register_plugin

    def waits_for_the_start():
        return any(frame.name == "__exit__" for frame in traceback.extract_stack(sys._current_frames()[main]))

    def press_when_it_has_almost_started(client, plugin):
        for _ in range(presses):
            signal.pthread_kill(main, signal.SIGINT)
            until(waits_for_the_start)
        return register(client, plugin)

    def left():
        commands = [command_of(child) for child in set(psutil.Process().children()) - before]
        return any(command and "resource_tracker" not in command for command in commands) or is_taken(port)

    monkeypatch.setattr(Client, "register_plugin", press_when_it_has_almost_started)
    with dask.config.set({"daskrun.fork-workers": False}), pytest.raises(KeyboardInterrupt):
        start_local(1, dashboard_port=port)
    until(lambda: not left())


@pytest.mark.parametrize("value", [0, True, 1.5, "two"])
@pytest.mark.parametrize("name", ["n_workers", "threads_per_worker"])
def test_wrong_numbers_are_refused(name, value):
    with pytest.raises(ClusterError, match=f"{name} is {value!r}"):
        start_local(**{name: value})


@pytest.mark.gpu
def test_more_workers_than_gpus_are_refused():
    with pytest.raises(ClusterError, match=f"{torch.cuda.device_count()} GPU"):
        start_local(torch.cuda.device_count() + 1)


@pytest.mark.parametrize(
    ("seen", "each"),
    [
        ("0,1,2", ["0,1,2", "1,2,0", "2,0,1"]),
        ("2,3", ["2,3", "3,2"]),  # those that Slurm gave to this job, and no others of the machine
        ("GPU-c4f,GPU-0a1", ["GPU-c4f,GPU-0a1", "GPU-0a1,GPU-c4f"]),
        ("1", ["1", "1"]),  # two processes share one
        ("0, 1,", ["0,1", "1,0"]),  # CUDA reads as far as there are ids
        ("2,3,-1,0", ["2,3", "3,2"]),
    ],
)
def test_each_process_of_a_machine_has_another_gpu_first_and_sees_the_others(seen, each, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert [own_gpu_first(position)["CUDA_VISIBLE_DEVICES"] for position in range(len(each))] == each


def test_a_process_that_sees_no_gpu_gets_none_and_without_a_choice_of_the_users_all_of_the_machine_count(monkeypatch):
    for none in ("", ",0,1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert own_gpu_first(1) == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("daskrun.settings.n_gpus", lambda: 2)
    assert own_gpu_first(1) == {"CUDA_VISIBLE_DEVICES": "1,0"}


class Chosen(Exception):
    """What start_local would start; a cluster on GPUs that are not there cannot be started."""

    def __init__(self, **settings):
        super().__init__()
        self.n_workers = settings["n_workers"]


def instead_of_a_cluster(**settings):
    raise Chosen(**settings)


@pytest.fixture
def chosen(monkeypatch):
    """Return what start_local chooses where this process sees so many GPUs, by these ids."""

    def choose(number, ids):
        monkeypatch.setattr("torch.cuda.is_available", lambda: number > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: number)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ids)
        dask_cuda = ModuleType("dask_cuda")
        dask_cuda.LocalCUDACluster = instead_of_a_cluster
        monkeypatch.setitem(sys.modules, "dask_cuda", dask_cuda)
        with pytest.raises(Chosen) as caught:
            start_local()
        return caught.value

    return choose


def test_slices_of_a_gpu_have_a_worker_each_though_a_process_sees_one(chosen):
    assert chosen(1, "MIG-1a,MIG-2b,MIG-3c").n_workers == 3
    assert chosen(1, "GPU-1a").n_workers == 1


@pytest.mark.parametrize("ids", [None, "", "NoDevFiles", "0"])
def test_a_gpu_that_pytorch_does_not_see_is_told_unless_it_is_hidden(ids, tmp_path, monkeypatch):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(local, "DRIVER", tmp_path / "nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if ids is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ids)
    monkeypatch.setattr(local, "LocalCluster", instead_of_a_cluster)
    with warnings.catch_warnings(record=True) as said, pytest.raises(Chosen):
        warnings.simplefilter("always")
        start_local(1)
    assert len(said) == (ids in (None, "0"))


# A program's workers start wherever it comes from, or the last line that is printed says what to write

forks = pytest.mark.parametrize("forks", [True, weekly(False)])


@forks
def test_a_script_that_each_worker_would_run_again_is_told_what_to_write(forks, tmp_path):
    (tmp_path / "script.py").write_text("from daskrun import start_local\nstart_local(1)\n")
    done = python(tmp_path / "script.py", env={"DASK_DASKRUN__FORK_WORKERS": str(forks)})
    assert done.returncode == 1 and "ClusterError" in done.stderr.splitlines()[-1]


AS_DASK_CUDA = """
from distributed import LocalCluster

class LocalCUDACluster(LocalCluster):  # adds its workers by scale, to whose errors nobody listens
    def __init__(self, n_workers, CUDA_VISIBLE_DEVICES, **settings):
        super().__init__(n_workers=0, **settings)
        self.scale(n_workers)
        self.sync(self._correct_state)
"""
ON_A_GPU = """
import torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
"""


@pytest.mark.weekly
def test_dask_cudas_workers_that_did_not_start_are_an_error_too(tmp_path):
    (tmp_path / "dask_cuda").mkdir()
    (tmp_path / "dask_cuda/__init__.py").write_text(AS_DASK_CUDA)
    (tmp_path / "guarded.py").write_text(
        f"{ON_A_GPU}from daskrun import start_local\nif __name__ == '__main__':\n    print(start_local().nthreads())\n"
    )
    (tmp_path / "script.py").write_text(f"{ON_A_GPU}from daskrun import start_local\nstart_local()\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    guarded = python(tmp_path / "guarded.py", env=env)
    assert guarded.returncode == 0 and "127.0.0.1" in guarded.stdout, guarded.stderr
    done = python(tmp_path / "script.py", env=env)
    assert done.returncode == 1 and "ClusterError" in done.stderr.splitlines()[-1]


@pytest.mark.weekly
def test_a_program_that_imports_pytorch_after_the_start_has_its_own_threads(tmp_path):
    program = (
        "from daskrun import start_local\n"
        "with start_local(2, threads_per_worker=1) as client, client.cluster:\n"
        "    import torch; print(torch.get_num_threads())"
    )
    (tmp_path / "alone.py").write_text("import torch; print(torch.get_num_threads())")
    assert python("-c", program).stdout == python(tmp_path / "alone.py").stdout


PRELOADS = """
import sys
from daskrun import start_local

def about():
    return "helpful" in sys.modules

if __name__ == "__main__":
    with start_local(1, preload=["wrong", "helpful"]) as client, client.cluster:
        print(*client.run(about).values())
"""


@pytest.mark.weekly
@on_linux
def test_a_module_that_cannot_be_imported_beforehand_is_told_of_and_stops_no_start(tmp_path):
    (tmp_path / "wrong.py").write_text("raise ValueError('not today')")
    (tmp_path / "helpful.py").touch()
    (tmp_path / "script.py").write_text(PRELOADS)
    done = python(tmp_path / "script.py", env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})
    assert done.stdout == "True\n" and "ValueError: not today" in done.stderr, done.stderr


OF_USER = """
import daskrun

def threads():
    import os, torch
    return torch.get_num_threads(), os.environ["MKL_NUM_THREADS"], os.environ["TORCH_CPP_LOG_LEVEL"]

if __name__ == "__main__":
    for _ in range(2):
        with daskrun.start_local(1) as client, client.cluster:
            print(*client.submit(threads).result())
"""


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("set_by_user", "found"),
    [
        ({"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "INFO"}, "1 1 INFO"),  # 1 is Dask's own default, too
        ({"MKL_NUM_THREADS": "3"}, "3 3 ERROR"),
        ({}, f"{os.cpu_count()} {os.cpu_count()} ERROR"),
    ],
)
def test_the_users_variables_win_in_each_cluster_of_a_program(tmp_path, set_by_user, found):
    (tmp_path / "program.py").write_text(OF_USER)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=clean | set_by_user,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.stdout.splitlines() == [found] * 2, done.stderr
