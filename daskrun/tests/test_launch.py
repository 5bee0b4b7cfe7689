"""A launched function runs as ranks, fails as itself, and leaves free workers behind, whatever ended it."""

import dataclasses
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import CancelledError, Client, LocalCluster, wait
from processes import dask_cluster
from waiting import awake, interrupted, owned, settled, until, wait_for, waits

import daskrun
from daskrun import Job, JobError, SchedulerLost, WorkerDied, WorkersBusy, log_metrics, scheduler
from daskrun.child import process_group
from daskrun.claims import Request
from daskrun.local import LOOPBACK, start_local
from daskrun.pickling import packed
from daskrun.private import recorded_collectives
from daskrun.settings import n_gpus

pytestmark = pytest.mark.filterwarnings("ignore:Sending large graph")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it


@pytest.fixture
def gate(tmp_path):
    """The file for which a test's ranks and tasks wait."""
    return tmp_path / "open"


@pytest.fixture
def launches_work_before_and_after(client):
    for turn in range(2):
        ranks, pids = zip(
            *daskrun.run(client, lambda: (dist.get_rank(), os.getpid()), wait_for_workers=60), strict=True
        )
        assert ranks == (0, 1) and len(set(pids)) == 2
        if turn == 0:
            yield


def frames(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# What a launch does


@pytest.mark.smoke
def test_arguments_arrive_and_results_are_in_rank_order(client):
    def told(*args, **kwargs):
        return dist.get_rank(), dist.get_world_size(), dist.get_backend(), args, kwargs

    about = (1, "two"), {"three": [3], "timeout": 5, "fn": None, "n_workers": 1}
    results = daskrun.run(client, told, *about[0], kwargs=about[1], n_workers=2)
    assert results == [(0, 2, "gloo", *about), (1, 2, "gloo", *about)]
    assert daskrun.run(client, len, bytes(50_000_000)) == [50_000_000] * 2


@pytest.mark.smoke
def test_dashboards_show_a_job_as_its_function_and_nothing_of_the_launcher(client):
    def shown():
        return set(client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.task_prefixes)))

    def my_training():
        log_metrics(step=0)

    before = shown()
    with daskrun.launch(client, my_training) as job:
        job.stacks()
        job.result()
    assert shown() - before == {"my_training"}


def test_a_second_run_with_equal_arguments_runs_again_in_new_processes(client, tmp_path):
    def append(path):
        with open(path, "a") as file:
            file.write("x")
        return os.getpid()

    first, second = (daskrun.run(client, append, str(tmp_path / "runs")) for _ in range(2))
    assert not set(first) & set(second) and (tmp_path / "runs").read_text() == "xxxx"


@pytest.mark.smoke
def test_some_workers_can_do_a_job_while_others_do_another(client, gate):
    with ThreadPoolExecutor(2) as pool:  # launches from two threads do not take the same worker
        first, second = pool.map(lambda _: daskrun.launch(client, waits, gate, n_workers=1), range(2))
        assert first.workers != second.workers
        with pytest.raises(WorkersBusy, match=f"{first.workers[0]}.*waits.*job.cancel"):
            daskrun.launch(client, waits, gate, n_workers=1)
        gate.touch()  # two threads may wait for one job
        assert list(pool.map(lambda job: job.result(), [first, second, second])) == [[0], [0], [0]]
    assert first.done() and "1 rank, finished" in repr(first)


@pytest.mark.smoke
def test_everything_listens_on_the_workers_own_address_and_the_environment_stays(client):
    def environment():
        return dict(os.environ)

    def listening():
        dist.barrier()
        addresses = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        os.environ |= {"MINE": "1", "OMP_NUM_THREADS": "77"}
        return addresses, os.environ["MASTER_ADDR"], os.environ["RANK"]

    before = client.run(environment)
    assert daskrun.run(client, listening) == [({LOOPBACK}, LOOPBACK, "0"), ({LOOPBACK}, LOOPBACK, "1")]
    assert client.run(environment) == before


@pytest.mark.smoke
def test_rows_are_seen_while_the_job_runs_and_after_its_end(client, gate):
    def step(gate):
        log_metrics(step=1)
        wait_for(gate)
        log_metrics(step=2, failed=True, exception="none", attempts=1)  # any name will do

    job = daskrun.launch(client, step, gate, n_workers=1)
    rows = job.rows()
    assert next(rows)["step"] == 1 and not job.done()
    gate.touch()
    assert [row["step"] for row in rows] == [2]
    assert [row["step"] for row in job.rows()] == [1, 2]
    assert job.result() == job.result() == [None]
    assert list(job.metrics())[:5] == ["rank", "attempt", "time", "step", "worker"]
    assert set(job.metrics().worker) == set(job.workers) and job.metrics().failed.tolist()[1] is True


# What a failing function gives


@pytest.mark.smoke
@pytest.mark.parametrize(("rank", "other"), [(0, "waits in all_reduce"), (1, "sleeps"), (1, "returns")])
def test_a_rank_that_raises_ends_the_job_with_its_own_error(client, rank, other):
    def fail():
        raise KeyError("no such breed")

    def fail_on(rank, other):
        if dist.get_rank() == rank:
            return fail()
        if other == "waits in all_reduce":
            dist.all_reduce(torch.ones(1))
        if other == "sleeps":
            time.sleep(1000)

    with pytest.raises(KeyError, match="no such breed") as caught:
        daskrun.run(client, fail_on, rank, other)
    assert frames(caught.value)[-3:] == ["result", "fail_on", "fail"]  # none of the launcher's on the worker
    assert f"From rank {rank} of 2, on worker tcp://" in caught.value.__notes__[0]


class Demanding(Exception):
    def __init__(self, name, number):
        super().__init__(f"{name} {number}")
        self.number = number


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("it has a lock")
        self.lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception that takes no note, and cannot be sent as it is."""

    code: int = 0


@pytest.mark.parametrize(
    ("error_of", "expected", "message"),
    [
        (lambda: Demanding("rank", 7), Demanding, "rank 7"),
        (Unpicklable, Exception, "Unpicklable.*it has a lock"),
        (lambda: Frozen(7), Exception, r"Frozen\(code=7\)"),
    ],
    ids=["Demanding", "Unpicklable", "Frozen"],
)
def test_an_odd_exception_arrives_too(client, error_of, expected, message):
    def fail():
        raise error_of()

    with pytest.raises(expected, match=message) as caught:
        daskrun.run(client, fail, n_workers=1, wait_for_workers=60)
    assert "fail" in frames(caught.value) and "From rank 0 of 1" in caught.value.__notes__[0]
    assert expected is not Demanding or caught.value.number == 7


def test_a_recursion_without_end_arrives_as_that(client):
    def dig():
        return dig()

    with pytest.raises(RecursionError) as caught:
        daskrun.run(client, dig, n_workers=1)
    assert frames(caught.value)[-9:] == ["dig"] * 9 and "From rank" in caught.value.__notes__[0]


@pytest.mark.smoke
def test_the_end_of_a_process_is_refused(client):
    def leave():
        sys.exit(3)

    def interrupt():
        raise KeyboardInterrupt

    for how in leave, interrupt:
        with pytest.raises(JobError):
            daskrun.run(client, how, n_workers=1)


@pytest.mark.smoke
def test_a_rank_left_alone_in_a_collective_is_told_who_returned(client):
    def uneven():
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError) as caught:
        daskrun.run(client, uneven)
    assert "From rank 1 of 2" in caught.value.__notes__[0]
    assert "Rank 0 had returned by then" in caught.value.__notes__[0]


@pytest.mark.smoke
def test_what_cannot_be_sent_is_refused(client):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="'<lambda>' or one of its arguments cannot be sent to workers"):
        daskrun.launch(client, lambda: lock)
    with pytest.raises(TypeError, match="cannot be sent to workers"):
        daskrun.launch(client, print, lock)
    with pytest.raises(TypeError, match="returned cannot be sent back"):
        daskrun.run(client, lambda: (n for n in range(3)), n_workers=1)

    def lost_on_the_way():
        raise RuntimeError("cannot be read on the worker")

    class Trap:
        def __reduce__(self):
            return lost_on_the_way, ()

    with pytest.raises(RuntimeError, match="cannot be read on the worker"):
        daskrun.run(client, id, Trap(), n_workers=1)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"n_workers": 3, "wait_for_workers": 0.3}, JobError, "needs 3 workers.* has 2"),
        ({"n_workers": (3, 4)}, JobError, r"needs 3 workers.*cluster.adapt\(minimum=3\)"),
        ({"n_workers": 0}, ValueError, "n_workers is 0"),
        ({"n_workers": (8, 2)}, ValueError, r"n_workers is \(8, 2\)"),
        ({"n_workers": (5, 0)}, ValueError, r"n_workers is \(5, 0\): give"),
        ({"n_workers": 2, "workers": "nobody"}, JobError, "has 0 of nobody"),
        ({"n_workers": 2, "workers": [0]}, JobError, "has 1 of 0"),
        ({"workers": []}, ValueError, "workers is"),
        ({"max_restarts": -1}, ValueError, "max_restarts is -1"),
        ({"wait_for_workers": -1}, ValueError, "wait_for_workers is -1"),
        ({"wait_for_successors": "1 mxn"}, ValueError, "wait_for_successors is '1 mxn'"),
        ({"retry": OSError}, ValueError, "max_restarts is 0"),
        ({"start_method": "forkserver"}, ValueError, "start_method is"),
        ({"stall_after": True}, ValueError, "stall_after is True"),
        ({"backend": "mpi"}, ValueError, "backend is 'mpi'"),
    ],
)
def test_wrong_settings_are_refused(client, settings, error, message):
    with pytest.raises(error, match=message):
        daskrun.launch(client, print, **settings)


# What ends a job from outside


@pytest.mark.smoke
@pytest.mark.usefixtures("launches_work_before_and_after")
def test_a_killed_rank_is_named_and_not_the_one_that_waits_for_it(client):
    def die():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    job, before = daskrun.launch(client, die), client.run(os.getpid)
    with pytest.raises(WorkerDied, match=f"{job.workers[0]}.*SIGKILL") as caught:
        job.result()
    assert list(caught.value.deaths) == [0] and caught.value.deaths[0].code == -signal.SIGKILL
    assert client.run(os.getpid) == before, "the workers, and the data that they hold, stay"


@pytest.mark.smoke
def test_a_job_can_be_cancelled_at_any_time(client, gate):
    before_the_ranks = daskrun.launch(client, waits, gate)
    before_the_ranks.cancel()
    running = awake(daskrun.launch(client, waits, gate, wait_for_workers=60))
    running.cancel()
    for job in (before_the_ranks, running):
        with pytest.raises(CancelledError, match="waits-.* was cancelled"):
            job.result()
    gate.touch()
    finished = daskrun.launch(client, waits, gate, wait_for_workers=60)
    assert finished.result() == [0, 1]
    finished.cancel()
    assert finished.result() == [0, 1]


def test_a_restart_of_the_cluster_ends_the_job_and_frees_what_another_has_left_behind(client, gate):
    job = awake(daskrun.launch(settled(client), waits, gate, n_workers=1, max_restarts=3), n_ranks=1)
    client.run_on_scheduler(scheduler.claim, Request("left", client.id, 1, 1))
    assert len(owned(client)) == 2
    client.restart()
    with pytest.raises(CancelledError, match="client.restart()"):
        job.result()
    assert job.failures == [] and owned(client) == {}
    client.run_on_scheduler(scheduler.give_back, "left", "It was made up.")  # else the page shows that it waits


@pytest.mark.smoke
def test_an_interrupt_while_waiting_frees_the_workers(client, gate):
    job = awake(daskrun.launch(client, waits, gate))
    with pytest.raises(KeyboardInterrupt), interrupted(Job.result):
        job.result()
    with pytest.raises(CancelledError):
        job.result()


@pytest.mark.smoke
def test_leaving_the_block_early_frees_the_workers_and_leaving_it_late_keeps_the_result(client, gate):
    with daskrun.launch(client, waits, gate, n_workers=1) as job:
        awake(job, n_ranks=1)
    with pytest.raises(CancelledError):
        job.result()
    gate.touch()
    with daskrun.launch(client, waits, gate, n_workers=1) as job:
        assert job.result() == [0]
    assert job.result() == [0]


def test_an_interrupt_during_the_launch_frees_the_workers(client, gate):
    task = client.submit(wait_for, gate, pure=False)  # so that the launch waits
    until(lambda: any(client.processing().values()))
    with pytest.raises(KeyboardInterrupt), interrupted(daskrun.launch):
        daskrun.launch(client, waits, gate, wait_for_workers=1000)
    assert owned(client) == {}
    gate.touch()
    wait(task)


KERNEL = """
import sys
from pathlib import Path
from distributed import Client
import daskrun
from waiting import waits

with Client(sys.argv[1]) as client:
    daskrun.run(client, waits, Path(sys.argv[2]))
"""


def n_ranks(dask_worker):
    from daskrun.worker import rank

    return len(rank._processes)


def test_a_job_of_a_kernel_that_was_killed_does_not_keep_its_workers(client, gate):
    command = [sys.executable, "-c", KERNEL, client.scheduler.address, gate]
    kernel = subprocess.Popen(command, cwd=Path(__file__).parent)
    try:
        until(lambda: len(owned(client)) == 2)
        until(lambda: all(client.run(n_ranks).values()))
    finally:
        kernel.kill()
        kernel.wait()
    assert len(daskrun.run(client, os.getpid, wait_for_workers=120)) == 2


@pytest.mark.smoke
def test_busy_workers_are_left_alone_and_can_be_waited_for(client, gate):
    task = client.submit(wait_for, gate, pure=False)
    until(lambda: any(client.processing().values()))
    with pytest.raises(WorkersBusy, match="busy with .*wait_for"):
        daskrun.launch(client, waits, gate)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(daskrun.run, client, waits, gate, wait_for_workers=120)
        gate.touch()
        assert job.result() == [0, 1] and task.done()


def test_workers_that_share_a_process_and_have_no_nanny_run_ranks_of_their_own(gate):
    settings = {"protocol": "tcp", "host": LOOPBACK, "dashboard_address": f"{LOOPBACK}:0", "threads_per_worker": 1}
    with LocalCluster(n_workers=2, processes=False, **settings) as cluster, Client(cluster) as client:
        pids = daskrun.run(client, os.getpid)
        assert len({*pids, os.getpid()}) == 3
        with pytest.raises(TimeoutError):
            daskrun.run(client, wait_for, gate, time_limit="1 s")
        assert daskrun.run(client, dist.get_rank) == [0, 1]


def test_a_failure_is_reported_though_its_process_group_cannot_be_left(client):
    def fail():
        dist.destroy_process_group = lambda: time.sleep(1000)  # as NCCL's may, where its peers wait
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        daskrun.run(client, fail, n_workers=1, max_restarts=3)


def test_a_lost_scheduler_is_named(tmp_path, gate):
    def work(started):
        started.touch()
        time.sleep(1000)

    with dask_cluster(tmp_path, 1) as (client, scheduler):
        job = daskrun.launch(client, work, gate, max_restarts=3)
        until(gate.exists)
        scheduler.kill()
        with pytest.raises(SchedulerLost):
            job.result()
        job.cancel()
        with pytest.raises(SchedulerLost):
            daskrun.launch(client, os.getpid)


@pytest.mark.smoke
def test_a_hang_says_where_each_rank_stands(client):
    def save():
        time.sleep(1000)

    def mismatched():
        for _ in range(2):
            dist.all_reduce(torch.ones(10))
        if dist.get_rank() == 0:
            save()
        dist.all_reduce(torch.ones(10))

    daskrun.run(client, dist.barrier)  # the next job does not count its collectives
    waits = (
        r"Rank 1 waits in all_reduce \(collective 3, shape \[10\]\), at test_launch.py:\d+ in mismatched, in all_reduce"
    )
    others = r"Rank 0 has not called it: it is at test_launch.py:\d+ in save"
    with daskrun.launch(client, mismatched) as job:
        until(lambda: re.search(rf"{waits}. {others}", job.explain()))
        first, second = job.stacks().split("Rank 1")
        assert first.startswith("Rank 0") and "in mismatched" in first and "in save" in first and "rank.py" not in first
        assert "dist.all_reduce(torch.ones(10))" in second and "dist.all_reduce(torch.ones(10))" in job.explain()
    assert job.stacks() == ""


@pytest.mark.smoke
def test_models_that_differ_are_named_with_the_first_tensor_and_its_rank(client):
    def compare(what):
        settings = {} if what == "buffer left out" else {"buffers": True}  # they are left out unless asked for
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        for tensor in (*model.parameters(), *model.buffers()):
            torch.nn.init.zeros_(tensor) if tensor.is_floating_point() else tensor.zero_()
        if dist.get_rank() == 1 and what == "weight":
            model[1].weight.data[1] = torch.nan
        if dist.get_rank() == 1 and what in ("buffer", "buffer left out"):
            model[1].running_mean[0] = 1
        if dist.get_rank() == 1 and what == "another model":
            model.append(torch.nn.Linear(1, 1))
        if dist.get_rank() == 1 and what == "another shape":
            model[0].weight.data = torch.zeros(4, 1)  # though all bits are equal
        try:
            daskrun.assert_equal_on_all_ranks(model, **settings)
        except AssertionError as error:
            return str(error)

    names = ("", "weight", "buffer", "buffer left out", "another model", "another shape")
    said = {what: daskrun.run(client, compare, what) for what in names}
    assert said[""] == said["buffer left out"] == [None, None]
    assert all(first == second for first, second in said.values()), "the ranks come to the same"
    first = {"weight": "1.weight", "buffer": "1.running_mean", "another model": "2.weight", "another shape": "0.weight"}
    assert all(f"first in {name}: rank 1" in said[what][0] for what, name in first.items())
    daskrun.assert_equal_on_all_ranks(torch.nn.Linear(2, 2))  # one process without a group is equal to itself


def test_a_model_in_shards_is_not_compared(client):
    def sharded():
        from torch.distributed.fsdp import fully_shard

        with pytest.raises(RuntimeError):
            daskrun.assert_equal_on_all_ranks(fully_shard(torch.nn.Linear(4, 4)))

    daskrun.run(client, sharded)


@pytest.mark.smoke
def test_what_ranks_return_keeps_its_type(client):
    def tensors():
        half = torch.full((2,), 1.5, dtype=torch.bfloat16)
        weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        return {"half": half, "weight": weight, "layer": torch.nn.Linear(2, 1).bfloat16()}

    for found in daskrun.run(client, tensors):
        assert found["half"].dtype == torch.bfloat16 and found["half"].tolist() == [1.5, 1.5]
        assert isinstance(found["weight"], torch.nn.Parameter) and found["weight"].requires_grad
        assert found["layer"](torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_tensors_leave_their_device_before_they_travel():
    class Elsewhere(torch.Tensor):  # of what a client cannot have
        device = torch.device("cuda")

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    there = torch.ones(2, dtype=torch.bfloat16).as_subclass(Elsewhere)
    found = pickle.loads(packed([there, {"again": there}]))
    assert type(found[0]) is torch.Tensor and found[0].tolist() == [1, 1] and found[0].dtype == torch.bfloat16


# What code written for torchrun finds


@pytest.mark.smoke
def test_ranks_find_the_environment_of_torchrun(client):
    def environment():
        names = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "RANK", "WORLD_SIZE")
        return {name: value for name, value in os.environ.items() if name.startswith(names)}

    first, second = daskrun.run(client, environment, max_restarts=2)
    expected = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "0",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "MASTER_ADDR": LOOPBACK,
    }
    assert first.items() >= expected.items()
    assert {name for name in first if first[name] != second[name]} == {
        *("RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE")
    }
    assert first["TORCHELASTIC_RUN_ID"].startswith("environment-")
    virtual = daskrun.run(client, environment, virtual_local_rank=True)
    assert [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"], one["GROUP_RANK"]) for one in virtual] == [
        ("0", "1", "0"),
        ("0", "1", "1"),
    ]


SCRIPT_FOR_TORCHRUN = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import init_process_group as make_group


def main():
    make_group("gloo", "env://", timedelta(seconds=7))
    total = torch.ones(1)
    dist.all_reduce(total)
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    dist.destroy_process_group()
    return total.item(), limit.total_seconds()
"""


@pytest.mark.smoke
def test_a_script_for_torchrun_makes_its_own_group_with_its_own_settings(client, tmp_path):
    (tmp_path / "script_for_torchrun.py").write_text(SCRIPT_FOR_TORCHRUN)
    client.upload_file(str(tmp_path / "script_for_torchrun.py"))

    def main():
        import script_for_torchrun

        return script_for_torchrun.main()

    for _ in range(2):
        assert daskrun.run(client, main, backend=None, time_limit=120) == [(2.0, 7.0)] * 2

    def nonsense():
        dist.init_process_group("nonsense")

    with pytest.raises(AssertionError, match="nonsense"):
        daskrun.run(client, nonsense, backend=None, n_workers=1)


@pytest.mark.smoke
def test_a_function_that_makes_a_second_group_is_told_of_backend_none(client):
    with pytest.raises(ValueError, match="twice") as caught:
        daskrun.run(client, dist.init_process_group, "gloo", n_workers=1)
    assert "backend=None" in str(caught.value.__notes__)

    def twice():
        for _ in range(2):
            dist.init_process_group("gloo")

    with pytest.raises(ValueError, match="twice") as caught:  # its own mistake
        daskrun.run(client, twice, n_workers=1, backend=None)
    assert "backend=None" not in str(caught.value.__notes__)


def test_interfaces_that_an_administrator_has_set_are_kept(client):
    def interfaces():
        return {name: value for name, value in os.environ.items() if name.endswith("SOCKET_IFNAME")}

    def set_interface(value):
        os.environ.update(GLOO_SOCKET_IFNAME=value) if value else os.environ.pop("GLOO_SOCKET_IFNAME")

    assert daskrun.run(client, interfaces) == [{"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}] * 2
    client.run(set_interface, "lo,eth0")
    try:
        assert daskrun.run(client, interfaces) == [{"GLOO_SOCKET_IFNAME": "lo,eth0", "NCCL_SOCKET_IFNAME": "=lo"}] * 2
    finally:
        client.run(set_interface, None)


@pytest.mark.parametrize(
    ("gpus", "backend", "expected"),
    [
        (["", ""], "auto", "gloo"),
        (["a [0, 1, 0]", "a [0, 2, 0]"], "auto", "cpu:gloo,cuda:nccl"),
        (["a [0, 1, 0]", "a [0, 1, 0]"], "auto", "gloo"),  # two slices of one GPU, or two ranks that share it
        (["a [0, 1, 0]", "b [0, 1, 0]"], "nccl", "nccl"),
        (["a [0, 1, 0]", ""], "gloo", "gloo"),
        (["a [0, 1, 0]", ""], "auto", "Rank 1 of 2 has no GPU, and the others have"),
        (["a [0, 1, 0]", "a [0, 1, 0]"], "nccl", "needs a GPU of its own for each rank"),
    ],
)
def test_the_backend_suits_the_gpus_of_all_ranks(gpus, backend, expected):
    if " " in expected:
        with pytest.raises(JobError, match=expected):
            process_group.backend_for(backend, gpus)
    else:
        assert process_group.backend_for(backend, gpus) == expected


def made_data():
    torch.manual_seed(1)
    x = torch.randn(16, 3)
    return x, x.sum(1, keepdim=True)


def loss_of_the_plain_loop():
    """What one process reaches in five steps that each see all images, as two ranks with 8 each do."""
    torch.manual_seed(0)
    model, (x, y) = torch.nn.Linear(3, 1), made_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return ((model(x) - y) ** 2).mean().item()


@pytest.mark.weekly
def test_lightning_trains_on_all_ranks_to_the_loss_of_the_plain_loop(client, tmp_path):
    pytest.importorskip("lightning")
    data = made_data()

    def train(x, y, folder):
        import lightning
        import torchmetrics

        class Line(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = torch.nn.Linear(3, 1)
                self.mean = torchmetrics.MeanMetric()

            def training_step(self, batch, _):
                xs, ys = batch
                self.mean.update(ys)
                return ((self.layer(xs) - ys) ** 2).mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
        model = Line()
        trainer.fit(model, loader)
        loss = ((model.layer(x) - y) ** 2).mean().item()
        return trainer.world_size, trainer.global_rank, loss, model.mean.compute().item()

    expected = loss_of_the_plain_loop()
    for rank, answer in enumerate(daskrun.run(client, train, *data, str(tmp_path), time_limit=180)):
        assert answer[:2] == (2, rank)
        assert answer[2] == pytest.approx(expected, rel=1e-5)
        assert answer[3] == pytest.approx(data[1].mean().item(), abs=1e-6)  # torchmetrics' over all ranks


@pytest.mark.weekly
def test_transformers_trains_on_all_ranks_to_the_loss_of_the_plain_loop(client, tmp_path):
    pytest.importorskip("transformers")
    data = made_data()

    def train(x, y, folder):
        from transformers import Trainer, TrainingArguments

        class Line(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = torch.nn.Linear(3, 1)

            def forward(self, x, labels):
                logits = self.layer(x)
                return {"loss": ((logits - labels) ** 2).mean(), "logits": logits}

        settings = TrainingArguments(
            folder,
            max_steps=5,
            per_device_train_batch_size=8,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        model = Line()
        samples = [{"x": one, "labels": its} for one, its in zip(x, y, strict=True)]
        Trainer(model, settings, train_dataset=samples).train()
        return settings.world_size, settings.process_index, ((model.layer(x) - y) ** 2).mean().item()

    expected = loss_of_the_plain_loop()
    for rank, answer in enumerate(daskrun.run(client, train, *data, str(tmp_path), time_limit=180)):
        assert answer == (2, rank, pytest.approx(expected, rel=1e-5))


# Restarts


@pytest.mark.smoke
@pytest.mark.usefixtures("launches_work_before_and_after")
def test_a_job_goes_on_from_its_checkpoint_after_a_death(client, tmp_path):
    def count(checkpoint, die_at):
        at = int(checkpoint.read_text()) if checkpoint.exists() else 0
        dist.barrier()  # all have read before rank 0 writes
        for step in range(at, 6):
            if (step, dist.get_rank(), at) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            log_metrics(step=step)
            dist.barrier()
            if dist.get_rank() == 0:
                checkpoint.write_text(str(step + 1))
        return at

    job, before = daskrun.launch(client, count, tmp_path / "step", (3, 1, 0), max_restarts=1), client.run(os.getpid)
    assert job.result() == [3, 3]
    assert [type(death) for death in job.failures] == [WorkerDied] and list(job.failures[0].deaths) == [1]
    assert client.run(os.getpid) == before
    rows = job.metrics()
    assert set(rows[rows.attempt == 0].step) <= {0, 1, 2, 3}
    assert sorted(rows[rows.attempt == 1].step) == [3, 3, 4, 4, 5, 5]
    latest = job.metrics(latest=True)
    assert sorted(latest.step) == sorted(list(range(6)) * 2)  # each once for each rank
    assert set(latest[latest.step >= 3].attempt) == {1} and set(latest[latest.step < 3].attempt) == {0}


def test_no_port_of_a_job_stays_open(client):
    def ports():
        found = psutil.Process().net_connections("tcp")
        return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}

    before = set().union(*client.run(ports).values())
    opened = set().union(*daskrun.run(client, ports)) - before
    assert opened  # the store's
    until(lambda: not opened & set().union(*client.run(ports).values()))


@pytest.mark.gpu
def test_ranks_with_a_gpu_each_talk_over_nccl():
    def totals():
        import torch

        totals = [torch.ones(1, device=device) for device in ("cuda", "cpu")]
        for total in totals:
            dist.all_reduce(total)
        return [total.item() for total in totals], str(torch.cuda.get_device_properties(0).uuid)

    with start_local() as client, client.cluster:
        answers = daskrun.run(client, totals, time_limit=120)
        assert [total for total, _ in answers] == [[n_gpus(), n_gpus()]] * n_gpus()
        assert len({gpu for _, gpu in answers}) == n_gpus()
        assert daskrun.run(client, dist.get_backend, backend="nccl", time_limit=120) == ["nccl"] * n_gpus()


@pytest.mark.gpu
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_failure_under_nccl_reaches_the_client_and_frees_the_gpus(n_ranks):
    if n_gpus() < n_ranks:
        pytest.skip(f"needs {n_ranks} GPUs, and this machine has {n_gpus()}")

    def fail_on_the_last():
        total = torch.ones(1 << 20, device="cuda")
        for number in range(2):
            if number and dist.get_rank() == dist.get_world_size() - 1:
                raise ZeroDivisionError("the last rank's own mistake")
            dist.all_reduce(total)  # the second time, the others wait for it on their GPUs
            total.sum().item()

    with start_local(n_ranks) as client, client.cluster:
        assert daskrun.run(client, dist.get_backend, backend="nccl", time_limit=120) == ["nccl"] * n_ranks  # warms up
        with pytest.raises(ZeroDivisionError, match="the last rank's own mistake"):
            daskrun.run(client, fail_on_the_last, backend="nccl", time_limit=120)
        assert daskrun.run(client, dist.get_world_size, backend="nccl", time_limit=120) == [n_ranks] * n_ranks


@pytest.mark.gpu
def test_nccls_collectives_are_recorded_beside_gloos():
    def record():
        for device in ("cuda", "cuda", "cpu"):
            dist.all_reduce(torch.ones(3, device=device))
        torch.cuda.synchronize()
        return [(entry["recorder"], entry["collective_seq_id"]) for entry in recorded_collectives()[1]]

    with start_local(1) as client, client.cluster:
        for _ in range(2):  # the second job meets nothing of the first
            (recorded,) = daskrun.run(client, record, time_limit=120)
            (first, *_), *_ = recorded
            assert "nccl" in first and recorded == [(first, 1), (first, 2), ("gloo", 1)]


@pytest.mark.gpu
def test_who_has_not_called_nccls_collective_is_named():
    if n_gpus() < 2:
        pytest.skip(f"needs 2 GPUs, and this machine has {n_gpus()}")

    def skip():
        total = torch.ones(3, device="cuda")
        dist.all_reduce(total)
        if dist.get_rank() == 1:
            time.sleep(1000)
        dist.all_reduce(total)
        torch.cuda.synchronize()

    with start_local(2) as client, client.cluster, daskrun.launch(client, skip) as job:
        until(
            lambda: re.search(
                r"Rank 0 .*all_reduce \(collective 2, shape \[3\]\).* Rank 1 has not called it", job.explain()
            )
        )


@pytest.mark.gpu
def test_a_rank_killed_under_nccl_is_started_anew(tmp_path):
    def die_once(marker):
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        if not os.path.exists(marker):
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return total.item()

    with start_local(1) as client, client.cluster:
        job = daskrun.launch(client, die_once, str(tmp_path / "marker"), backend="nccl", max_restarts=1, time_limit=120)
        assert job.result() == [1] and len(job.failures) == 1


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_are_refused_nccl_and_get_gloo():
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": f"{LOOPBACK}:0"}
    with LocalCluster(**settings) as cluster, Client(cluster) as client:
        assert daskrun.run(client, dist.get_backend, time_limit=120) == ["gloo"] * 2
        with pytest.raises(JobError, match="needs a GPU of its own"):
            daskrun.run(client, dist.get_backend, backend="nccl", time_limit=120)


def test_a_survived_death_is_told_at_once_also_to_a_loop_that_is_slower_than_the_ranks(client):
    def train():
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        for step in range(30):
            daskrun.log_metrics(step=step)
            time.sleep(0.02)
            if attempt == 0 and step == 5 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told_before = []
        with daskrun.launch(client, train, max_restarts=1, backend=None) as job:
            for row in job.rows():
                time.sleep(0.05)
                if row["attempt"] == 1:
                    told_before.append(bool(caught))
    assert told_before[-1] and "Starting again (1 of max_restarts=1)" in str(caught[0].message)
    assert told_before.index(True) < 30, "of 60 rows of the second attempt"
