"""A rank is a process of its own: nothing of one job reaches the next, and nothing that it started outlives it."""

import bz2
import gc
import gzip
import importlib
import logging
import lzma
import multiprocessing
import os
import random
import shelve
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import cloudpickle
import dask
import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import Client
from processes import dask_cluster, has_ended
from waiting import awake, settled, until

import daskrun
from daskrun import JobError, ScriptFailed, WorkerDied, log_metrics, start_local
from daskrun.settings import THREADS

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index**2


def test_loader_processes_are_forks_of_the_rank(client):
    def load():
        loader = torch.utils.data.DataLoader(Squares(), num_workers=2)
        return multiprocessing.get_start_method(), [int(batch) for batch in loader]

    squares = [number**2 for number in range(8)]
    assert daskrun.run(client, load) == [(multiprocessing.get_context().get_start_method(), squares)] * 2


def test_a_module_that_was_edited_is_the_code_that_runs(client, tmp_path):
    module = tmp_path / "edited_between_jobs.py"

    def use():
        return importlib.import_module("edited_between_jobs").answer()

    client.run(lambda: sys.path.insert(0, str(tmp_path)))
    try:
        for answer in ("old", "newer", "the newest"):
            module.write_text(f"def answer(): return {answer!r}\n")
            assert daskrun.run(client, use) == [answer] * 2
    finally:
        client.run(lambda: sys.path.remove(str(tmp_path)))


def start_things():
    """Start what outlives a careless function; return the processes' ids."""
    popen = subprocess.Popen(["sleep", "1000"])
    daemon = multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000], daemon=True)
    daemon.start()
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000], daemon=False)
    other.start()
    log_metrics(popen=popen.pid, daemon=daemon.pid, other=other.pid)
    return other


@pytest.mark.parametrize("how", ["returns", "raises", "is killed", "is cancelled", "loses its client"])
def test_what_a_function_has_started_ends_with_it(client, how):
    def work(how):
        other = start_things()
        dist.barrier()
        if how == "returns":
            other.terminate()  # Python itself waits for a child that's no daemon
            return
        if how == "raises":
            other.terminate()
            raise OSError("no")
        if how == "is killed" and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    own = client
    if how == "loses its client":
        from distributed import Client

        own = Client(client.scheduler.address, set_as_default=False)
    job = awake(daskrun.launch(own, work, how))
    pids = [int(row[name]) for row in job.metrics().to_dict("records") for name in ("popen", "daemon", "other")]
    if how == "is cancelled":
        job.cancel()
    elif how == "loses its client":
        own.close()
    with suppress(OSError, JobError, Exception):
        job.result()
    assert len(pids) == 6
    until(lambda: all(map(has_ended, pids)))
    settled(client)


def test_what_a_function_changes_is_as_ever_in_the_next_job(client):
    def change():
        logging.getLogger().addHandler(logging.NullHandler())
        sys.stdout = sys.stderr
        warnings.showwarning = None
        gc.disable()
        sys.setrecursionlimit(77_777)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)
        os.chdir("/")
        os.environ["LEFT"] = "behind"
        os.umask(0)
        threading.Thread(target=time.sleep, args=[1000], daemon=True).start()

    def settings():
        umask = os.umask(0o22)
        return (
            len(logging.getLogger().handlers),
            sys.stdout is sys.stderr,
            warnings.showwarning is None,
            gc.isenabled(),
            sys.getrecursionlimit(),
            str(signal.getsignal(signal.SIGUSR2)),
            str(torch.get_default_dtype()),
            torch.get_num_threads(),
            os.getcwd(),
            os.environ.get("LEFT"),
            umask,
            sorted(thread.name for thread in threading.enumerate()),
        )

    before = daskrun.run(client, settings)
    daskrun.run(client, change)
    assert daskrun.run(client, settings) == before


def test_pools_of_processes_and_signal_handlers_work_in_a_rank_also_on_workers_without_our_settings(tmp_path):
    def work():
        told = []
        signal.signal(signal.SIGUSR2, lambda *_: told.append(1))
        os.kill(os.getpid(), signal.SIGUSR2)
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            return told, list(pool.map(abs, [-1, -2]))

    with dask_cluster(tmp_path, 1) as (
        client,
        _,
    ):  # as Dask's manual says: daemonic, one thread, MALLOC_TRIM_THRESHOLD_
        assert daskrun.run(client, work) == [([1], [1, 2])]
        assert daskrun.run(client, os.environ.get, "MALLOC_TRIM_THRESHOLD_") == [None]


def test_ranks_draw_other_numbers_in_each_job(client):
    def draw():
        return torch.rand(1).item(), random.random(), np.random.random()

    drawn = [number for _ in range(2) for rank in daskrun.run(client, draw) for number in rank]
    assert len(set(drawn)) == 12


def test_what_a_function_prints_is_printed_where_the_job_is_awaited(client, capfd):
    def speak():
        print("hello", dist.get_rank())
        print("careful", file=sys.stderr)
        os.system("echo from a shell")

    daskrun.run(client, speak)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        "[rank0]: from a shell",
        "[rank0]: hello 0",
        "[rank1]: from a shell",
        "[rank1]: hello 1",
    ]
    assert {"[rank0]: careful", "[rank1]: careful"} <= set(err.splitlines())


def test_dasks_data_stays_on_a_worker_whose_rank_has_failed(client):
    data = client.scatter(list(range(2)), broadcast=True)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            daskrun.run(client, lambda: 1 / 0)
    assert client.gather(data) == [0, 1]
    assert len(daskrun.run(client, os.getpid)) == 2, "all workers, though n_workers isn't given"


def test_all_workers_are_taken_after_a_failure_a_plain_task_and_a_restart(client):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            daskrun.run(client, lambda: 1 / 0)
        assert client.submit(int, pure=False).result() == 0
        client.restart()
        assert daskrun.run(client, dist.get_rank) == [0, 1]


def test_all_workers_are_taken_after_one_has_died(client):
    os.kill(min(client.run(os.getpid).values()), signal.SIGKILL)
    until(lambda: len(client.nthreads()) == 1)
    assert daskrun.run(client, dist.get_rank) == [0, 1]


def test_a_rank_that_raises_is_heard_although_another_one_is_stopped(client, tmp_path):
    def work(file):
        if dist.get_rank() == 0:
            file.write_text(str(os.getpid()))
            time.sleep(1000)
        until(file.exists)
        until(file.read_text)
        os.kill(int(file.read_text()), signal.SIGSTOP)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        daskrun.run(client, work, tmp_path / "pid", shutdown_timeout=1)


def test_stop_sends_sigterm_which_a_function_may_handle(client, tmp_path):
    def work(folder, saves):
        told = []
        if saves:
            signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        log_metrics(step=1)
        while not told:
            time.sleep(0.01)
        (folder / f"saved{dist.get_rank()}").touch()
        return "saved"

    with awake(daskrun.launch(client, work, tmp_path, True, max_restarts=3)) as job:
        job.stop("1 min")
        assert job.done() and job.result() == ["saved"] * 2
    with awake(daskrun.launch(client, work, tmp_path, False, max_restarts=3)) as job:
        job.stop()
        with pytest.raises(JobError, match="SIGTERM"):
            job.result()
    assert job.failures == []

    def leave():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        log_metrics(step=1)
        time.sleep(1000)

    with awake(daskrun.launch(client, leave, max_restarts=3)) as job:
        job.stop()
        with pytest.raises(JobError, match="The job was stopped"):
            job.result()


def test_a_template_ends_with_its_program_though_that_dies_while_it_imports_and_leaves_no_folder(tmp_path):
    program = (
        "import os; from daskrun.worker.template import own_template\n"
        "template = own_template(); print(template.process.pid, template.address, flush=True); os._exit(0)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    pid, address = done.stdout.split()
    until(lambda: has_ended(int(pid)) and not Path(address).parent.exists())


def test_a_rank_that_is_killed_is_a_death_that_a_restart_gets_over(client, tmp_path):
    def work():
        while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(0.01)
        return dist.get_rank()

    with daskrun.launch(client, work, max_restarts=1) as job:
        job.kill(1)
        assert job.result() == [0, 1]
    [death] = job.failures
    assert death.deaths[1].code == -signal.SIGKILL

    def first_returns(folder):
        while dist.get_rank() and not (folder / "end").exists():
            time.sleep(0.01)

    def is_refused():
        try:
            job.kill(0)  # it returns a moment after the ranks have begun
        except JobError:
            return True

    with daskrun.launch(client, first_returns, tmp_path, max_restarts=9) as job:
        until(is_refused)
        (tmp_path / "end").touch()
        job.result()
    with pytest.raises(JobError):
        job.kill(0)
    with pytest.raises(ValueError, match="no rank 2"):
        job.kill(2)


def test_a_function_that_ignores_a_stop_is_killed_after_its_grace(client):
    def work():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log_metrics(pid=os.getpid())
        time.sleep(1000)

    job = awake(daskrun.launch(client, work))
    pids = job.metrics().pid.astype(int).tolist()
    job.stop(grace=0.5)
    with pytest.raises(JobError, match="SIGTERM"):
        job.result()
    until(lambda: all(map(has_ended, pids)))


def test_the_wait_for_a_result_can_be_limited_and_the_job_goes_on(client, tmp_path):
    def work():
        until((tmp_path / "go").exists)
        return 1

    job = daskrun.launch(client, work)
    with pytest.raises(TimeoutError):
        job.result(timeout="50 ms")
    (tmp_path / "go").touch()
    assert job.result(timeout=60) == [1, 1]


@pytest.mark.parametrize("ends", ["its lifetime", "a restart"])
def test_a_rank_whose_worker_is_closed_may_save_and_all_its_rows_arrive(tmp_path, ends):
    def logs(saved):
        def save(*_):
            time.sleep(0.3)
            log_metrics(step=step, saved=True)
            saved.write_text(str(step))
            sys.exit()

        signal.signal(signal.SIGTERM, save)
        step = 0
        while True:
            step += 1
            log_metrics(step=step, saved=False)
            time.sleep(0.002)

    def close(dask_worker):
        dask_worker.loop.add_callback(dask_worker.close_gracefully, reason="worker-lifetime-reached")

    with (
        dask.config.set({"distributed.worker.daemon": False}),
        Client(n_workers=1, dashboard_address="127.0.0.1:0") as client,
    ):
        job = daskrun.launch(client, logs, tmp_path / "saved", wait_for_successors=1)
        until(lambda: len(job.metrics()) > 200)
        client.run(close) if ends == "its lifetime" else client.restart_workers(job.workers)
        with pytest.raises(WorkerDied):
            job.result()
    rows, saved = job.metrics(), int((tmp_path / "saved").read_text())
    assert rows.saved.sum() == 1 and rows.step.tolist() == [*range(1, saved + 1), saved]


def test_variables_of_the_user_are_those_of_ranks_and_stay_in_the_program(tmp_path):
    names = "MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS", "PYTHONHASHSEED"
    (tmp_path / "program.py").write_text(
        f"import os, daskrun\n"
        f"def values(): return [os.environ.get(name) for name in {names}]\n"
        "if __name__ == '__main__':\n"
        "    before = values()\n"
        "    with daskrun.start_local(1) as client:\n"
        "        (of_rank,) = daskrun.run(client, values)\n"
        "        print(before == of_rank == values(), *of_rank)\n"
        "        client.shutdown()\n"
    )
    mine = dict(zip(names, ["131072", "1", "7"], strict=True))
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | mine, capture_output=True, text=True)
    assert done.stdout.split() == ["True", *mine.values()], done.stderr


def test_of_two_threads_in_collectives_both_lines_are_explained(client, tmp_path):
    def work(done):
        groups = [dist.new_group() for _ in range(2)]

        def of_the_thread():
            dist.broadcast(torch.ones(3), 0, group=groups[1])

        if dist.get_rank():
            thread = threading.Thread(target=of_the_thread)
            thread.start()
            of_the_main_thread(groups[0])
        else:
            awake_until(done)
            of_the_main_thread(groups[0])
            of_the_thread()

    def of_the_main_thread(group):
        dist.all_reduce(torch.ones(5), group=group)

    def awake_until(done):
        while not done.exists():
            time.sleep(0.05)

    with daskrun.launch(client, work, tmp_path / "done") as job:
        until(lambda: all(name in job.explain() for name in ("of_the_main_thread", "of_the_thread", "awake_until")))
        said, _, _ = job.explain().partition("\n")
        assert "in of_the_main_thread, in all_reduce" in said and "in of_the_thread, in broadcast" in said
        (tmp_path / "done").touch()
        job.result()


def test_exceptions_that_are_named_are_retried(client):
    def work(error):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise error("try again")
        return "done"

    job = daskrun.launch(client, work, ConnectionError, max_restarts=2, retry=OSError)
    assert job.result() == ["done"] * 2
    assert [type(error) for error in job.failures] == [ConnectionError]
    with pytest.raises(KeyError):
        daskrun.run(client, work, KeyError, max_restarts=2, retry=OSError)


def test_launch_without_a_client_and_arguments_that_suit_no_function_are_refused(client):
    with pytest.raises(TypeError, match="client is missing"):
        daskrun.launch(os.getpid)

    def work(path, timeout=3):
        return path, timeout

    with pytest.raises(TypeError, match="path"):
        daskrun.run(client, work)
    assert daskrun.run(client, work, "a", kwargs={"timeout": 5}, n_workers=1) == [("a", 5)]


def where():
    return os.getppid(), "distributed" in sys.modules, os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()


def test_ranks_are_forked_from_one_process_which_has_no_dask_unless_a_variable_needs_a_new_interpreter():
    with start_local(2) as client, client.cluster:
        (forked,) = set(daskrun.run(client, where))
        assert not forked[1] and forked[0] not in client.run(os.getpid).values()
        assert {parent for parent, *_ in daskrun.run(client, where, start_method="spawn")} == set(
            client.run(os.getpid).values()
        )
        client.run(lambda: os.environ.update(dict.fromkeys(THREADS, "2")))  # which PyTorch reads when it's imported
        for parent, has_dask, threads, torch_threads in daskrun.run(client, where):
            assert parent in client.run(os.getpid).values()
            assert (has_dask, threads, torch_threads) == (False, "2", 2)


def test_workers_that_were_joined_start_a_template_of_their_own(tmp_path):
    with dask_cluster(tmp_path, 1) as (client, _):
        (worker,) = client.run(os.getpid).values()
        ((first, *_),), ((second, *_),) = (daskrun.run(client, where) for _ in range(2))
        assert first == second != worker
        os.kill(worker, signal.SIGKILL)
        until(lambda: has_ended(first))


def test_a_module_that_starts_a_thread_is_named_and_ranks_start_afresh(tmp_path):
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[1000], daemon=True).start()\n"
    )
    environment = {"PYTHONPATH": str(tmp_path), "DASKRUN_PRELOAD": "starts_a_thread"}
    with dask_cluster(tmp_path, 1, **environment) as (client, _):
        with pytest.warns(UserWarning, match="starts_a_thread"):
            ((parent, *_),) = daskrun.run(client, where)
        assert parent in client.run(os.getpid).values()


def test_a_script_that_raises_is_started_again_as_under_torchrun(client, tmp_path):
    from test_command import run, write

    write(
        tmp_path, "import os", "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise OSError('no')", "print('ok')"
    )
    code, out, _ = run(client, tmp_path, "--max-restarts", 1, "script.py")
    assert code == 0 and out.count("ok") == 2


def test_errors_carry_what_is_known_of_them(client, tmp_path):
    from daskrun.client.job import Job
    from daskrun.client.limits import Limits
    from daskrun.protocol import Script

    (tmp_path / "fails.py").write_text("print('about to fail')\nraise SystemExit(3)\n")
    job = Job(client, Script("fails.py", False, (), str(tmp_path), None), "fails", Limits())
    with pytest.raises(ScriptFailed) as caught:
        job.result()
    assert (caught.value.code, caught.value.output) == (3, "about to fail")
    with pytest.raises(WorkerDied) as caught:
        daskrun.run(client, os._exit, 7)
    assert {ended.code for ended in caught.value.deaths.values()} == {7}


def test_file_objects_that_a_function_left_open_are_written(client, tmp_path):
    def write(folder):
        globals()["left_open"] = Path(folder, f"rank{dist.get_rank()}").open("w")  # noqa: SIM115
        left_open.write("all of it")  # noqa: F821

    daskrun.run(client, write, tmp_path)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["all of it"] * 2


def test_what_a_script_leaves_open_is_written_as_python_does_at_its_end(client, tmp_path):
    (tmp_path / "script.py").write_text(
        "import bz2, gzip, io, lzma, shelve, tempfile, threading, zipfile\n"
        "both = open('both', 'w+b'); both.write(b'abc')\n"
        "temporary = tempfile.NamedTemporaryFile(); temporary.write(b'gone')\n"
        "open('name', 'w').write(temporary.name)\n"
        "packed = gzip.open('gz', 'wt'); packed.write('text')\n"
        "other, third = lzma.open('xz', 'wb'), bz2.open('bz2', 'wb'); other.write(b'x'); third.write(b'z')\n"
        "archive = zipfile.ZipFile('zip', 'w'); archive.writestr('a', 'b')\n"
        "table = shelve.open('shelf', writeback=True); table['x'] = [1]; table['x'].append(2)\n"
        "class Says:\n"
        "    def __del__(self): open('said', 'w').write('deleted')\n"
        "says = Says()\n"
        "io.left = gzip.open('left', 'wt'); io.left.write('of a module')\n"
        "def forever():\n"
        "    while True: both\n"
        "threading.Thread(target=forever, daemon=True).start()\n"
    )
    command = [Path(sys.executable).parent / "daskrun", "-n", "1", "--scheduler", client.scheduler.address, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "[rank0]" not in done.stderr, done.stderr
    assert (tmp_path / "both").read_bytes() == b"abc" and (tmp_path / "said").read_text() == "deleted"
    assert not Path((tmp_path / "name").read_text()).exists()
    unpacked = {"gz": gzip, "left": gzip, "xz": lzma, "bz2": bz2}
    found = [module.decompress((tmp_path / name).read_bytes()) for name, module in unpacked.items()]
    assert found == [b"text", b"of a module", b"x", b"z"]
    with zipfile.ZipFile(tmp_path / "zip") as archive:
        assert archive.read("a") == b"b"
    with shelve.open(tmp_path / "shelf") as table:
        assert table["x"] == [1, 2]


IN_MAIN = """
import multiprocessing
from dataclasses import dataclass

import daskrun
from torch.utils.data import DataLoader

@dataclass
class Batch:
    numbers: list

def squared(number):
    return number * number

def collate(numbers):
    return Batch(numbers)

def work():
    with multiprocessing.Pool(2) as pool:
        squares = pool.map(squared, [1, 2, 3])
    return squares, [batch.numbers for batch in DataLoader([4, 5], num_workers=1, collate_fn=collate)]

if __name__ == "__main__":
    with daskrun.start_local(1) as client, client.cluster:
        print(*daskrun.run(client, work))
"""


def test_a_ranks_processes_find_what_its_program_has_defined(tmp_path):
    (tmp_path / "program.py").write_text(IN_MAIN)
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "([1, 4, 9], [[4], [5]])\n", done.stderr
