"""A file is written whole or not at all, and an address is opened with what its place needs."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from samples import sign_in

from workshop_utils.data import find_data, list_photos
from workshop_utils.storage import (
    CacheError,
    NotShared,
    cache_folder,
    default_storage_options,
    on_all_workers,
    open_address,
    shared_folder,
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


def test_options_of_botocore_may_be_none():
    fs, _ = open_address("s3://bucket/dogs", {"anon": True, "config_kwargs": None})
    assert fs.config_kwargs["max_pool_connections"] == 64


def test_an_address_is_opened_with_its_own_options_before_the_workshops():
    fs, path = open_address("s3://bucket/dogs", {"anon": True, "config_kwargs": {"max_pool_connections": 7}})
    assert (fs.anon, path, fs.config_kwargs["max_pool_connections"]) == (True, "bucket/dogs", 7)
    with pytest.raises(ValueError, match="nosuch"):
        open_address("nosuch://bucket/dogs")


def test_without_a_setting_files_for_all_workers_lie_in_a_new_folder_of_this_machine(client):
    one, other = shared_folder(), shared_folder()
    assert one != other and os.path.isdir(one) and os.path.isdir(other)


def test_workers_that_do_not_see_this_machines_disk_are_named_with_the_line_to_type(client, tmp_path):
    with pytest.raises(NotShared, match="(?s)gone.*%env WORKSHOP_SHARED="):
        on_all_workers(str(tmp_path / "gone"))


def test_a_user_without_a_home_is_told_where_the_cache_can_be(monkeypatch):
    def no_home(name):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("WORKSHOP_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_dir", no_home)
    with pytest.raises(CacheError, match="export WORKSHOP_CACHE="):
        cache_folder()


def test_sketches_are_shared_in_a_folder_that_all_machines_have(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_SHARED", f"{tmp_path}/mounted/")
    source = find_data(1, ["pug"])
    assert source.url == f"{tmp_path}/mounted/sketches-v1-1" and source.weights == "sketches"
    (photo,) = list_photos(source.url)
    whole = os.path.getsize(photo)
    open(photo, "wb").close()  # cut off while it was copied
    find_data(2, ["pug"]), find_data(1, ["pug", "boxer"])
    assert os.path.getsize(photo) == whole and len(list_photos(source.url)) == 2
    assert shared_folder().startswith(f"{tmp_path}/mounted/") and os.path.isdir(shared_folder())


def test_who_reads_shared_sketches_while_they_are_copied_reads_whole_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_SHARED", str(tmp_path / "mounted"))
    photo = Path(list_photos(find_data(1, ["pug"]).url)[0])
    ours = photo.read_bytes()
    other = ours + b" "  # its size differs, so it is copied again
    seen, copied = set(), threading.Event()

    def read():
        while not copied.is_set():
            seen.add(photo.read_bytes())

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for _ in range(300):
            with whole_file(photo) as part:
                part.write_bytes(other)
            find_data(1, ["pug"])
        copied.set()
        reading.result()
    assert seen == {ours, other} and photo.read_bytes() == ours


def test_sketches_are_shared_in_object_storage(monkeypatch, s3, s3_admin):
    sign_in(monkeypatch, s3)
    monkeypatch.setenv("WORKSHOP_SHARED", "s3://workshop/shared")
    source = find_data(2, ["pug"])
    assert source.url == "s3://workshop/shared/sketches-v1-2"
    paths = list_photos(source.url, storage_options=source.storage_options)
    assert len(paths) == 2 and paths[0].startswith(source.url)
    written = s3_admin.find("workshop/shared", detail=True, refresh=True)
    assert find_data(2, ["pug"]) == source and s3_admin.find("workshop/shared", detail=True, refresh=True) == written


def test_shared_storage_that_cannot_be_written_is_named(monkeypatch, s3):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3["client_kwargs"]["endpoint_url"])
    monkeypatch.setenv("WORKSHOP_SHARED", "s3://workshop/mine")
    with pytest.raises(NotShared, match="s3://workshop/mine.*AWS_ACCESS_KEY_ID"):
        find_data(1, ["pug"])


def test_a_shared_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKSHOP_SHARED", str(tmp_path / "file"))
    with pytest.raises(NotShared, match="file"):
        shared_folder()
