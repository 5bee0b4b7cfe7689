"""A file is written whole or not at all, and an address is opened with what its place needs."""

import os
from pathlib import Path

import pytest
from samples import sign_in

from workshop_utils.checkpoint import checkpoint_exists, save_checkpoint
from workshop_utils.dogs.download import PhotosError, fetch_photos
from workshop_utils.dogs.sketches import write_sketches
from workshop_utils.object_store import local_object_store
from workshop_utils.photos import find_data
from workshop_utils.results import write_tensorboard
from workshop_utils.storage import (
    CacheError,
    absolute_address,
    cache_folder,
    default_storage_options,
    open_address,
    whole_file,
)


def test_a_written_file_takes_its_place_when_the_block_ends_and_its_folder_is_made(tmp_path):
    path = tmp_path / "new" / "file.txt"
    for content in ("first", "second"):
        with whole_file(path) as part:
            assert part.parent == path.parent and part.name.startswith("file.txt.") and part.name.endswith(".part")
            part.write_text(content)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == content and os.listdir(path.parent) == ["file.txt"]


@pytest.mark.parametrize("failure", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(type(failure)), whole_file(path) as part:
        part.write_text("half")
        raise failure
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.txt"]


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    with whole_file(tmp_path / "file.txt") as one, whole_file(tmp_path / "file.txt") as other:
        one.write_text("one")
        other.write_text("other")
    assert (tmp_path / "file.txt").read_text() == "one"  # the block that ended last


def test_s3_is_read_anonymously_only_where_nothing_names_somebody(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_storage_options("s3://bucket/dogs") == {"anon": True}
    assert default_storage_options("/dogs") == default_storage_options("gs://bucket/dogs") == {}
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "FSSPEC_S3_ANON"):
        with monkeypatch.context() as environment:
            environment.setenv(name, "me")
            assert default_storage_options("s3://bucket/dogs") == {}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\n")
    (tmp_path / ".aws" / "config").write_text("[default]\nregion = eu-west-9\n")
    assert default_storage_options("s3://bucket/dogs") == {"anon": True}


@pytest.mark.parametrize("variable", [None, "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"])
@pytest.mark.parametrize("line", ["aws_access_key_id = me", "credential_process = /bin/me", "sso_session = us"])
def test_s3_is_signed_for_where_a_file_of_aws_names_somebody(variable, line, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "elsewhere" if variable else tmp_path / ".aws" / "config"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"[default]\n{line}\n")
    if variable:
        monkeypatch.setenv(variable, str(file))
    assert default_storage_options("s3://bucket/dogs") == {}


def test_s3_is_asked_where_and_as_whom_the_environment_says_now(monkeypatch, s3):
    def store(content):
        fs, path = open_address("s3://workshop/mine.txt", {"config_kwargs": {"retries": {"max_attempts": 0}}})
        fs.pipe_file(path, content)
        return fs.cat_file(path)

    sign_in(monkeypatch, s3)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mistyped")
    with pytest.raises(PermissionError, match="signature"):
        store(b"with another's key")
    sign_in(monkeypatch, s3)
    assert store(b"mine") == b"mine"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Exception, match="connect to the endpoint URL: .http://127.0.0.1:9"):
        store(b"elsewhere")
    monkeypatch.setenv("AWS_PROFILE", "mistyped")
    for _ in range(2):  # the second time, too
        with pytest.raises(Exception, match="mistyped"):
            store(b"to the server of before")
    monkeypatch.delenv("AWS_PROFILE")
    sign_in(monkeypatch, s3)
    assert store(b"there again") == b"there again"


def test_a_local_path_is_taken_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("fold::2.pt", "a::b/c", "simplecache::run", "file:x", "data:x", "local:x", "a://b", "a b/://c", "x:1"):
        for path in (f"{tmp_path}/{name}", Path(tmp_path, name), f"file://{tmp_path}/{name}"):
            assert open_address(path)[1] == str(tmp_path / name)
        if "://" not in name:
            assert open_address(name)[1] == open_address(Path(name))[1] == str(tmp_path / name)


def test_options_come_before_a_user_and_a_port_in_the_address():
    for options, url, user in (({}, "http://far:9870", "me@home"), ({"port": 1, "user": "you"}, "http://far:1", "you")):
        fs, _ = open_address("webhdfs://me%40home@far:9870/dogs", options)
        assert fs.url.startswith(f"{url}/") and fs.pars["user.name"] == user


def test_an_address_is_taken_whole():
    assert open_address("s3://bucket/lr::0.1.pt", {"anon": True})[1] == "bucket/lr::0.1.pt"
    assert open_address("http://[::1]:8000/dogs")[1] == "http://[::1]:8000/dogs"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("simplecache::s3://bucket/run.pt", "simplecache::s3"),
        ("zip://run.pt::/runs.zip", "zip://run.pt::/runs.zip.*unpack"),
        ("s3:/bucket/run.pt", "s3:/bucket/run.pt.*lacks a slash.*pathlib"),
        (Path("s3://bucket/run.pt"), "s3:/bucket/run.pt.*lacks a slash.*pathlib"),
        (Path("file:///run.pt"), "file:/run.pt.*lacks a slash"),
        (Path("simplecache::s3://bucket/run.pt"), "simplecache::s3:/bucket/run.pt.*lacks a slash"),
    ],
)
def test_what_is_no_address_is_refused_and_taken_for_no_local_path(given, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for take in (open_address, checkpoint_exists, lambda path: save_checkpoint(path, step=1)):
        with pytest.raises(ValueError, match=reason):
            take(given)
    assert os.listdir() == []


def test_a_folder_of_this_machine_is_no_address_of_other_storage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for take in (
        lambda place: write_sketches(place, 1, ["pug"]),
        lambda place: write_tensorboard([{"step": 1, "loss": 1.0}], place),
        lambda place: local_object_store(place).__enter__(),
        lambda place: fetch_photos(str(tmp_path), place),
    ):
        for place in ("s3://bucket/folder", Path("s3://bucket/folder")):
            with pytest.raises((ValueError, PhotosError), match="s3:/"):
                take(place)
    monkeypatch.setenv("WORKSHOP_CACHE", "s3://bucket/folder")
    with pytest.raises(CacheError, match="s3://bucket/folder.*WORKSHOP_CACHE"):
        find_data(1, ["pug"])
    assert os.listdir(tmp_path) == []


def test_the_cache_is_where_it_was_when_the_setting_was_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("cache", "./cache", "~/cache"):
        monkeypatch.setenv("WORKSHOP_CACHE", name)
        assert cache_folder() == tmp_path / "cache"


def test_a_user_without_a_home_is_told_where_the_cache_can_be(monkeypatch):
    def no_home(name):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("WORKSHOP_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_dir", no_home)
    with pytest.raises(CacheError, match="export WORKSHOP_CACHE="):
        cache_folder()


def test_a_place_means_the_same_in_every_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for text in ("here", "file://here", "local://here", Path("here")):
        assert absolute_address(text) == f"{tmp_path}/here"
    assert absolute_address("file://localhost/data/x") == absolute_address("file:///data/x") == "/data/x"
    with pytest.raises(TypeError, match="give a string"):
        absolute_address(b"here")
