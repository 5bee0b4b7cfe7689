"""JPEGs of a size that photos have, and weights that cost as much as real ones: what the benchmarks read."""

from pathlib import Path

import torch
import torchvision

from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.dogs.sketches import draw_dog

SIZE = (500, 375)  # pixels, the commonest size in Stanford Dogs


def write_jpegs(folder, n_photos):
    """Write sketches cut to SIZE, spread over the breeds."""
    for number in range(n_photos):
        breed = BREEDS[number % len(BREEDS)]
        target = Path(folder, breed.folder)
        target.mkdir(exist_ok=True)
        sketch = draw_dog(breed, number, size=SIZE[0]).crop((0, SIZE[0] - SIZE[1], *SIZE[:1], SIZE[0]))
        sketch.save(target / f"{breed.wnid}_{number}.jpg", quality=90)


def random_weights(folder):
    model = torchvision.models.resnet50()
    path = Path(folder, "resnet50.pt")
    torch.save({"arch": "resnet50", "num_classes": 1000, "state_dict": model.state_dict()}, path)
    return str(path)
