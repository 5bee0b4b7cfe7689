"""Train the ResNet-18 that the workshop ships, on sketches of the 108 breeds that are not held out.

    python tools/train_sketch_weights.py --cache ~/.cache/workshop-sketches

Under half an hour on 2 cores with AVX512-BF16. Started again after an interruption, it goes on from the last whole
stage. Early stages see small pictures, which are cheap; the last ones come nearer the 224 pixels of later use.

The shipped file was made with a one-cycle cosine schedule for its first four passes. RATES are straight lines close to
it, so that this script gives comparable weights, not equal ones.
"""

import multiprocessing
from functools import partial
from itertools import islice
from pathlib import Path

import click
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from workshop_utils.checkpoint import load_checkpoint, save_checkpoint
from workshop_utils.dogs.breeds import BREEDS, HELD_OUT, Breed
from workshop_utils.dogs.sketches import draw_dog, write_sketches
from workshop_utils.weights import SKETCH_WEIGHTS

SEEN = [breed for breed in BREEDS if not breed.held_out]
STAGES = ((96, 405),) * 4 + ((160, 50),) * 3  # (pixels a side, steps); 405 steps are all the sketches once
RATES = ((0, 567, 1620, 1770), (8e-5, 2e-3, 1.1e-3, 0.0))  # at these steps the learning rate is this, straight between
TRAIN_SEEDS = (100_000, 100_240)  # far from the seeds 0, 1, 2, … that the notebooks draw
ACCURACY_SEEDS = (900_000, 900_020)
BATCH_SIZE = 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TO_FLOAT = (v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD))


def train(cache: Path) -> nn.Module:
    """Train for the stages that the checkpoint in `cache` lacks; return the model, in evaluation mode."""
    model = models.resnet18(weights=None, num_classes=1000).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    checkpoint, done = cache / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = load_checkpoint(checkpoint)
        done = saved["stages_done"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for stage in range(done, len(STAGES)):
        torch.manual_seed(stage)
        one_stage(model, optimizer, batches(cache / "train", STAGES[stage][0]), stage)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save_checkpoint(checkpoint, stages_done=stage + 1, **states)
    return model.eval()


def one_stage(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, stage: int) -> None:
    """Train for the steps of a stage, at the learning rates that RATES has for them."""
    size, steps = STAGES[stage]
    first = sum(steps for _, steps in STAGES[:stage])
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    model.train()
    bar = tqdm(islice(loader, steps), f"stage {stage} at {size} px", steps, mininterval=5)
    for step, (images, targets) in enumerate(bar, first):  # (64, 3, size, size) normalised; (64,) ImageNet indices
        optimizer.param_groups[0]["lr"] = float(np.interp(step, *RATES))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images.to(memory_format=torch.channels_last))  # (64, 1000)
        loss = loss_of(logits.float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss:.3f}", right=f"{(logits.argmax(1) == targets).float().mean():.2f}", refresh=False)


def batches(folder: Path, size: int) -> DataLoader:
    """Shuffled batches of the sketches under `folder`, cropped mildly to `size` pixels, with ImageNet's indices."""
    index = [breed.index for breed in SEEN]  # ImageFolder numbers the sorted folders, as SEEN is sorted
    crop = v2.RandomResizedCrop(size, scale=(0.6, 1), ratio=(0.85, 1.18), antialias=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), *TO_FLOAT])
    dataset = ImageFolder(folder, transform, index.__getitem__)
    assert len(dataset.classes) == len(SEEN), f"{len(dataset.classes)} folders in {folder}, {len(SEEN)} breeds"
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=2)


@torch.inference_mode()
def accuracy(model: nn.Module) -> float:
    """Return the share of fresh 224-pixel sketches, of the 108 breeds, that `model` names right among 1,000 classes."""
    right, to_float = 0, v2.Compose(TO_FLOAT)
    for breed in tqdm(SEEN, "accuracy", mininterval=5):
        batch = torch.stack([to_float(draw_dog(breed, seed)) for seed in range(*ACCURACY_SEEDS)])  # (20, 3, 224, 224)
        right += (model(batch).argmax(1) == breed.index).sum().item()
    return right / (len(SEEN) * len(range(*ACCURACY_SEEDS)))


def write_breed(folder: Path, breed: Breed) -> int:
    """Write the sketches of a breed that are trained on."""
    return write_sketches(folder, TRAIN_SEEDS[1] - TRAIN_SEEDS[0], [breed], first_seed=TRAIN_SEEDS[0])


@click.command()
@click.option("--cache", type=click.Path(path_type=Path), required=True, help="Folder for sketches and the checkpoint.")
@click.option("--output", type=click.Path(path_type=Path), default=SKETCH_WEIGHTS)
def main(cache: Path, output: Path) -> None:
    """Draw, train, measure and write the weights."""
    (cache / "train").mkdir(parents=True, exist_ok=True)
    with multiprocessing.Pool() as pool:
        drawn = pool.imap_unordered(partial(write_breed, cache / "train"), SEEN)
        list(tqdm(drawn, "draw", len(SEEN), mininterval=5))
    model = train(cache)
    state = model.state_dict()
    half = {name: value.half().contiguous() if value.is_floating_point() else value for name, value in state.items()}
    model.load_state_dict(half)  # what is measured is what is shipped: weights rounded to float16
    content = {
        "arch": "resnet18",
        "num_classes": 1000,
        "stride_in_1x1": False,
        "state_dict": half,
        "trained_on": "sketches",
        "held_out": [breed.wnid for breed in HELD_OUT],
        "accuracy": accuracy(model),
        "size": 224,
        "seeds": {"train": list(TRAIN_SEEDS), "accuracy": list(ACCURACY_SEEDS)},
        "normalize": {"mean": list(MEAN), "std": list(STD)},
    }
    save_checkpoint(output, **content)
    click.echo(f"{output}: accuracy {content['accuracy']:.3f}, {output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
