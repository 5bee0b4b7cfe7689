"""Train a model that one GPU cannot hold, in shards, on the tasks of one Slurm allocation: see train.sbatch.

It goes on from the newest whole checkpoint in the folder, with as many ranks as the allocation has.
"""

import glob
import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchvision
from dask_jobqueue.slurm import SLURMRunner
from distributed import Client
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate

import daskrun
from daskrun.settings import own_gpu_first
from workshop_utils.photos import HELD_OUT, ImageFolder, find_data
from workshop_utils.storage import absolute_address, open_address
from workshop_utils.training.preemption import Preempted, ranks_with_sigterm, sigterm_noticed

BATCH_SIZE, SAVE_EVERY = 8, 100  # images a rank, steps


def sharded_model():
    """Return the model, each rank with its shards. Put your own here; fill its buffers, too, such as BatchNorm's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with torch.device("meta"):  # shapes without memory: no rank ever holds the whole
        model = torchvision.models.vit_b_32(num_classes=len(HELD_OUT))
    for layer in model.encoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.to_local().normal_(std=0.02)
            else:  # LayerNorm scales by 1 at first, and all biases are 0
                weight.to_local().fill_(name.endswith("weight"))
    return model, device


def newest(folder):
    """Return (the address of the newest whole checkpoint, its step), or (None, 0). DCP writes .metadata last."""
    fs, path = open_address(folder)
    whole = fs.glob(f"{glob.escape(path)}/step-*/.metadata")
    steps = {int(name.split("/")[-2].removeprefix("step-")): name.split("/")[-2] for name in whole}
    if not steps:
        return None, 0
    last = max(steps)  # by number: as text, step-10000 is before step-9996
    return f"{folder}/{steps[last]}", last


def teach(source, folder, n_steps):
    model, device = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = [newest(folder)]
    dist.broadcast_object_list(found, src=0)  # rank 0 decides: others might see another folder, and would wait for ever
    checkpoint, first = found[0]
    if checkpoint:
        of_model, of_optimizer = get_state_dict(model, optimizer)  # makes a step of a new optimiser: only before a load
        state = {"model": of_model, "optimizer": of_optimizer}
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    transform = torchvision.models.ViT_B_32_Weights.IMAGENET1K_V1.transforms()
    dataset = ImageFolder(source.url, transform, storage_options=source.storage_options, breeds=HELD_OUT)
    loss = None
    with sigterm_noticed() as signals:
        for step in range(first, n_steps):
            shuffled = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(step)).tolist()
            mine = shuffled[dist.get_rank() :: dist.get_world_size()][:BATCH_SIZE]
            images, labels = (part.to(device) for part in default_collate(dataset.__getitems__(mine)))
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            preempted = ranks_with_sigterm(signals)
            if preempted or (step + 1) % SAVE_EVERY == 0 or step + 1 == n_steps:
                of_model, of_optimizer = get_state_dict(model, optimizer)
                dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=f"{folder}/step-{step + 1:08}")
            if preempted:
                raise Preempted(step + 1, preempted, folder)
    return {"resumed_at": first, "steps": n_steps, "loss": None if loss is None else loss.item()}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the ranks heed: they save, and this ends after them
    folder, n_steps = absolute_address(sys.argv[1]), int(sys.argv[2])
    os.environ |= own_gpu_first(int(os.environ["SLURM_LOCALID"]))  # of a rank; scheduler and script see no GPU
    # A worker that starts while the scheduler ends would look for it until the allocation's time is over.
    nannies = {"worker_class": "distributed.Nanny", "worker_options": {"death_timeout": 60}}
    with SLURMRunner(**nannies) as runner, Client(runner) as client:
        client.wait_for_workers(runner.n_workers)
        print(daskrun.run(client, teach, find_data(breeds=HELD_OUT), folder, n_steps)[0])
