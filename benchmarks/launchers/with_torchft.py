"""The job for torchft: python with_torchft.py RESTARTS FOLDER...

torchft replaces a dead replica while the others stay, and gives it the weights of one that lives. So each rank is a
replica of one process, under a torchrun of its own that starts it again; this script starts them, and the lighthouse
where they meet. A step counts only if both took part, as min_replica_size says.

With torchft 0.2.0 and PyTorch 2.15 the survivor ends, too: an assertion in torchft's hook of DDP fails after the first
all-reduce that fails. Its torchrun starts it again, and both read the checkpoint.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from shared import (
    BATCH_SIZE,
    EPOCHS,
    LR,
    MOMENTUM,
    N_RANKS,
    STEPS_PER_EPOCH,
    build_model,
    jobs,
    make_images,
    step_done,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # a Manager needs the store that this takes from it


def train(folder, rank):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(saved):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load,
        state,
        min_replica_size=N_RANKS,
        use_async_quorum=False,  # a replica that comes back takes part in its first step
        replica_id=f"replica_{rank}",
        hostname="127.0.0.1",
    )
    parallel, wrapped = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    dataset = make_images()
    sampler = DistributedSampler(dataset, rank, N_RANKS, group_rank=0, num_replicas=1, shuffle=False)
    batches = list(DataLoader(dataset, BATCH_SIZE, sampler=sampler))
    checkpoint = Path(folder, "checkpoint.pt")
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        load(saved)
        manager.load_state_dict(saved["torchft"])
    while (step := manager.current_step()) < EPOCHS * STEPS_PER_EPOCH:
        wrapped.zero_grad()  # waits for the other replica, and takes its weights where this one lags behind
        step = manager.current_step()
        epoch, position = divmod(step, STEPS_PER_EPOCH)
        images, labels = batches[position]
        loss = cross_entropy(parallel(images), labels)
        loss.backward()
        wrapped.step()
        if manager.current_step() > step:
            step_done(folder, rank, epoch, loss)  # measuring
            if rank == 0 and position == STEPS_PER_EPOCH - 1:
                torch.save({"torchft": manager.state_dict(), **state()}, f"{checkpoint}.part")
                os.replace(f"{checkpoint}.part", checkpoint)
    manager.shutdown()


def replicas(folder, restarts):
    """Run all replicas until they end; raise RuntimeError once one fails for good."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    agent += [f"--max-restarts={restarts}", __file__, "replica", folder]
    environment = {name: value for name, value in os.environ.items() if name != NOT_SHARED}
    running = [subprocess.Popen([*agent, str(rank)], env=environment) for rank in range(N_RANKS)]
    while None in (codes := [process.poll() for process in running]) and not any(codes):
        time.sleep(0.1)
    for process in running:
        process.terminate()
        process.wait()
    if any(codes):
        raise RuntimeError(f"the replicas ended with {codes}")


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        train(sys.argv[2], int(sys.argv[3]))
    else:
        lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=N_RANKS)
        os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
        for folder, restarts in jobs():
            replicas(folder, restarts)
        lighthouse.shutdown()
