"""The 120 breeds: names and indices are those of Stanford Dogs and ImageNet, and no two breeds are drawn alike."""

import re
from pathlib import Path

import pytest
from torchvision.models import ResNet50_Weights

from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.labels import ClassNames

PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "stanford-dogs" / "Images"


def test_there_are_120_breeds_in_the_order_of_their_wordnet_ids():
    assert len(BREEDS) == 120
    assert [breed.wnid for breed in BREEDS] == sorted({breed.wnid for breed in BREEDS})


def test_torchvision_gives_each_index_the_same_name():
    def bare(name):
        return re.sub("[^a-z]", "", name.lower())

    categories = ResNet50_Weights.DEFAULT.meta["categories"]
    assert [bare(breed.name) for breed in BREEDS] == [bare(categories[breed.index]) for breed in BREEDS]


def test_each_breeds_folder_finds_its_own_category_though_two_may_share_a_name():
    known = ClassNames(ResNet50_Weights.DEFAULT.meta["categories"])
    assert [known.label_of(breed.folder) for breed in BREEDS] == [breed.index for breed in BREEDS]


@pytest.mark.skipif(not PHOTOS.is_dir(), reason="needs the photos of Stanford Dogs in ../shared/data")
def test_folders_are_named_as_the_photos_are():
    assert [breed.folder for breed in BREEDS] == sorted(folder.name for folder in PHOTOS.iterdir())
