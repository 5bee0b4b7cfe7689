"""A file is written whole or not at all, and an address is opened with what its place needs."""

import os

import pytest

from workshop_utils.storage import default_storage_options, open_address, whole_file


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
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]")
    assert default_storage_options("s3://bucket/dogs") == {}


def test_an_address_is_opened_with_its_own_options_before_the_workshops():
    fs, path = open_address("s3://bucket/dogs", {"anon": True, "config_kwargs": {"max_pool_connections": 7}})
    assert (fs.anon, path, fs.config_kwargs["max_pool_connections"]) == (True, "bucket/dogs", 7)
    with pytest.raises(ValueError, match="nosuch"):
        open_address("nosuch://bucket/dogs")
