"""What all workers have to reach lies where they do, or the error says which line to type."""

import getpass
import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from samples import sign_in
from waiting import until

from workshop_utils.photos import find_data, list_photos
from workshop_utils.shared import NotShared, new_shared_folder, on_all_workers, shared_folder
from workshop_utils.storage import cache_folder


def test_what_is_shared_lies_in_one_folder_of_this_machine_which_is_the_users_alone(client, tmp_path):
    os.chmod(shared_folder(), 0o755)  # as somebody may have made it
    folder = shared_folder()
    code = "from workshop_utils.shared import shared_folder; print(shared_folder())"
    other = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == folder == shared_folder()
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_a_new_folder_is_empty_and_another_each_time(client, monkeypatch, tmp_path):
    for shared in ("", str(tmp_path / "mounted")):
        monkeypatch.setenv("WORKSHOP_SHARED", shared)
        one, other = new_shared_folder(), new_shared_folder()
        assert one != other and os.listdir(one) == os.listdir(other) == []


def test_a_new_folder_goes_when_the_process_ends_that_asked_for_it_and_not_with_its_fork():
    code = "import os; from workshop_utils.shared import new_shared_folder as new; print(new(), flush=True)"
    code += "; child = os.fork(); child and os.wait(); child and input()"
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        folder = process.stdout.readline().strip()
        process.stdout.close()
        until(lambda: not psutil.Process(process.pid).children())
        assert os.path.isdir(folder)
        process.communicate("\n")
    assert not os.path.exists(folder)


def test_workers_that_do_not_see_this_machines_disk_are_named_with_the_line_to_type(client, tmp_path):
    with pytest.raises(NotShared, match="(?s)gone.*%env WORKSHOP_SHARED="):
        on_all_workers(str(tmp_path / "gone"))


def test_downloaded_photos_that_workers_do_not_see_are_named(client):
    (cache_folder() / "photos").mkdir(parents=True)
    (cache_folder() / "photos" / "complete").touch()  # and no Images, as on another machine
    with pytest.raises(NotShared, match="(?s)photos/Images.*%env WORKSHOP_SHARED="):
        find_data()


def test_the_root_of_a_storage_is_a_folder_for_sharing_too(monkeypatch):
    monkeypatch.setenv("WORKSHOP_SHARED", "memory://")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    assert shared_folder() == "memory://anna"


def test_sketches_are_shared_in_a_folder_that_all_machines_have(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_SHARED", f"{tmp_path}/mounted/")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    source = find_data(1, ["pug"])
    assert source.url == f"{tmp_path}/mounted/anna/sketches-v1-1" and source.weights == "sketches"
    (photo,) = list_photos(source.url)
    whole = os.path.getsize(photo)
    open(photo, "wb").close()  # cut off while it was copied
    find_data(2, ["pug"]), find_data(1, ["pug", "boxer"])
    assert os.path.getsize(photo) == whole and len(list_photos(source.url)) == 2
    assert shared_folder().startswith(f"{tmp_path}/mounted/") and os.path.isdir(shared_folder())
    assert shared_folder() == shared_folder()


def test_each_account_has_a_folder_of_its_own_in_which_no_other_has_to_write(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_SHARED", str(tmp_path))
    asks = shared_folder, new_shared_folder, lambda: find_data(1, ["pug"]).url
    for user in ("anna", "ben"):
        monkeypatch.setattr(getpass, "getuser", lambda user=user: user)
        for ask in asks:
            assert Path(ask()).is_relative_to(tmp_path / user)
        (photo,) = list_photos(find_data(1, ["pug"]).url)
        os.remove(photo)  # the next account can't complete these
    assert len(list_photos(find_data(1, ["pug"]).url)) == 1


@pytest.mark.parametrize("mode", [0o1777, 0o2770, 0o755])
def test_a_shared_folder_that_is_made_is_as_open_as_the_folder_it_is_in(monkeypatch, tmp_path, mode):
    tmp_path.chmod(mode)
    monkeypatch.setenv("WORKSHOP_SHARED", f"{tmp_path}/class/a/")
    own = shared_folder()
    for folder in (tmp_path, tmp_path / "class", tmp_path / "class/a"):
        assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert not os.stat(own).st_mode & 0o002
    (tmp_path / "class/a").chmod(0o700)  # what is there is left as it is
    assert shared_folder() == own and stat.S_IMODE((tmp_path / "class/a").stat().st_mode) == 0o700


def test_sketches_are_shared_in_object_storage(monkeypatch, s3, s3_admin):
    sign_in(monkeypatch, s3)
    monkeypatch.setenv("WORKSHOP_SHARED", "s3://workshop/shared")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    source = find_data(2, ["pug"])
    assert source.url == "s3://workshop/shared/anna/sketches-v1-2"
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
    for refused in ("simplecache::memory://shared", "memory:/shared", "nosuch://shared"):
        monkeypatch.setenv("WORKSHOP_SHARED", refused)
        with pytest.raises(NotShared, match=f"WORKSHOP_SHARED is '{refused}'"):
            new_shared_folder()
