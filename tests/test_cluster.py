"""A cluster starts or is joined, suits PyTorch and stays on loopback, or the error says what to do."""

import builtins
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import dask
import psutil
import pytest
import torch
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster
from processes import dask_process
from waiting import until

from daskrun import ClusterError
from daskrun.settings import THREADS, n_gpus, worker_environment
from workshop_utils.cluster import DASHBOARD_PORT, PANES, describe_workers, start_cluster
from workshop_utils.object_store import LOOPBACK
from workshop_utils.sources import source_versions

cpu_only = pytest.mark.skipif("config.option.markexpr == 'gpu'", reason="tests the cluster of a machine without GPUs")


@contextmanager
def scheduler(n_workers=0, **settings):
    """Run somebody else's cluster: a scheduler on TCP, with workers as threads of this process; yield its address."""
    settings = {"protocol": "tcp", "host": LOOPBACK, "dashboard_address": f"{LOOPBACK}:0", **settings}
    with LocalCluster(n_workers=n_workers, threads_per_worker=1, processes=False, **settings) as cluster:
        yield cluster.scheduler_address


@contextmanager
def worker_process(address, folder, *flags, **environment):
    """Run a worker that somebody else started from the command line."""
    with dask_process("worker", address, *flags, folder=folder, **environment):
        with Client(address) as client:
            client.wait_for_workers(1, timeout=180)
        yield


@contextmanager
def end_of(client):
    try:
        yield client
    finally:
        client.close()
        if client.cluster:
            client.cluster.close()


@pytest.mark.smoke
@cpu_only
def test_without_a_gpu_each_core_has_a_worker_of_one_thread(client):
    with end_of(start_cluster()) as default:
        workers = describe_workers(default)
    n_workers = min(4, CPU_COUNT)
    assert {"worker", "torch_threads", "python"} <= set(workers.columns)
    assert len(workers) == n_workers and workers.pid.nunique() == n_workers
    assert set(workers.threads) == {1} and set(workers.device) == {"cpu"} and set(workers.host) == {LOOPBACK}
    assert set(workers.torch) == {torch.__version__} and (workers.memory_gib > 0).all()


@pytest.mark.smoke
@cpu_only
def test_workers_share_the_cores(client):
    torch_threads = describe_workers(client).torch_threads
    assert torch_threads.tolist() == [max(1, CPU_COUNT // len(torch_threads))] * len(torch_threads)
    with end_of(start_cluster(1, threads_per_worker=3, memory_limit="1.5 GiB")) as single:
        about = describe_workers(single)[["threads", "torch_threads", "memory_gib"]]
        assert about.values.tolist() == [[3, CPU_COUNT, 1.5]]


def test_everything_listens_on_loopback_only(client):
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in client.run(os.getpid).values())]
    listening = [c.laddr for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening} == {LOOPBACK}, listening
    assert len(listening) >= 2 + 2 * len(client.nthreads())  # scheduler, its dashboard; each worker and its dashboard


def test_a_cluster_whose_dashboard_port_is_taken_has_another_and_no_warning(recwarn):
    with ExitStack() as taken:
        with suppress(OSError):  # it is taken already
            taken.enter_context(socket.create_server((LOOPBACK, DASHBOARD_PORT)))
        with end_of(start_cluster(1)) as client:
            assert f":{DASHBOARD_PORT}/" not in client.dashboard_link
            with urllib.request.urlopen(client.dashboard_link, timeout=240) as answer:
                assert answer.status == 200
    assert not [warning for warning in recwarn if "Port" in str(warning.message)]


def test_the_panes_are_told_of_the_last_cluster_that_was_started_or_joined(tmp_path, monkeypatch):
    file = tmp_path / "dashboard.json"
    monkeypatch.setenv(PANES, str(file))
    with end_of(start_cluster(1)) as client:
        host, port, ours = json.loads(file.read_text())
        assert f"http://{host}:{port}/status" == client.dashboard_link and ours == client.scheduler_info()["id"]
        with scheduler(1) as address, end_of(start_cluster(address=address)) as joined:
            assert json.loads(file.read_text())[2] == joined.scheduler_info()["id"] != ours


def test_a_notebook_that_starts_a_second_cluster_closes_its_first_but_not_one_that_it_joined(monkeypatch, capsys):
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    with (
        scheduler(1) as address,
        end_of(start_cluster(address=address)) as joined,
        end_of(start_cluster(1)) as first,
    ):
        assert "closed" not in capsys.readouterr().out
        pids = first.run(os.getpid).values()
        with end_of(start_cluster(1)):
            assert capsys.readouterr().out.startswith("The cluster that this notebook started before is closed.\n")
            assert first.status == "closed" and not any(map(psutil.pid_exists, pids))
            assert joined.submit(sum, [1, 2]).result(timeout=120) == 3


def test_an_address_comes_before_dasks_setting_and_that_before_a_new_cluster():
    with scheduler(1) as given, scheduler(1) as set_in_dask, dask.config.set({"scheduler-address": set_in_dask}):
        with end_of(start_cluster(address=given)) as client:
            assert client.scheduler.address == given
        with end_of(start_cluster()) as client:
            assert client.scheduler.address == set_in_dask


@pytest.mark.smoke
def test_leaving_a_joined_cluster_leaves_it_running():
    with scheduler(1) as address:
        start_cluster(address=address).close()
        with end_of(start_cluster(address=address)) as client:
            assert client.submit(sum, [1, 2]).result(timeout=120) == 3


@pytest.mark.parametrize("listens", [False, True])
def test_an_address_without_a_scheduler_is_named_with_the_cure(listens, monkeypatch):
    with socket.create_server((LOOPBACK, 0)) as server:
        address = f"tcp://{LOOPBACK}:{server.getsockname()[1]}"
        if not listens:
            server.close()
        if listens:
            monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address)
        set_in_dask = dask.config.set({"scheduler-address": address if listens else None})
        with set_in_dask, pytest.raises(ClusterError, match=f"(?s){address}.*not the dashboard's") as said:
            start_cluster(address=None if listens else address, timeout_s=2)
        assert ("unset DASK_SCHEDULER_ADDRESS" in str(said.value)) == listens


def test_a_workers_address_is_told_from_a_schedulers():
    with scheduler(1) as address, Client(address) as client:
        (worker,) = client.nthreads()
        with pytest.raises(ClusterError, match=f"{worker}.*is a worker: give the address of its scheduler"):
            start_cluster(address=worker)


def test_the_stop_button_ends_the_wait_for_a_scheduler():
    def press(server):
        server.accept()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    try:
        with socket.create_server((LOOPBACK, 0)) as server, ThreadPoolExecutor() as elsewhere:
            elsewhere.submit(press, server)
            with pytest.raises(KeyboardInterrupt):
                start_cluster(address=f"tcp://{LOOPBACK}:{server.getsockname()[1]}", timeout_s=3600)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("address", ["localhost", "http://127.0.0.1:8787", 8786])
def test_a_malformed_address_is_named_with_the_right_form(address):
    with pytest.raises(ClusterError, match="tcp://HOST:PORT"):
        start_cluster(address=address, timeout_s=2)


def test_a_cluster_to_which_no_worker_comes_is_refused_with_the_command_that_starts_one():
    with scheduler(0) as address, pytest.raises(ClusterError, match=f"workshop join {address}"):
        start_cluster(address=address, wait_for_workers=0.5)


def test_an_adaptive_cluster_without_workers_starts_one_when_it_is_joined(capfd):
    settings = {"protocol": "tcp", "host": LOOPBACK, "dashboard_address": f"{LOOPBACK}:0"}
    with LocalCluster(n_workers=0, processes=False, **settings) as cluster:
        cluster.adapt(minimum=0, maximum=2, interval="0.1s")
        with end_of(start_cluster(address=cluster.scheduler_address)) as client:
            assert client.submit(sum, [1, 2]).result(timeout=120) == 3
    assert f"{cluster.scheduler_address} has no workers yet; waiting" in capfd.readouterr().out


@pytest.mark.weekly
def test_the_warning_about_unfit_workers_has_the_lines_that_make_them_fit(tmp_path, monkeypatch):
    def sum_through_a_dataloader():  # in here it is pickled by value, as the worker cannot import this file
        numbers = torch.utils.data.TensorDataset(torch.arange(10))
        loader = torch.utils.data.DataLoader(numbers, batch_size=4, num_workers=1, timeout=240)
        return sum(int(batch.sum()) for (batch,) in loader)

    for name in THREADS:  # nannies of this process left them, and they would win
        os.environ.pop(name, None)
    with (
        scheduler() as address,
        worker_process(address, tmp_path),
        pytest.warns(UserWarning, match="MALLOC_TRIM_THRESHOLD_.*daemonic") as said,
    ):
        start_cluster(address=address).close()
    lines = str(said[0].message).splitlines()[1:]
    assert f"PyTorch uses 1 of the {CPU_COUNT} cores" in str(said[0].message) or CPU_COUNT == 1
    assert "\n".join(lines) == worker_environment(CPU_COUNT)
    told = subprocess.run(["bash", "-c", "\n".join([*lines, "env -0"])], capture_output=True, text=True, check=True)
    typed = dict(line.split("=", 1) for line in told.stdout.split("\0") if line.startswith("DASK_DISTRIBUTED__"))
    with (
        scheduler() as address,
        worker_process(address, tmp_path, **typed),
        warnings.catch_warnings(action="error", category=UserWarning),
        end_of(start_cluster(address=address)) as client,
    ):
        assert describe_workers(client).torch_threads.tolist() == [CPU_COUNT]
        assert client.submit(sum_through_a_dataloader).result(timeout=240) == 45


def fake_distribution(folder, name, version):
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


def test_workers_with_another_torch_are_refused_with_the_command_that_installs_the_same(tmp_path):
    path = fake_distribution(tmp_path / "old", "torch", "1.0")
    with (
        scheduler() as address,
        worker_process(address, tmp_path, "--no-nanny", PYTHONPATH=path),
        warnings.catch_warnings(action="error"),  # Dask's own mismatch warning would only say it twice
        pytest.raises(ClusterError, match=r"(?s)tcp://\S+: torch 1\.0.*pip install --no-deps \. \./daskrun"),
    ):
        start_cluster(address=address)


@pytest.mark.parametrize(
    ("package", "file", "content"),
    [
        ("workshop_utils", "names.py", b"# of another commit"),
        ("daskrun", "child/new.py", b""),
        ("workshop_utils", "sources.py", None),  # a checkout from before that was compared
    ],
)
def test_a_worker_with_other_source_files_of_the_same_version_is_refused(tmp_path, package, file, content):
    checkout = tmp_path / "checkout"
    for name in ("workshop_utils", "daskrun"):
        folder = Path(importlib.import_module(name).__file__).parent
        shutil.copytree(folder, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    with scheduler() as address:
        with (
            worker_process(address, tmp_path, "--no-nanny", PYTHONPATH=str(checkout)),
            end_of(start_cluster(address=address)) as client,
        ):
            assert len(client.nthreads()) == 1
        if content is None:
            (checkout / package / file).unlink()
        else:
            (checkout / package / file).write_bytes(content)
        distribution = {"workshop_utils": "workshop-dask-pytorch"}.get(package, package)
        named = rf"tcp://\S+: {distribution} .*here {re.escape(source_versions()[distribution])}"
        with (
            worker_process(address, tmp_path, "--no-nanny", PYTHONPATH=str(checkout)),
            pytest.raises(ClusterError, match=named),
        ):
            start_cluster(address=address)


def test_a_scheduler_with_other_source_files_is_refused(tmp_path):
    package = Path(importlib.import_module("workshop_utils").__file__).parent
    shutil.copytree(package, tmp_path / "old/workshop_utils", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "old/workshop_utils/sources.py").unlink()
    file = tmp_path / "scheduler.json"
    flags = "--port", 0, "--scheduler-file", file
    with dask_process("scheduler", *flags, folder=tmp_path, PYTHONPATH=str(tmp_path / "old")):
        with Client(scheduler_file=str(file)) as client:
            address = client.scheduler.address
        with worker_process(address, tmp_path, "--no-nanny"), pytest.raises(ClusterError, match="the scheduler: "):
            start_cluster(address=address)


def test_a_first_worker_that_comes_late_is_refused_for_its_versions_too(tmp_path):
    path = fake_distribution(tmp_path / "old", "torch", "1.0")
    with scheduler() as address, ThreadPoolExecutor(1) as pool, Client(address) as waits:
        starting = pool.submit(start_cluster, address=address, wait_for_workers=180)
        until(lambda: waits.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))  # it waits for one
        late = worker_process(address, tmp_path, "--no-nanny", PYTHONPATH=path)
        with late, pytest.raises(ClusterError, match=r"tcp://\S+: torch 1\.0"):
            starting.result(120)


# A process that says it runs another Python, and dies of code that this one pickled.
ANOTHER_PYTHON = """
import distributed.protocol.pickle, distributed.versions, os
ask = distributed.versions.get_package_info
distributed.versions.get_package_info = lambda packages: ask(packages) | {"python": "3.99.0.final.0"}
loads = distributed.protocol.pickle.loads
distributed.protocol.pickle.loads = lambda x, **more: os._exit(1) if b"_make_function" in x else loads(x, **more)
"""


@pytest.fixture
def another_python(tmp_path):
    """Return a PYTHONPATH with which a process says that it runs another Python."""
    (tmp_path / "sitecustomize.py").write_text(ANOTHER_PYTHON)
    return str(tmp_path)


def test_a_worker_of_another_python_is_refused_before_it_is_sent_any_code(another_python, tmp_path):
    with scheduler() as address, worker_process(address, tmp_path, "--no-nanny", PYTHONPATH=another_python):
        with pytest.raises(ClusterError, match=r"tcp://\S+: python 3\.99"):
            start_cluster(address=address)
        with Client(address) as client, pytest.raises(OSError):  # it would have died of the code
            client.run(lambda: "code")


def test_a_scheduler_of_another_python_is_refused_before_it_is_sent_any_code(another_python, tmp_path):
    file = tmp_path / "scheduler.json"
    flags = "--port", 0, "--scheduler-file", file
    with dask_process("scheduler", *flags, folder=tmp_path, PYTHONPATH=another_python) as process:
        with Client(scheduler_file=str(file)) as client:
            address = client.scheduler.address
        with worker_process(address, tmp_path, "--no-nanny"), pytest.raises(ClusterError) as refused:
            start_cluster(address=address)
        assert "scheduler: python 3.99" in str(refused.value)
        assert process.poll() is None


def test_builds_of_one_torch_for_cpu_and_gpu_may_meet(tmp_path):
    path = fake_distribution(tmp_path / "cpu", "torch", torch.__version__.split("+")[0] + "+cpu")
    with (
        scheduler() as address,
        worker_process(address, tmp_path, "--no-nanny", PYTHONPATH=path),
        end_of(start_cluster(address=address)) as client,
    ):
        assert len(client.nthreads()) == 1


def test_a_worker_without_a_memory_limit_is_described():
    with scheduler(1, memory_limit=0) as address, end_of(start_cluster(address=address)) as client:
        assert describe_workers(client).memory_gib.isna().tolist() == [True]


@pytest.fixture
def vendor(tmp_path, monkeypatch):
    """A stand-in for the vendor's package, which cannot run here; its workers come late, as rented machines do."""
    (tmp_path / "dask_saturn.py").write_text(
        "import threading\n"
        "from distributed import LocalCluster\n"
        "def SaturnCluster(n_workers=1):\n"
        "    cluster = LocalCluster(n_workers=0, processes=False, dashboard_address='127.0.0.1:0', name='vendor')\n"
        "    threading.Timer(1, cluster.scale, [n_workers]).start()\n"
        "    return cluster\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SATURN_BASE_URL", "http://vendor.example")


def test_a_vendors_cluster_is_used_where_its_environment_says_so(vendor):
    with end_of(start_cluster(2)) as client:
        assert client.cluster.name == "vendor" and client.nthreads()
        client.wait_for_workers(2, timeout=120)


@pytest.mark.gpu
def test_each_gpu_has_a_worker_of_its_own(client):
    with end_of(start_cluster()) as default:
        workers = describe_workers(default)
        assert len(workers) == n_gpus() and workers.device.tolist() == [torch.cuda.get_device_name(0)] * n_gpus()
        assert set(default.run(torch.cuda.device_count).values()) == {n_gpus()}
