"""What is drawn in a run never repeats what was drawn for something else."""

from itertools import product

import torch
from torch.utils.data import Dataset

from workshop_utils.training.batches import DATASET, EVALUATION, LAYERS, ORDER, TrainBatches, derived_seed

PURPOSES = (ORDER, DATASET, LAYERS, EVALUATION)


def test_no_two_purposes_places_or_seeds_share_a_seed():
    places = [(), *((step,) for step in range(30)), *product(range(30), range(8))]
    seeds = {derived_seed(seed, purpose, *place) for seed in range(5) for purpose in PURPOSES for place in places}
    assert len(seeds) == 5 * len(PURPOSES) * len(places)


class Drawn(Dataset):
    """Images that hold their index and what torch draws for them."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand((), dtype=torch.float64)]), 0


def drawn(seed, epoch):
    """Return (images (12, 2), what a layer of each step draws (3, 1)) of an epoch in three steps."""
    batches = TrainBatches(Drawn(), batch_size=4, seed=seed, num_workers=0)
    steps = [(images, torch.rand(1, dtype=torch.float64)) for images, _, _ in batches.of_epoch(epoch, 3 * epoch)]
    images, layers = zip(*steps, strict=True)
    return torch.cat(images), torch.stack(layers)


def test_the_second_epoch_of_one_seed_is_not_the_first_of_the_next():
    first, second, neighbour = (drawn(*which)[0][:, 0].tolist() for which in ((0, 0), (0, 1), (1, 0)))
    assert sorted(first) == sorted(second) == sorted(neighbour) == list(range(12))
    assert len({tuple(order) for order in (first, second, neighbour)}) == 3


def test_what_layers_draw_is_not_what_the_dataset_drew():
    images, layers = drawn(0, 0)
    everything = [*images[:, 1:].flatten().tolist(), *layers.flatten().tolist()]
    assert len(set(everything)) == len(everything)
