"""Real hangs and deaths: the job says which rank, which collective, which process state, and of what it died."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from workshop_utils import ddp
from workshop_utils.cluster import start_cluster
from workshop_utils.job import WorkerDied, ask, private
from workshop_utils.job.look import write_stacks
from workshop_utils.results import log_metrics

pytestmark = pytest.mark.filterwarnings("ignore:Port 8787 is busy", "ignore:Sending large graph")


def other_rank_waits(fault):
    """Return a function in which rank 1 has a fault, and rank 0 waits for it in its third all_reduce."""

    def train():
        for _ in range(2):
            dist.all_reduce(torch.ones(10))
        if dist.get_rank() == 1:
            fault()
        dist.all_reduce(torch.ones(10))

    return train


def sleeps():
    time.sleep(1000)


def holds_the_gil():
    ctypes.PyDLL(None).sleep(1000)


def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # this thread may run on for a moment, and rank 0 would get what it waits for


def calls_another():
    dist.barrier()


def explained(job, *words, seconds=30):
    """Return the explanation once it has these words."""
    until = time.monotonic() + seconds
    while True:
        text = job.explain()
        if all(word in text for word in words) or time.monotonic() > until:
            return text
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            sleeps,
            r"Rank 0 waits in all_reduce 3 of \[10\].*Rank 1 has not called it: it is at test_failures.py.*in sleeps",
        ),
        (calls_another, r"collective 3 is not the same: rank 0 calls all_reduce of \[10\].*rank 1 calls barrier"),
        (holds_the_gil, r"Rank 1 does not answer: .* waits, at .*in holds_the_gil. .* Rank 0 waits in all_reduce 3"),
        (stops_itself, r"Rank 1 is stopped: process \d+ .*Rank 0 waits in all_reduce 3"),
    ],
    ids=["sleeps", "calls another", "holds the GIL", "is stopped"],
)
def test_a_job_that_hangs_explains_itself(client, fault, said):
    ddp.run(
        client, dist.barrier, wait_for_workers=60
    )  # a time limit also counts the wait for killed workers' successors
    with pytest.raises(TimeoutError, match=said) as caught:
        ddp.run(client, other_rank_waits(fault), timeout=3)
    assert "Rank 0, at test_failures.py" in caught.value.__notes__[0]


def test_a_job_tells_who_waits_while_it_runs_and_after_another_job_on_the_same_workers(client):
    ddp.run(client, dist.barrier, wait_for_workers=60)  # the next job shall not count its collectives
    with ddp.launch(client, other_rank_waits(sleeps)) as job:
        text = explained(job, "in sleeps", "has not called it")
    verdict, *listed = text.split("\n\n")
    assert "Rank 0 waits in all_reduce 3 of [10]" in verdict and "in sleeps" in verdict
    assert len(listed) == 2 and "time.sleep(1000)" in listed[1]


def test_a_rank_that_has_called_no_collective_yet_is_seen(client):
    def sleeps_at_once():
        if dist.get_rank() == 1:
            sleeps()
        dist.all_reduce(torch.ones(10))

    with ddp.launch(client, sleeps_at_once, wait_for_workers=60) as job:
        said = explained(job, "in sleeps", "has not called it")
    assert "Rank 1 has not called it: it is at test_failures.py" in said and "no collective" not in said


def test_a_group_that_the_function_makes_anew_counts_from_one(client):
    def makes_another():
        for _ in range(3):
            dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            sleeps()
        dist.all_reduce(torch.ones(7))

    with ddp.launch(client, makes_another, wait_for_workers=60) as job:
        said = explained(job, "in sleeps", "has not called it")
    assert "Rank 0 waits in all_reduce 1 of [7]" in said and "not the same" not in said


def test_a_look_that_fails_is_told_as_that_and_not_as_a_silent_worker(client):
    def breaks_the_recorder():
        private.recorded_collectives.__globals__["_c10d"] = None
        sleeps()

    with ddp.launch(client, breaks_the_recorder, wait_for_workers=60) as job:
        said = explained(job, "could not be looked at")
    client.restart()
    assert "could not be looked at" in said and "does not answer" not in said


def test_a_rank_runs_where_its_stacks_cannot_be_written(client):
    def lose_the_folder(dask_worker):
        write_stacks.cache_clear()
        dask_worker.local_directory = "/nowhere/at/all"

    def find_it(folder, dask_worker):
        dask_worker.local_directory = folder

    folders = client.run(lambda dask_worker: dask_worker.local_directory)
    client.run(lose_the_folder)
    try:
        assert ddp.run(client, dist.get_rank, wait_for_workers=60) == [0, 1]
    finally:
        for address, folder in folders.items():
            client.run(find_it, folder, workers=[address])


def test_files_of_stacks_of_workers_that_are_gone_are_removed(tmp_path):
    (tmp_path / "worker-there").mkdir()
    for name in ("worker-there", "worker-gone"):
        (tmp_path / f"{name}.stacks").touch()
    script = f"from workshop_utils.job.look import write_stacks; write_stacks({str(tmp_path / 'worker-new')!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert sorted(path.name for path in tmp_path.glob("*.stacks")) == ["worker-new.stacks", "worker-there.stacks"]


def test_a_job_that_logs_nothing_says_so_once_each_time_and_goes_on(client):
    def quiet_for_a_while():
        for _ in range(2):
            log_metrics(step=1)
            time.sleep(4)
        return "done"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ddp.run(client, quiet_for_a_while, stall_after=1, wait_for_workers=60) == ["done", "done"]
    said = [str(warning.message) for warning in caught if "logged anything" in str(warning.message)]
    assert len(said) == 2, "once for each time that it is quiet"
    assert all("quiet_for_a_while" in one and re.search(r"for [1-4] s\.", one) for one in said)


def test_the_warning_of_a_stall_never_ends_the_job(client, capsys):
    def quiet():
        time.sleep(4)
        return "done"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ddp.run(client, quiet, stall_after=1, wait_for_workers=60) == ["done", "done"]
    assert "logged anything" in capsys.readouterr().err


def test_what_a_diagnosis_raises_never_ends_the_job(client, monkeypatch):
    def quiet():
        time.sleep(4)
        return "done"

    async def fails(*_, **__):
        raise KeyError("a diagnosis")

    monkeypatch.setattr(ask, "ask_workers", fails)
    with pytest.warns(UserWarning, match="could not be looked at: KeyError"):
        assert ddp.run(client, quiet, stall_after=1, wait_for_workers=60) == ["done", "done"]


@pytest.mark.parametrize("stall_after", [0, -1, "soon", True])
def test_a_stall_after_that_is_no_time_is_refused(client, stall_after):
    with pytest.raises(ValueError, match="stall_after"):
        ddp.launch(client, sleeps, stall_after=stall_after)


def dies_by(signal_number):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal_number)
    dist.all_reduce(torch.ones(3))


def crashes():
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(3))


def exits():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("fn", "args", "said"),
    [
        (dies_by, (signal.SIGKILL,), "signal 9 .SIGKILL."),
        (crashes, (), r"signal 11 .SIGSEGV., at test_failures.py:\d+ in "),
        (exits, (), "exit code 7"),
    ],
    ids=["SIGKILL", "SIGSEGV", "exit code"],
)
def test_a_death_is_told_with_its_signal_or_exit_code(client, fn, args, said):
    with pytest.raises(WorkerDied, match=f"Rank 1 died: worker tcp://.*{said}"):
        ddp.run(client, fn, *args, wait_for_workers=60)


def test_a_second_death_on_the_same_nanny_is_told_as_itself(client):
    """The nanny remembers how a worker ended; the next worker's end is another."""
    for code in (3, 4):

        def exits(code=code):
            if dist.get_rank() == 1:
                os._exit(code)
            time.sleep(60)

        with pytest.raises(WorkerDied, match=f"exit code {code}"):
            ddp.run(client, exits, wait_for_workers=60)


def test_a_death_by_dasks_memory_limit_is_told_with_both_figures():
    def leaks():
        kept = []
        while dist.get_rank() == 1:
            kept.append(torch.ones(8_000_000))
            time.sleep(0.02)
        dist.all_reduce(torch.ones(1))

    # Rank 0 may have failed first, because of the death: then its note follows in another line.
    said = "(?m)Rank 1 died.* had .*limit of 1.20 GiB, so Dask ended it. .* a larger memory_limit.$"
    with start_cluster(2, memory_limit="1.2 GiB") as client, client.cluster, pytest.raises(WorkerDied, match=said):
        ddp.run(client, leaks)


def test_where_pytorch_has_no_recorder_the_places_are_told_alone(monkeypatch):
    monkeypatch.setattr(private, "_c10d", lambda: None)
    assert private.recorded_collectives() == ([], [])
    private.forget_collectives()
