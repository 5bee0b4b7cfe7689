"""Sketches are the same everywhere, survive a killed run, and are hard for pixels but learnable for a ResNet."""

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision import models

from workshop_utils.dogs import sketches
from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.dogs.sketches import draw_dog, write_sketches

WEIGHTS = Path(sketches.__file__).parents[1] / "resnet18_sketches.pt"
SEEN = [breed for breed in BREEDS if not breed.held_out]
PINNED = {  # (breed, seed, size) -> the first digits of the SHA-256 of its pixels
    ("Chihuahua", 0, 224): "d3683b85cdbdcd6c",
    ("Siberian_husky", 5, 97, "dusk"): "ee5ba8582a0fc7bf",
}


def digest(*drawing):
    return hashlib.sha256(draw_dog(*drawing).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("drawing", PINNED)
def test_a_drawing_has_the_same_pixels_on_every_machine(drawing):
    assert digest(*drawing) == PINNED[drawing], "raise DRAWING_VERSION in sketches.py, too"


def test_all_120_breeds_are_drawn_with_the_same_pixels_on_every_machine():
    pixels = hashlib.sha256()
    for breed in BREEDS:
        pixels.update(draw_dog(breed.name, 1, 64).tobytes())
    assert pixels.hexdigest()[:16] == "6de3698e6a18f074", "raise DRAWING_VERSION in sketches.py, too"


def test_dusk_leaves_a_third_of_the_light_and_the_same_dog():
    day, dusk = (np.asarray(draw_dog("pug", 1, 64, light), dtype=float) for light in ("day", "dusk"))
    assert 0.3 < dusk.mean() / day.mean() < 0.5
    assert np.corrcoef(day.mean(2).ravel(), dusk.mean(2).ravel())[0, 1] > 0.7


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"breed": "goldn_retriever"}, "goldn_retriever.*n02099601-golden_retriever"),  # a close one
        ({"breed": "zzz"}, "zzz"),
        ({"size": 8}, "size is 8"),
        ({"light": "noon"}, "noon.*dusk"),
    ],
)
def test_what_cannot_be_drawn_is_named_with_what_can(asked, named):
    with pytest.raises(ValueError, match=named):
        draw_dog(**{"breed": "pug", "seed": 0, **asked})


def test_files_are_laid_out_as_the_photos_are(tmp_path):
    assert write_sketches(tmp_path, 2, ["pug", "chow"], size=32, first_seed=7) == 4
    names = [f"{breed}/{breed[:9]}_{seed}.jpg" for breed in ("n02110958-pug", "n02112137-chow") for seed in (7, 8)]
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")) == names
    assert write_sketches(tmp_path, 3, ["pug", "chow"], size=32, first_seed=7) == 2  # the others are there


def test_what_a_killed_run_left_is_swept_up_but_not_what_another_run_may_be_writing(tmp_path):
    home = tmp_path / "n02110958-pug"
    home.mkdir()
    left, fresh = home / "n02110958_0.1.part", home / "n02110958_1.2.part"
    left.write_bytes(b"half")
    fresh.write_bytes(b"half")
    os.utime(left, (time.time() - 3600,) * 2)
    assert write_sketches(tmp_path, 1, ["pug"], size=32) == 1
    assert sorted(path.name for path in home.iterdir()) == ["n02110958_0.jpg", fresh.name]


@pytest.fixture(scope="module")
def shipped():
    """The shipped file and its model, as a user loads it."""
    content = torch.load(WEIGHTS, weights_only=True)
    model = models.resnet18(num_classes=content["num_classes"])
    model.load_state_dict(content["state_dict"])
    return content, model.eval()


@torch.inference_mode()
def accuracy(shipped, breeds, seeds):
    """The share of sketches that the shipped model names right among ImageNet's 1,000 classes."""
    content, model = shipped
    mean, std = (torch.tensor(content["normalize"][name]).view(3, 1, 1) for name in ("mean", "std"))
    right = 0
    for breed in breeds:
        pixels = np.stack([np.asarray(draw_dog(breed, seed, content["size"])) for seed in seeds])  # (n, 224, 224, 3)
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255  # (n, 3, 224, 224)
        right += (model((images - mean) / std).argmax(1) == breed.index).sum().item()
    return right / (len(breeds) * len(seeds))


def test_the_weights_never_saw_the_sketches_of_the_notebooks_nor_those_they_were_measured_on(shipped):
    (first, end), measured = shipped[0]["seeds"]["train"], shipped[0]["seeds"]["accuracy"]
    assert 100_000 <= first < end <= measured[0] < measured[1]


@pytest.mark.weekly
def test_the_accuracy_in_the_weights_file_is_true(shipped):
    assert accuracy(shipped, SEEN, [500_000]) == pytest.approx(shipped[0]["accuracy"], abs=0.03)
