"""JPEGs of a size that photos have, and weights that cost as much as real ones: what the benchmarks read."""

from pathlib import Path

import torch
import torchvision

from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.dogs.sketches import draw_dog
from workshop_utils.photos import list_photos

SIZE = (500, 375)  # pixels, the commonest size in Stanford Dogs


def write_jpegs(folder, n_photos, size=SIZE):
    """Write sketches cut to `size`, at least as wide as high, spread over the breeds; return their paths."""
    width, height = size
    for number in range(n_photos):
        breed = BREEDS[number % len(BREEDS)]
        target = Path(folder, breed.folder)
        target.mkdir(parents=True, exist_ok=True)
        sketch = draw_dog(breed, number, size=width).crop((0, width - height, width, width))
        sketch.save(target / f"{breed.wnid}_{number}.jpg", quality=90)
    return list_photos(str(folder))


def random_weights(folder):
    model = torchvision.models.resnet50()
    path = Path(folder, "resnet50.pt")
    torch.save({"arch": "resnet50", "num_classes": 1000, "state_dict": model.state_dict()}, path)
    return str(path)
