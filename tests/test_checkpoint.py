"""A checkpoint is saved whole or not at all, a bad one is named with the cure, and what it holds is never run."""

import errno
import multiprocessing
import os
import random
import signal
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from samples import sign_in
from waiting import until

from workshop_utils.checkpoint import WeightsError, checkpoint_exists, load_checkpoint, save_checkpoint
from workshop_utils.training.run_checkpoint import RunCheckpoint


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


def run_checkpoint(path):
    return RunCheckpoint(path, 1, {}, {"train_set": None}, None, None, [])


@pytest.mark.parametrize(
    "content",
    [b"", b"not a checkpoint\n" * 100, b"PK\x03\x04", b"\x80\x02.", b"\x80\x05.", b"<html>", b"\xff\xd8\xff"],
)
def test_a_file_that_is_no_checkpoint_is_named_with_the_cure(path, content):
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=f"'{path}' is damaged, or no checkpoint.*Delete it") as caught:
        load_checkpoint(path)
    assert "\x1b" not in str(caught.value) and "weights_only" not in str(caught.value)  # PyTorch's own advice


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.float64(0.1), "numpy.*scalar.*item"),
        (np.zeros(2), "numpy.*as_tensor"),
        (Namespace(lr=1), "argparse.Namespace.*vars"),
        (Path("a"), "pathlib.*str"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    ],
)
def test_the_type_that_a_checkpoint_may_not_hold_is_named_with_the_cure(path, value, named):
    with pytest.raises(TypeError, match=named):
        save_checkpoint(path, epoch=1, value=value)
    assert not os.listdir(path.parent)
    for new_format in (True, False):
        torch.save({"epoch": 1, "value": [value]}, path, _use_new_zipfile_serialization=new_format)
        with pytest.raises(WeightsError, match=f"'{path}'.*{named}") as caught:
            load_checkpoint(path)
        assert "\x1b" not in str(caught.value)


def test_a_bit_that_makes_a_folder_of_weights_is_noticed(path):  # PyTorch would return memory that nobody wrote
    save_checkpoint(path, weights=torch.arange(6.0))
    content = bytearray(path.read_bytes())
    start = -1
    while (start := content.find(b"PK\1\2", start + 1)) >= 0:  # an entry of the zip's directory
        damaged = content.copy()
        damaged[start + 38] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(WeightsError, match="is damaged"):
            load_checkpoint(path)


def test_a_folder_is_no_checkpoint(tmp_path):
    for folder in ("", "/", tmp_path):
        with pytest.raises(IsADirectoryError, match="is a folder"):
            run_checkpoint(folder).resume()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_storage_that_does_not_answer_is_neither_a_new_run_nor_a_damaged_checkpoint(path, number, monkeypatch):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    save_checkpoint(path, step=1)
    for call, said in (("info", OSError), ("open", WeightsError)):
        with monkeypatch.context() as patch, pytest.raises(said, match=os.strerror(number)) as caught:
            patch.setattr(LocalFileSystem, call, fail)
            run_checkpoint(path).resume()
        assert "Delete" not in str(caught.value)


def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(path, tmp_path):
    (tmp_path / "disk").mkdir()
    path.symlink_to(target := tmp_path / "disk" / "run.pt")
    for step in (1, 2):
        save_checkpoint(path, step=step)
        assert path.is_symlink() and load_checkpoint(target) == {"step": step}
    assert os.listdir(target.parent) == ["run.pt"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_checkpoint(path):
    fork = multiprocessing.get_context("fork")
    n_saved = fork.Value("q", lock=False)

    def save():
        torch.set_num_threads(1)  # OpenMP hangs in a fork
        for step in range(1_000_000):
            save_checkpoint(path, step=step, weights=torch.full((1_000_000,), step))
            n_saved.value = step + 1

    for _ in range(10):
        n_saved.value = 0
        process = fork.Process(target=save)
        process.start()
        until(lambda: n_saved.value >= 2)
        time.sleep(random.uniform(0, 0.1))  # to be killed at any point of a save
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        saved = load_checkpoint(path)
        assert (saved["weights"] == saved["step"]).all()
        assert saved["step"] + 1 >= n_saved.value, "what was saved is there"


@pytest.mark.parametrize("url", ["nosuch://bucket/model.pt", "/"])
def test_an_address_that_cannot_be_read_is_named(url):
    with pytest.raises(WeightsError, match=f"'{url}'"):
        load_checkpoint(url)


class RunsCode:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("old_format", [False, True])
def test_code_in_a_checkpoint_is_refused_and_never_run(path, tmp_path, old_format):
    trace = tmp_path / "trace"
    torch.save({"state_dict": RunsCode(f"touch {trace}")}, path, _use_new_zipfile_serialization=not old_format)
    with pytest.raises(WeightsError, match="could run code"):
        load_checkpoint(path)
    assert not trace.exists()


@pytest.mark.smoke
def test_a_checkpoint_is_saved_to_and_loaded_from_object_storage(monkeypatch, s3, s3_admin):
    sign_in(monkeypatch, s3)
    url = "s3://workshop/models/new/model.pt"
    assert not checkpoint_exists(url)
    with pytest.raises(WeightsError, match=f"no file '{url}'"):
        load_checkpoint(url)
    for epoch in (1, 2):  # the second takes the place of the first
        save_checkpoint(url, weights=torch.arange(5), epoch=epoch)
        assert checkpoint_exists(url)
        loaded = load_checkpoint(url)
        assert loaded["epoch"] == epoch and torch.equal(loaded["weights"], torch.arange(5))
    assert s3_admin.ls("workshop/models/new", refresh=True) == ["workshop/models/new/model.pt"]


def test_what_cannot_be_saved_leaves_the_old_checkpoint_in_object_storage(monkeypatch, s3):
    sign_in(monkeypatch, s3)
    url = "s3://workshop/models/kept.pt"
    save_checkpoint(url, epoch=1)
    with pytest.raises(TypeError, match="pathlib"):
        save_checkpoint(url, epoch=2, folder=Path("a"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")  # strangers may only read
    with pytest.raises(PermissionError):
        save_checkpoint(url, epoch=3)
    assert load_checkpoint(url) == {"epoch": 1}


def test_an_error_of_saving_names_the_users_path(path):
    path.mkdir()
    with pytest.raises(IsADirectoryError, match=f"'{path}'$"):
        save_checkpoint(path, epoch=1)
    assert os.listdir(path.parent) == [path.name]
