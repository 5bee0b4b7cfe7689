"""The job for Ray Train: python with_ray.py RESTARTS FOLDER…"""

import tempfile
from pathlib import Path

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from shared import BATCH_SIZE, EPOCHS, LR, MOMENTUM, N_RANKS, build_model, jobs, make_images, step_done
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def train(config):
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    loader = prepare_data_loader(DataLoader(make_images(), BATCH_SIZE))
    checkpoint, first = ray.train.get_checkpoint(), 0
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "checkpoint.pt"))
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    for epoch in range(first, EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step_done(config["folder"], rank, epoch, loss)  # measuring
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(saved, Path(folder, "checkpoint.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)


if __name__ == "__main__":
    ray.init(num_cpus=N_RANKS, include_dashboard=False, _node_ip_address="127.0.0.1")
    for folder, restarts in jobs():  # measuring
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=N_RANKS),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=restarts)),
        )
        trainer.fit()
