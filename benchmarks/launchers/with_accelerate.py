"""The job for Hugging Face Accelerate:

accelerate launch --multi_gpu --num_processes=2 --rdzv_backend=c10d with_accelerate.py FOLDER

Without MPI, `accelerate launch --cpu` starts one process, whatever the number; what starts several is torchrun's agent,
which it calls --multi_gpu, and the script then says that there is no GPU. Ranks that this agent restarts hang in gloo
with its default rendezvous, `static`, as they fail under torchrun with the same; with `c10d` they meet again.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from shared import BATCH_SIZE, EPOCHS, LR, MOMENTUM, build_model, make_images, step_done
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def train(folder):
    accelerator = Accelerator(cpu=True)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    loader = DataLoader(make_images(), BATCH_SIZE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    checkpoints, first = sorted(Path(folder).glob("epoch_*")), 0
    if checkpoints:
        accelerator.load_state(checkpoints[-1])
        first = int(checkpoints[-1].name.removeprefix("epoch_")) + 1
    for epoch in range(first, EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            step_done(folder, accelerator.process_index, epoch, loss)  # measuring
        accelerator.save_state(Path(folder, f"epoch_{epoch}"))
    accelerator.end_training()


if __name__ == "__main__":
    train(sys.argv[1])
