"""A Horovod function runs as ranks under the contract of `daskrun.run`, and computes what DDP computes."""

import os
import signal
import threading

import psutil
import pytest
import torch
from waiting import settled, until

import daskrun
from workshop_utils import horovod
from workshop_utils.horovod import with_horovod

built = pytest.mark.skipif(not horovod.available(), reason="Horovod is not built: make horovod")


def ranks(client, **options):
    def who():
        import horovod.torch as hvd

        total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum)
        return hvd.rank(), hvd.size(), hvd.local_rank(), total.item()

    return daskrun.run(client, with_horovod(who), backend=None, **options)


@built
def test_jobs_follow_one_another_with_any_number_of_ranks_and_beside_ddp(client):
    for n_workers in (1, 2, 1, 1, 2):
        expected = [(rank, n_workers, rank, sum(range(1, n_workers + 1))) for rank in range(n_workers)]
        assert ranks(client, n_workers=n_workers) == expected
    assert daskrun.run(client, torch.distributed.get_rank) == [0, 1]


@built
def test_training_goes_on_from_its_checkpoint_after_a_death(client, tmp_path):
    def count(path, kill_at):
        import horovod.torch as hvd

        saved = int(path.read_text()) if hvd.rank() == 0 and path.exists() else 0
        first = hvd.broadcast_object(saved, root_rank=0, name="saved")  # its default name would be the type's
        for step in range(first, 10):
            hvd.allreduce(torch.ones(1))
            if hvd.rank() == 0:
                path.write_text(str(step + 1))
            if first == 0 and step == kill_at and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return first, step

    job = daskrun.launch(client, with_horovod(count), tmp_path / "step", 5, backend=None, max_restarts=1)
    (first, last), other = job.result()
    assert other == (first, last) and last == 9
    assert first in (5, 6, 7), "it did not resume"  # rank 0 may have been a step ahead of the kill, or behind
    assert [list(death.deaths) for death in job.failures] == [[1]]
    assert ranks(client, wait_for_workers=60) == [(0, 2, 0, 3.0), (1, 2, 1, 3.0)]


@built
def test_it_listens_on_the_workers_address_while_it_runs_and_nowhere_afterwards(client):
    def ports():
        found = psutil.Process().net_connections("tcp")
        return {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}

    def listening():
        import horovod.torch as hvd

        hvd.barrier()
        found = psutil.Process().net_connections("tcp")
        return [tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN]

    def kept():
        threads = [thread.name for thread in threading.enumerate() if "horovod" in thread.name]
        return threads, sorted(name for name in os.environ if name.startswith("HOROVOD"))

    before = set().union(*settled(client).run(ports).values())
    listened = {address for found in daskrun.run(client, with_horovod(listening), backend=None) for address in found}
    assert {ip for ip, _ in listened} == {"127.0.0.1"}
    until(lambda: not ({port for _, port in listened} - before) & set().union(*client.run(ports).values()))
    assert set(map(str, client.run(kept).values())) == {"([], [])"}


def toy(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    labels = torch.randint(2, (8,), generator=generator)
    return torch.randn(8, 3, 8, 8, generator=generator) + labels[:, None, None, None], labels


def toy_model(seed):
    torch.manual_seed(seed)  # differs between ranks: rank 0's weights have to be broadcast
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 2)
    )


def step_of(model, optimizer, step, rank, device="cpu"):
    images, labels = (tensor.to(device) for tensor in toy(step, rank))
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def losses_under_horovod():
    """Train for 20 steps, on the GPU if its ranks can, and return (device, losses)."""
    import horovod.torch as hvd

    on_gpu = torch.cuda.is_available() and (hvd.nccl_built() or hvd.size() == 1)
    device = "cuda" if on_gpu else "cpu"
    model = toy_model(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.to(device).parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return device, [step_of(model, optimizer, step, hvd.rank(), device) for step in range(20)]


@built
def test_with_equal_seeds_and_data_its_losses_are_those_of_ddp(client):
    def under_ddp():
        rank = torch.distributed.get_rank()
        model = torch.nn.parallel.DistributedDataParallel(toy_model(seed=rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return [step_of(model, optimizer, step, rank) for step in range(20)]

    theirs = torch.tensor(
        [losses for _, losses in daskrun.run(client, with_horovod(losses_under_horovod), backend=None)]
    )
    ours = torch.tensor(daskrun.run(client, under_ddp))
    assert theirs.shape == (2, 20) and theirs[:, -5:].mean() < 0.5 * theirs[:, 0].mean()
    assert ((theirs - ours).abs() / ours).max() <= 1e-3


def test_where_it_is_not_built_a_launch_says_so(monkeypatch):
    monkeypatch.setattr(horovod, "available", lambda: False)
    with pytest.raises(RuntimeError, match="make horovod"):
        with_horovod(print)


@built
@pytest.mark.gpu
def test_a_rank_with_a_gpu_trains_on_it(client):
    ((device, losses),) = daskrun.run(client, with_horovod(losses_under_horovod), n_workers=1, backend=None)
    assert device == "cuda" and sum(losses[-5:]) < 2.5 * losses[0]
