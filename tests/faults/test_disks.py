"""A full disk, a folder that cannot be written, a damaged checkpoint: what is there stays, and the message says so."""

import errno
import os
import shutil
import subprocess
import zipfile
from collections import OrderedDict
from contextlib import contextmanager

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torch.utils.data import TensorDataset

import daskrun
from workshop_utils.data import find_data
from workshop_utils.loop import checkpoint
from workshop_utils.models import WeightsError, load_checkpoint
from workshop_utils.storage import CacheError, open_address
from workshop_utils.training import train


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


@contextmanager
def stopped_after(n_steps):
    """Interrupt a run in the block when it has saved so many steps."""
    calls = iter(range(n_steps))

    def ranks_told(received):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "ranks_told", ranks_told)
        yield


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_short, cut_out, flip_a_bit])
def test_a_run_whose_latest_checkpoint_is_damaged_goes_on_from_the_one_before_it_and_says_so(damage, tmp_path, told):
    path = tmp_path / "run.pt"
    whole = run(path)
    damage(path)
    with pytest.warns(UserWarning, match=rf"(?s){path}.* goes on from the checkpoint before it, '{path}.before'"):
        numbers, weights = run(path)
    assert numbers["resumed_at"] == 2
    assert all(torch.equal(weights[name], whole[1][name]) for name in weights)
    assert [load_checkpoint(file)["training"]["step"] for file in (path, f"{path}.before")] == [3, 2]
    what = {cut_short: "cut short", cut_out: "with a piece missing", flip_a_bit: "with a bit flipped"}[damage]
    told(f"the latest checkpoint {what}", "goes on from the one before it, and warns; equal to the last bit")


@pytest.mark.parametrize("name", ["lr=[0.1]*?.pt", "run.pt/", "fold::1.pt"])
@pytest.mark.parametrize("place", ["a folder", "memory"])
def test_the_checkpoint_before_is_kept_whatever_the_name(name, place, tmp_path):
    path = f"{tmp_path if place == 'a folder' else 'memory://runs'}/{name}"
    run(path)
    latest = path.rstrip("/")
    assert [load_checkpoint(file)["training"]["step"] for file in (latest, f"{latest}.before")] == [3, 2]
    fs, key = open_address(latest)
    fs.pipe_file(key, b"damaged")
    with pytest.warns(UserWarning, match="goes on from the checkpoint before it"):
        assert run(path)[0]["resumed_at"] == 2


def test_the_checkpoint_before_is_whole_also_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    run(path := tmp_path / "run.pt")
    assert [load_checkpoint(file)["training"]["step"] for file in (path, f"{path}.before")] == [3, 2]
    assert {file.name for file in tmp_path.iterdir()} == {"run.pt", "run.pt.before"}


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_the_checkpoint_before_is_a_file_also_where_the_path_is_a_link(form, tmp_path):
    (disk := tmp_path / "disk").mkdir()
    run(first := disk / "first.pt")
    (path := tmp_path / "run.pt").symlink_to(f"{first}.before")
    assert run(form.format(path))[0]["resumed_at"] == 2
    assert path.is_symlink() and load_checkpoint(f"{first}.before")["training"]["step"] == 3
    assert load_checkpoint(f"{first}.before.before")["training"]["step"] == 2
    disk.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=rf"{path}.*, a link to '{first}.before', whose folder is not there"):
        run(form.format(path))


def test_an_empty_path_and_a_folder_are_no_checkpoint(tmp_path):
    for nothing in ("", "/"):
        with pytest.raises(ValueError, match=f"checkpoint is '{nothing}': give a path"):
            run(nothing)
    with pytest.raises(IsADirectoryError, match=f"'{tmp_path}' is a folder"):
        run(tmp_path)


def test_what_a_killed_save_left_is_removed_and_nothing_else(tmp_path):
    left = [tmp_path / f"run[1].pt{kind}.{'0a' * 16}.part" for kind in ("", ".before")]
    others = [tmp_path / f"run[1].pt.{name}.part" for name in ("mine", "0a" * 15)] + [
        tmp_path / f"run.pt.{'0a' * 16}.part"
    ]
    writing = tmp_path / f"run[1].pt.{'0b' * 16}.part"
    for file in (*left, *others, writing):
        file.touch()
        if file != writing:
            os.utime(file, (0, 0))
    run(path := tmp_path / "run[1].pt")
    assert {*tmp_path.iterdir()} == {path, tmp_path / "run[1].pt.before", *others, writing}


def test_a_run_knows_all_sizes_that_it_had_before_it_was_resumed_twice(tmp_path, monkeypatch):
    sizes = [16, 24, 24, 24, 16, 16]
    images = [torch.zeros(3, size, size) for size in sizes for _ in range(2)]
    monkeypatch.setattr("workshop_utils.loop.batches.DistributedSampler", lambda images, *_, **__: range(len(images)))

    def go():
        model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 2))
        settings = {"batch_size": 2, "checkpoint": tmp_path / "run.pt", "checkpoint_every": 1}
        return train(model, [(image, 0) for image in images], **settings)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), stopped_after(2):
            go()
    assert go()["resumed_at"] == 4


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_folder_that_does_not_answer_is_an_error_not_a_new_run(number, tmp_path, monkeypatch):
    run(path := tmp_path / "run.pt")
    stat = os.stat

    def fail(file, *args, **settings):
        if os.fspath(file) == str(path):
            raise OSError(number, os.strerror(number), str(path))
        return stat(file, *args, **settings)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)):
        patch.setattr(os, "stat", fail)
        run(path)
    assert load_checkpoint(path)["training"]["step"] == 3


def test_a_checkpoint_of_another_model_is_named_with_the_cure(tmp_path):
    run(path := tmp_path / "run.pt")
    saved = load_checkpoint(path)
    del saved["state_dict"]["fc.bias"]
    torch.save(saved, path)
    with pytest.raises(ValueError, match=rf"(?s){path}.*another model.*fc.bias.*Delete it"):
        run(path)


def test_a_damaged_checkpoint_does_not_replace_the_one_before_it(tmp_path):
    path = tmp_path / "run.pt"
    run(path)
    cut_short(path)
    shutil.copy(path, f"{path}.before")
    with pytest.raises(WeightsError, match=f"{path}.before"):
        run(path)
    path.unlink()
    assert run(path)[0]["resumed_at"] == 0  # as a user who deletes it wants


def test_the_checkpoint_before_is_none_of_a_run_that_was_deleted(tmp_path):
    path = tmp_path / "run.pt"
    run(path)
    path.unlink()
    with pytest.raises(KeyboardInterrupt), stopped_after(1):
        run(path)  # which saves its first step
    cut_short(path)
    with pytest.raises(WeightsError, match="run.pt"):
        run(path)


@pytest.mark.parametrize(("of", "call"), [(LocalFileSystem, "open"), (zipfile.ZipFile, "testzip")])
def test_storage_that_does_not_answer_is_no_damaged_checkpoint(of, call, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    run(path := tmp_path / "run.pt")
    whole = path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(WeightsError, match="run.pt' cannot be read: .*Stale"):
        patch.setattr(of, call, fail)
        run(path)
    assert path.read_bytes() == whole and run(path)[0]["resumed_at"] == 3


def test_ranks_warn_once_at_the_client(client, tmp_path):
    path = tmp_path / "run.pt"
    run(path)
    cut_short(path)
    with pytest.warns(UserWarning, match="goes on from the checkpoint before it") as said:
        ended = daskrun.run(client, lambda: run(str(path))[0]["resumed_at"], n_workers=2)
    assert ended == [2, 2] and sum("before it" in str(each.message) for each in said) == 1


def test_a_disk_that_is_full_while_a_checkpoint_is_written_keeps_the_one_before(tmp_path, told):
    with disk(tmp_path / "small", "size=200k") as small:  # one checkpoint fits, and no second
        with pytest.raises(OSError, match="No space left on device.*run.pt"):
            run(small / "run.pt")
        (kept,) = small.iterdir()  # what would be the one before it is no second name of the same file
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
