"""`workshop join` reads what a launcher says of its process; tests/clusters starts it for real."""

import click
import pytest

from workshop_utils.tool import join
from workshop_utils.tool.join import Member, become, read_launcher


def test_torchrun_and_kubeflow_say_the_rank_and_the_first_machine():
    of_torchrun = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-0"}
    assert read_launcher(of_torchrun) == Member(5, 1, 4, "node-0")
    assert read_launcher({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0"}) == Member(
        2, 0, 1, "job-master-0"
    )


def test_srun_says_it_too(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert read_launcher({**said, "SLURM_STEP_NODELIST": "n[1-2]"}) == Member(3, 1, 2, "n1")


@pytest.mark.parametrize("said", [{}, {"RANK": "1"}, {"RANK": "one", "MASTER_ADDR": "a"}, {"SLURM_PROCID": "1"}])
def test_a_process_that_no_launcher_started_is_told_what_to_give(said):
    with pytest.raises(click.ClickException, match="Nothing says what to become .*tcp://HOST:8786.*torchrun"):
        read_launcher(said)


@pytest.mark.parametrize("address", ["localhost:8786", "tcp://localhost", "http://localhost:8787", "tcp://localhost:x"])
def test_an_address_that_is_none_is_named_with_the_right_form(address):
    with pytest.raises(click.ClickException, match="'.*localhost.*'"):
        become(address, 8786, None)


def started(monkeypatch, n_gpus, **said):
    """Return the environment of the process that a launcher's process becomes on a machine of four GPUs."""
    found = []
    monkeypatch.setattr(join, "n_gpus", lambda: n_gpus)
    monkeypatch.setattr(join.os, "execve", lambda path, command, environment: found.append((command, environment)))
    monkeypatch.setattr(join.os, "environ", {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "HOME": "/", **said})
    become(None, 8786, None)
    return found[0]


def test_the_first_process_is_the_scheduler_and_each_worker_has_a_gpu_of_its_own(monkeypatch):
    command, _ = started(monkeypatch, 4, RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="5")
    assert "distributed.cli.dask_scheduler" in command
    beside = [started(monkeypatch, 4, RANK=str(i), LOCAL_RANK=str(i), LOCAL_WORLD_SIZE="5") for i in range(1, 5)]
    assert [worker["CUDA_VISIBLE_DEVICES"] for _, worker in beside] == ["0,1,2,3", "1,2,3,0", "2,3,0,1", "3,0,1,2"]
    command, elsewhere = started(monkeypatch, 4, RANK="7", LOCAL_RANK="2", LOCAL_WORLD_SIZE="4")
    assert elsewhere["CUDA_VISIBLE_DEVICES"] == "2,3,0,1" and "tcp://127.0.0.1:8786" in command
    assert "OMP_NUM_THREADS" not in elsewhere and "RANK" not in elsewhere and elsewhere["HOME"] == "/"
    _, alone = started(monkeypatch, 1, RANK="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert "CUDA_VISIBLE_DEVICES" not in alone and '"OMP_NUM_THREADS": ' in str(alone)
