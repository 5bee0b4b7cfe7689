"""A full disk, a folder that cannot be written, a damaged checkpoint: what is there stays, and the message says so."""

import os
import subprocess
from collections import OrderedDict
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from workshop_utils.checkpoint import WeightsError, load_checkpoint
from workshop_utils.photos import find_data
from workshop_utils.storage import CacheError
from workshop_utils.train import train


def run(checkpoint, **settings):
    """Train for three steps, with a checkpoint of 130 KB after each; return (numbers, weights)."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(3072, 5)))
    images = TensorDataset(torch.randn(12, 3, 32, 32), torch.arange(12) % 5)
    numbers = train(model, images, batch_size=4, lr=0.01, checkpoint=checkpoint, checkpoint_every=1, **settings)
    return numbers, model.state_dict()


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1000])


@contextmanager
def disk(folder, options):
    """Mount a small disk in memory at `folder`."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "workshop-test", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def cut_out(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + content[len(content) // 2 + 64 :])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_short, cut_out, flip_a_bit])
def test_a_run_whose_checkpoint_is_damaged_says_so_with_the_cure_and_leaves_it(damage, tmp_path, told):
    run(path := tmp_path / "run.pt")
    damage(path)
    damaged = path.read_bytes()
    with pytest.raises(WeightsError, match=f"'{path}' is damaged.*Delete it, or give another path"):
        run(path)
    assert path.read_bytes() == damaged
    what = {cut_short: "cut short", cut_out: "with a piece missing", flip_a_bit: "with a bit flipped"}[damage]
    told(f"the latest checkpoint {what}", "an error with the path, the reason and the cure")


def test_a_disk_that_is_full_while_a_checkpoint_is_written_keeps_the_one_before(tmp_path, told):
    with disk(tmp_path / "small", "size=200k") as small:  # one checkpoint fits, and no second
        with pytest.raises(OSError, match="No space left on device.*run.pt"):
            run(small / "run.pt")
        (kept,) = small.iterdir()
        assert kept.name == "run.pt" and load_checkpoint(kept)["training"]["step"] == 1
    told(
        "the disk is full while a checkpoint is written", "an error; the checkpoint before it stays, and can be loaded"
    )


@pytest.mark.parametrize(("options", "why"), [("size=100k", "No space left"), ("ro", "Read-only")])
def test_a_cache_that_is_full_or_cannot_be_written_is_named_with_the_cure(tmp_path, monkeypatch, told, options, why):
    with disk(tmp_path / "cache", options) as cache:
        monkeypatch.setenv("WORKSHOP_CACHE", str(cache))
        with pytest.raises(CacheError, match=f"(?s){cache}.*{why}.*WORKSHOP_CACHE"):
            find_data()
    told(f"the cache folder: {why.lower()}", "an error with the folder, the reason and the cure")
