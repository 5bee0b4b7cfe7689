"""On hosts that share no disk, no loopback and no names, ranks meet, and training goes on after a host is lost."""

import os
import socket
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from waiting import until

import daskrun
from daskrun import JobError, WorkerDied, log_metrics
from workshop_utils.horovod import available, with_horovod
from workshop_utils.photos import HELD_OUT, find_data
from workshop_utils.shared import NotShared, new_shared_folder
from workshop_utils.train import prepare, train

pytestmark = pytest.mark.clusters


def test_ranks_meet_at_rank_0s_own_address_through_the_hosts_own_network(on_hosts, hosts_cluster):
    def sum_up():
        total = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(total)
        names = "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
        return total.item(), socket.gethostname(), *map(os.environ.get, names)

    where = hosts_cluster.hosts[0].address, "eth0", "=eth0"
    assert daskrun.run(on_hosts, sum_up, time_limit=240) == [(3.0, "one", *where), (3.0, "two", *where)]
    listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert not {hosts_cluster.network.address, "0.0.0.0", "::"} & {*listening}  # nobody has to reach the client


@pytest.mark.skipif(not available(), reason="Horovod is not built: make horovod")
def test_horovods_ranks_meet_as_well(on_hosts):
    def sum_up():
        import horovod.torch as hvd

        total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum)
        return total.item(), hvd.rank(), hvd.local_rank(), hvd.cross_rank(), socket.gethostname()

    assert daskrun.run(on_hosts, with_horovod(sum_up), backend=None, time_limit=240) == [
        (3.0, 0, 0, 0, "one"),
        (3.0, 1, 0, 1, "two"),
    ]


def test_without_shared_storage_find_data_says_what_to_type(on_hosts, monkeypatch):
    monkeypatch.delenv("WORKSHOP_SHARED")
    with pytest.raises(NotShared, match=r"2 of 2 workers(.|\n)*WORKSHOP_SHARED=s3://"):
        find_data(per_breed=1, breeds=["pug"])


@pytest.fixture(scope="module")
def teach():
    def teach(source, **settings):  # in here it is pickled by value, as a notebook's functions are
        model, train_set, val_set = prepare(source, image_size=64)
        return train(model, train_set, val_set, batch_size=16, lr=0.03, **{"freeze_epochs": 9} | settings)

    return teach


def has_reached(step, job):
    """Return once both ranks have taken so many steps; raise the job's error if it ends before."""

    def has():
        if job.done():
            job.result()
        return (steps := job.metrics().get("step")) is not None and (steps == step).sum() >= 2

    until(has, job.stacks)


def test_a_host_that_is_cut_off_is_reported_and_the_others_are_free(on_hosts, hosts_cluster):
    def endless():
        while True:
            dist.all_reduce(torch.ones(1))
            log_metrics(step=1)
            time.sleep(0.1)

    with daskrun.launch(on_hosts, endless) as job:
        has_reached(1, job)
        hosts_cluster.lose(hosts_cluster.hosts[1])
        with pytest.raises(WorkerDied, match=f"Rank 1 .*{job.workers[1]}.*host, or the network to it, is lost"):
            job.result()
    assert len(daskrun.run(on_hosts, os.getpid, n_workers=1)) == 1  # it needs no successor of the lost host's


def test_ranks_that_cannot_reach_each_other_are_named_with_the_address_and_the_cure(on_hosts, hosts_cluster):
    one, two = hosts_cluster.hosts
    two.run("ip", "route", "add", "blackhole", one.address)  # both still reach the scheduler
    try:
        with pytest.raises(JobError, match=rf"Rank 1, on {two.address}, .* rank 0 at .*{one.address}.*firewall"):
            daskrun.run(on_hosts, dist.barrier)
    finally:
        two.run("ip", "route", "del", "blackhole", one.address)


@pytest.mark.parametrize("is_back", [False, pytest.param(True, marks=pytest.mark.weekly)])
def test_training_goes_on_from_the_checkpoint_with_or_without_the_lost_host(on_hosts, hosts_cluster, teach, is_back):
    source, checkpoint = find_data(8, HELD_OUT, light="dusk"), f"{new_shared_folder()}/breeds.pt"
    settings = {"checkpoint": checkpoint, "checkpoint_every": 2, "epochs": 4}
    options = {"wait_for_successors": 120} if is_back else {"wait_for_successors": 5, "n_workers": (1, 2)}
    with daskrun.launch(on_hosts, teach, source, kwargs=settings, max_restarts=1, **options) as job:
        has_reached(6, job)
        hosts_cluster.lose(hosts_cluster.hosts[1])
        if is_back:
            until(lambda: len(on_hosts.nthreads()) == 1, hosts_cluster.network.said)
            hosts_cluster.bring_back()
        results = job.result()
    assert len(results) == (2 if is_back else 1) and len(job.failures) == 1
    assert 4 <= results[0]["resumed_at"] < results[0]["steps"] == 16
