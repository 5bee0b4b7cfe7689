"""Photos are found wherever they lie, read many at a time in any kind of process, and bad ones are named."""

import errno
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path

import fsspec
import pytest
import torch
from PIL import Image
from samples import ODD_NAMES, http_server
from torchvision.transforms.functional import pil_to_tensor

from workshop_utils import photos
from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.photos import (
    BadPhoto,
    DataSource,
    ImageFolder,
    NoPhotos,
    breed_of,
    decode_photo,
    find_data,
    list_photos,
    read_files,
    train_val_split,
)
from workshop_utils.storage import cache_folder

FOLDER = BREEDS[0].folder
UNREACHABLE = {"anon": True, "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}


def encoded(image, kind, **settings):
    buffer = BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def png_that_claims(width, height):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


GREEN = Image.new("RGB", (64, 48), "green")
NOISE = Image.effect_noise((64, 48), 90).convert("RGB")
BAD = {
    "truncated.jpg": (encoded(NOISE, "JPEG")[:-400], "truncated"),
    "empty.jpg": (b"", "the file is empty"),
    "text.jpg": (b"this is no photo\n" * 20, "not an image that Pillow can read"),
    "scan.jpg": (encoded(GREEN, "TIFF"), "its format is TIFF, and photos are JPEG, .*: convert it"),
    "large.png": (png_that_claims(8_000, 8_000), "8000x8000 pixels, more than 50,000,000"),
    "bomb.png": (png_that_claims(20_000, 20_000), "400000000 pixels"),
    "thread.png": (encoded(Image.new("L", (20_000, 1)), "PNG"), "20000x1 pixels, too narrow"),
    "deep.png": (encoded(Image.new("I;16", (64, 48)), "PNG"), "16-bit pixels: save it with 8 bits"),
    "moving.gif": (
        encoded(GREEN, "GIF", save_all=True, append_images=[NOISE.convert("P")]),
        "animated, 2 frames: save one frame",
    ),
}


# --- finding


@pytest.mark.smoke
def test_photos_are_listed_in_order_and_nothing_else_is(tmp_path):
    folder = tmp_path / FOLDER
    for name in ("b.jpg", "a.JPEG", "c.png", "notes.txt", ".hidden.jpg", "._b.jpg", "deeper/d.jpg", "jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "folder.jpg").mkdir()
    (tmp_path / "flat.jpg").touch()
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "cat.jpg").touch()
    assert list_photos(tmp_path) == [str(folder / name) for name in ("a.JPEG", "b.jpg", "c.png")]
    assert list_photos(f"{tmp_path}/") == list_photos(f"file://{tmp_path}") == list_photos(str(tmp_path))


def test_a_folder_that_is_a_link_is_listed_too_and_one_that_leads_nowhere_is_named(tmp_path, dogs, capsys):
    first, second, *_ = sorted(dogs.iterdir())
    (tmp_path / first.name).symlink_to(first)
    shutil.copytree(second, tmp_path / second.name)
    (tmp_path / "n02085999-nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "README").symlink_to(__file__)  # is no folder, and lies beside them
    assert ImageFolder(tmp_path).classes == [first.name, second.name] and len(list_photos(tmp_path)) == 6
    (said,) = capsys.readouterr().out.splitlines()
    assert "(1)" in said and "n02085999-nowhere" in said and "README" not in said
    list_photos(tmp_path, breeds=[breed_of(f"{first}/1.jpg")[0]])
    assert capsys.readouterr().out == "", "a link of a breed that nobody asked for"
    (tmp_path / second.name / "linked.jpg").symlink_to(next(first.iterdir()))
    (tmp_path / second.name / "gone.jpg").symlink_to(tmp_path / "gone.jpg")
    assert len(list_photos(tmp_path)) == 7
    assert "(2)" in capsys.readouterr().out


@pytest.mark.parametrize("unlisted", ["n02085620-Chihuahua", "dogs"])
def test_a_folder_that_cannot_be_listed_is_an_error_not_a_breed_less(unlisted, tmp_path, dogs, monkeypatch):
    shutil.copytree(dogs, tmp_path / "dogs")
    scandir = os.scandir

    def refuse(folder):
        if str(folder).endswith(unlisted):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(NoPhotos, match=f"cannot be listed .*Permission denied.*{unlisted}"):
        list_photos(tmp_path / "dogs")


@pytest.mark.parametrize("without", [None, "without_obstore"])
def test_what_another_process_uploaded_meanwhile_is_listed(s3, s3_admin, dogs, without, request):
    if without:  # s3fs keeps what it has listed
        request.getfixturevalue(without)
    own = {name: value for name, value in s3.items() if name != "use_listings_cache"}  # as anybody's options are
    photo = next(dogs.glob("*/*.jpg"))
    for n_photos in (1, 2, 3):
        s3_admin.pipe_file(f"workshop/growing-{without}/{photo.parent.name}/{n_photos}.jpg", photo.read_bytes())
        assert len(list_photos(f"s3://workshop/growing-{without}", storage_options=own)) == n_photos


def test_photos_on_s3_are_listed_with_their_protocol_and_folders_keys_are_no_photos(s3, s3_admin, dogs):
    root = "s3://workshop/served/dogs"
    expected = [f"{root}/{Path(path).relative_to(dogs).as_posix()}" for path in list_photos(dogs)]
    for key in (f"{FOLDER}/", f"{FOLDER}/folder.jpg/", f"{FOLDER}/deeper/d.jpg"):
        s3_admin.call_s3("put_object", Bucket="workshop", Key=f"served/dogs/{key}", Body=b"")
    assert list_photos(root, storage_options=s3) == list_photos(root + "/", storage_options=s3) == expected
    s3_admin.rm("workshop/served/dogs/" + FOLDER + "/deeper", recursive=True)


@pytest.mark.parametrize(
    ("url", "storage_options", "reason"),
    [
        ("/no/such/folder", None, "is no folder"),
        ("memory://nothing/here", None, "holds 0 images"),
        ("nosuch://bucket/dogs", None, "cannot be listed.*nosuch"),
        ("s3:/bucket/dogs", None, "cannot be listed.*lacks a slash"),
        ("s3://workshop/dogs", UNREACHABLE, "cannot be listed.*127.0.0.1:9"),
    ],
)
def test_a_place_without_photos_is_named_with_the_cure(url, storage_options, reason):
    with pytest.raises(NoPhotos, match=f"'{url}'.*{reason}.*WORKSHOP_DATA"):
        list_photos(url, storage_options=storage_options)


def test_a_missing_bucket_and_a_missing_folder_on_s3_hold_no_photos(s3):
    for url in ("s3://nosuchbucket/dogs", "s3://workshop/nothing"):
        with pytest.raises(NoPhotos, match=url):
            list_photos(url, storage_options=s3)


def test_some_breeds_can_be_chosen_and_the_error_says_whether_some_are_missing_or_all_photos(tmp_path, dogs):
    chosen = ImageFolder(dogs, breeds=[BREEDS[2].name, BREEDS[0].wnid])
    assert chosen.classes == [BREEDS[0].folder, BREEDS[2].folder] and len(chosen) == 6
    with pytest.raises(NoPhotos, match=f"{BREEDS[7].wnid}, {BREEDS[9].wnid}"):
        list_photos(dogs, breeds=[BREEDS[9], BREEDS[7]])
    with pytest.raises(NoPhotos, match="0 images"):
        list_photos(tmp_path, breeds=[BREEDS[7]])
    with pytest.raises(NoPhotos, match="0 images"):
        list_photos(dogs, breeds=[])


def test_a_photos_folder_names_its_breed_and_another_folder_is_an_error():
    assert breed_of("C:\\dogs\\n02097474-German-short-haired\\a.jpg") == ("n02097474", "German-short-haired")
    with pytest.raises(ValueError, match="n02085620-Chihuahua"):
        breed_of("cats/dog.jpg")


# --- which data


@pytest.mark.smoke
def test_data_is_the_environments_then_downloaded_photos_then_sketches(monkeypatch, dogs):
    sketches = find_data(per_breed=1)
    assert sketches.kind == "sketches" and len(list_photos(sketches.url)) == len(BREEDS)
    photos = cache_folder() / "photos"
    shutil.copytree(dogs, photos / "Images")
    assert find_data(per_breed=1) == sketches  # an unfinished download is not used
    (photos / "complete").touch()
    assert find_data() == DataSource(str(photos / "Images"), "photos")
    monkeypatch.setenv("WORKSHOP_DATA", str(dogs))
    assert find_data() == DataSource(str(dogs), "custom")
    monkeypatch.setenv("WORKSHOP_DATA", "")
    assert find_data().kind == "photos"


def test_the_environments_data_may_be_relative_or_below_home(monkeypatch, dogs):
    monkeypatch.chdir(dogs.parent)
    monkeypatch.setenv("HOME", str(dogs.parent))
    for url in (dogs.name, f"./{dogs.name}/", f"~/{dogs.name}"):
        monkeypatch.setenv("WORKSHOP_DATA", url)
        assert [path for path, _ in ImageFolder(find_data().url).samples] == list_photos(dogs)
        assert find_data().url == str(dogs)  # also for a worker in another folder


def test_the_environments_data_may_lie_on_s3(monkeypatch, s3, dogs):
    monkeypatch.setenv("WORKSHOP_DATA", "s3://workshop/served/dogs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3["client_kwargs"]["endpoint_url"])
    source = find_data()
    dataset = ImageFolder(source.url, storage_options=source.storage_options)
    assert len(dataset) == len(list_photos(dogs)) and dataset[0][0].size == (224, 224)


def test_the_environments_data_without_photos_is_an_error_not_sketches(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    with pytest.raises(NoPhotos, match="WORKSHOP_DATA"):
        find_data()


def test_sketches_are_classified_by_the_weights_that_know_them_unless_told_otherwise(monkeypatch):
    assert DataSource("dogs", "sketches").weights == "sketches"
    assert DataSource("dogs", "photos").weights == DataSource("dogs", "custom").weights == "imagenet"
    for name in ("sketches", "imagenet", "s3://bucket/mine.pt"):
        monkeypatch.setenv("WORKSHOP_WEIGHTS", name)
        assert DataSource("dogs", "photos").weights == name


def test_a_rank_takes_the_clients_weights_whatever_its_own_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKSHOP_WEIGHTS", "mine.pt")
    of_client = [pickle.dumps(DataSource("dogs", kind)) for kind in ("sketches", "photos", "custom")]
    monkeypatch.delenv("WORKSHOP_WEIGHTS")
    assert [pickle.loads(source).weights for source in of_client] == [f"{tmp_path}/mine.pt"] * 3


# --- reading


def test_only_the_sketches_that_are_needed_are_drawn():
    source = find_data(per_breed=2, breeds=BREEDS[5:7])
    assert [breed_of(path)[1] for path in list_photos(source.url)] == [b.name for b in BREEDS[5:7] for _ in range(2)]


@pytest.mark.smoke
def test_labels_are_positions_among_the_sorted_folders(dogs):
    dataset = ImageFolder(str(dogs))
    assert dataset.classes == [breed.folder for breed in BREEDS[:4]]
    assert all(dataset.classes[label] == Path(path).parent.name for path, label in dataset.samples)
    assert dataset.class_to_idx == {name: label for label, name in enumerate(dataset.classes)}
    image, label = dataset[-1]
    assert image.mode == "RGB" and image.size == (224, 224) and label == 3
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.smoke
@pytest.mark.parametrize("where", ["memory", "s3"])
def test_every_place_holds_the_same_photos(where, dogs, s3):
    if where == "memory":
        fsspec.filesystem("memory").put(str(dogs), "/workshop/served/dogs", recursive=True)
    here = ImageFolder(str(dogs), pil_to_tensor)
    options = s3 if where == "s3" else None
    there = ImageFolder(f"{where}://workshop/served/dogs", pil_to_tensor, storage_options=options)
    assert there.classes == here.classes and len(there) == len(here)
    assert all(torch.equal(here[i][0], there[i][0]) and here[i][1] == there[i][1] for i in range(len(here)))


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_s3_is_asked_for_all_files_of_a_batch_before_it_has_answered_for_one(client, request):
    if client == "s3fs":
        request.getfixturevalue("without_obstore")
    everybody, agents = threading.Barrier(32, timeout=120), set()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            everybody.wait()
            agents.add(self.headers["User-Agent"].partition("/")[0])
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.path)))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            self.wfile.write(self.path.encode())

    with http_server(Answer) as server:
        options = {"anon": True, "client_kwargs": {"endpoint_url": server.url}}
        contents = read_files([f"s3://bucket/{n}" for n in range(32)], options)
    assert contents == [f"/bucket/{n}".encode() for n in range(32)]
    assert agents == {{"obstore": "object_store", "s3fs": "aiobotocore"}[client]}


@pytest.mark.parametrize("where", ["local", "s3"])
def test_odd_names_are_read_letter_by_letter(where, served, s3):
    url, options = ("s3://workshop/served/odd", s3) if where == "s3" else (str(served / "odd"), None)
    dataset = ImageFolder(url, pil_to_tensor, storage_options=options)
    assert [Path(path).name for path, _ in dataset.samples] == sorted(ODD_NAMES)
    batch = dataset.__getitems__(range(len(dataset)))
    assert all(torch.equal(image, batch[0][0]) for image, _ in batch)
    assert all(torch.equal(dataset[i][0], batch[0][0]) for i in range(len(dataset)))


def test_a_pattern_in_a_name_is_not_followed_to_other_files(tmp_path):
    (tmp_path / "a1.jpg").write_bytes(b"1")
    (tmp_path / "a[1].jpg").write_bytes(b"[1]")
    paths = [str(tmp_path / name) for name in ("a[1].jpg", "a1.jpg", "a[1].jpg", "a?.jpg")]
    *contents, missing = read_files(paths)
    assert contents == [b"[1]", b"1", b"[1]"] and isinstance(missing, FileNotFoundError)
    assert read_files(tuple(paths[:1])) == [b"[1]"] and read_files([]) == []


# --- several storages in one batch


def test_a_storage_that_cannot_be_opened_costs_no_file_of_another(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"a")
    here, missing = str(tmp_path / "a.jpg"), str(tmp_path / "b.jpg")
    unknown, no_address = "nosuch://bucket/a.jpg", "s3:/bucket/a.jpg"
    for paths in ([here, unknown, missing, no_address, here], [no_address, unknown, here, missing, here]):
        contents = dict(zip(paths, read_files(paths), strict=True))
        assert contents[here] == b"a" and isinstance(contents[missing], FileNotFoundError)
        for path, reason in ((unknown, "nosuch"), (no_address, "lacks a slash")):
            with pytest.raises(BadPhoto, match=f"{path}: cannot be read .*{reason}"):
                decode_photo(contents[path], path)


@pytest.mark.parametrize(("patience_s", "in_turn"), [(math.inf, True), (0, False)])
def test_files_are_handed_to_threads_only_where_a_disk_takes_long(patience_s, in_turn, tmp_path, monkeypatch):
    paths = [str(tmp_path / f"{number}.jpg") for number in range(20)]
    for path in paths:
        Path(path).write_bytes(path.encode())
    readers, read = [], photos._read_local

    def noted(path):
        readers.append(threading.current_thread())
        return read(path)

    monkeypatch.setattr(photos, "_read_local", noted)
    monkeypatch.setattr(photos, "PATIENCE_S", patience_s)
    assert read_files(paths) == [path.encode() for path in paths]
    assert [reader is threading.current_thread() for reader in readers] == [in_turn] * 20


def test_a_slow_disk_is_asked_for_many_files_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(photos, "PATIENCE_S", 0)
    pipes = [str(tmp_path / f"{number}.jpg") for number in range(8)]
    for pipe in pipes:
        os.mkfifo(pipe)

    def answer_last_first():
        for pipe in reversed(pipes):
            with open(pipe, "wb") as file:  # waits until somebody reads
                file.write(pipe.encode())

    threading.Thread(target=answer_last_first, daemon=True).start()
    assert read_files(pipes) == [pipe.encode() for pipe in pipes]


# --- bad files


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_with_the_reason(name, tmp_path):
    content, reason = BAD[name]
    path = tmp_path / FOLDER / name
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(BadPhoto, match=f"^{path}: .*{reason}"):
        ImageFolder(tmp_path)[0]


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA"])
def test_any_colours_that_convert_to_rgb_are_fine(mode):
    image = decode_photo(encoded(GREEN.convert(mode), "PNG"), "x.png")
    assert image.mode == "RGB" and image.size == (64, 48)


def test_a_print_shops_cmyk_jpeg_keeps_its_colours():
    content = encoded(Image.new("RGB", (64, 48), (200, 40, 30)).convert("CMYK"), "JPEG", quality=95)
    assert content[2:11].endswith(b"Adobe")  # whose programs store CMYK inverted; torchvision's decoder sees this red
    image = decode_photo(content, "print.jpg")
    assert image.mode == "RGB" and image.getpixel((5, 5)) == (200, 40, 30)


def test_a_phones_jpeg_with_a_preview_is_no_animation():
    image = decode_photo(encoded(GREEN, "MPO", save_all=True, append_images=[NOISE]), "phone.jpg")
    assert image.mode == "RGB" and image.getpixel((5, 5))[1] > 100


# --- splitting


class Labels:
    def __init__(self, *counts):
        self.samples = [(f"{label}/{n}", label) for label, count in enumerate(counts) for n in range(count)]


@pytest.mark.smoke
@pytest.mark.parametrize("fraction", [0.001, 0.2, 0.5, 0.999])
def test_a_split_is_disjoint_complete_and_stratified(fraction):
    dataset = Labels(10, 2, 1, 40)
    train, val = train_val_split(dataset, fraction, seed=0)
    assert sorted(train.indices + val.indices) == list(range(len(dataset.samples)))
    for label, count in enumerate((10, 2, 1, 40)):
        n_val = sum(dataset.samples[i][1] == label for i in val.indices)
        assert abs(n_val - count * fraction) <= 1
        assert (1 <= n_val <= count - 1) if count > 1 else n_val == 0


def test_another_seed_is_another_split():
    splits = [train_val_split(Labels(50, 50), 0.2, seed)[1].indices for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]


def test_a_split_is_the_same_in_every_process(dogs):
    code = (
        "import json, sys; from workshop_utils.photos import *\n"
        "print(json.dumps(train_val_split(ImageFolder(sys.argv[1]), 0.34, 7)[1].indices))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    command = [sys.executable, "-c", code, str(dogs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout) == train_val_split(ImageFolder(str(dogs)), 0.34, 7)[1].indices, done.stderr


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 20, float("nan")])
def test_a_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(ValueError, match=f"val_fraction is {fraction}"):
        train_val_split(Labels(10), fraction, seed=0)


def photos_of(root, *folders):
    """Write photos of noise, all of one size; folders: (name, {file name: name of the noise}), and return the root."""
    for folder, files in folders:
        (root / folder).mkdir(parents=True)
        for name, noise in files.items():
            pixels = random.Random(noise).randbytes(16 * 16 * 3)
            Image.frombytes("RGB", (16, 16), pixels).save(root / folder / name, "BMP")
    return root


def contents_of(subset):
    paths = [subset.dataset.samples[index][0] for index in subset.indices]
    return set(read_files(paths, subset.dataset.storage_options))


TEN = {f"{n}.bmp": f"first {n}" for n in range(10)}
OTHER_TEN = {f"{n}.bmp": f"second {n}" for n in range(10)}
FIVE_COPIES = {f"copy{n}.bmp": f"first {n}" for n in range(5)}


@pytest.mark.parametrize("where", ["disk", "s3", "s3 without obstore"])
@pytest.mark.parametrize("other_label", [False, True])
def test_copies_of_a_photo_are_on_one_side_of_a_split_and_are_counted(where, other_label, tmp_path, request, capsys):
    first, second = BREEDS[0].folder, BREEDS[1].folder
    contents = {first: TEN, second: OTHER_TEN}
    contents[second if other_label else first] = contents[second if other_label else first] | FIVE_COPIES
    url, options = photos_of(tmp_path, *contents.items()), None
    if where != "disk":
        options = request.getfixturevalue("s3")
        request.getfixturevalue("s3_admin").put(str(tmp_path), f"workshop/{tmp_path.name}", recursive=True)
        url = f"s3://workshop/{tmp_path.name}"
    if where.endswith("obstore"):
        request.getfixturevalue("without_obstore")
    dataset = ImageFolder(url, storage_options=options)
    for seed in range(5):
        train, val = train_val_split(dataset, 0.4, seed)
        assert sorted(train.indices + val.indices) == list(range(25))
        assert len(contents_of(val)) == 8 and contents_of(train).isdisjoint(contents_of(val))
        train_labels, val_labels = ([dataset.samples[i][1] for i in part.indices] for part in (train, val))
        assert set(train_labels) == set(val_labels) == {0, 1}
    (said,) = capsys.readouterr().out.splitlines()
    count, n_photos, n_mislabeled = re.findall(r"\b\d+\b(?!\.bmp)", said.replace(str(url), ""))[:3]
    assert (int(count), int(n_photos), int(n_mislabeled)) == (5, 25, 5 if other_label else 0)


def test_photos_of_one_size_that_differ_are_split_as_ever(tmp_path, dogs, capsys):
    dataset = ImageFolder(photos_of(tmp_path, (BREEDS[0].folder, TEN), (BREEDS[1].folder, OTHER_TEN)))
    for one, labels in ((dataset, Labels(10, 10)), (ImageFolder(dogs), Labels(3, 3, 3, 3))):
        for seed in range(5):
            assert [part.indices for part in train_val_split(one, 0.34, seed)] == [
                part.indices for part in train_val_split(labels, 0.34, seed)
            ]
    assert train_val_split(dataset, 0.34, 0)[1].indices == [2, 4, 6, 12, 13, 19]  # as in the first version
    assert capsys.readouterr().out == ""


def test_of_s3_a_split_reads_nothing_but_copies(tmp_path, s3, s3_admin, monkeypatch):
    photos_of(tmp_path, (BREEDS[0].folder, TEN | FIVE_COPIES))
    s3_admin.put(str(tmp_path), f"workshop/{tmp_path.name}", recursive=True)
    read, asked = photos.read_files, []
    monkeypatch.setattr(photos, "read_files", lambda paths, options: asked.extend(paths) or read(paths, options))
    train_val_split(ImageFolder(f"s3://workshop/{tmp_path.name}", storage_options=s3), 0.4, 0)
    assert sorted(Path(path).name for path in asked) == sorted([*FIVE_COPIES, *(f"{n}.bmp" for n in range(5))])


def test_copies_stay_on_one_side_also_among_samples_that_were_chosen(tmp_path):
    dataset = ImageFolder(photos_of(tmp_path, (BREEDS[0].folder, TEN | FIVE_COPIES)))
    dataset.samples = [(path, label) for path, label in dataset.samples if not path.endswith("/9.bmp")]
    for seed in range(5):
        sides = [
            {Path(dataset.samples[i][0]).read_bytes() for i in part.indices}
            for part in train_val_split(dataset, 0.4, seed)
        ]
        assert not sides[0] & sides[1]


def test_a_photo_that_may_be_a_copy_and_cannot_be_read_is_named(tmp_path):
    dataset = ImageFolder(photos_of(tmp_path, (BREEDS[0].folder, TEN)))
    Path(gone := dataset.samples[3][0]).unlink()
    with pytest.raises(BadPhoto, match=gone):
        train_val_split(dataset, 0.4, 0)


def test_too_much_to_read_is_said_and_split_as_it_is(tmp_path, monkeypatch, capsys):
    dataset = ImageFolder(photos_of(tmp_path, (BREEDS[0].folder, TEN | FIVE_COPIES)))
    monkeypatch.setattr(photos, "MOST_COMPARED_BYTES", 15 * (54 + 16 * 16 * 3) - 1)
    parts = [part.indices for part in train_val_split(dataset, 0.4, 0)]
    assert parts == [part.indices for part in train_val_split(Labels(15), 0.4, 0)]
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_of_several_ranks_the_first_says_what_all_see(tmp_path, monkeypatch, capsys):
    for rank in (1, 0):
        monkeypatch.setattr(photos, "world", lambda rank=rank: (rank, 2))
        dataset = ImageFolder(photos_of(tmp_path / str(rank), (BREEDS[0].folder, TEN | FIVE_COPIES)))
        train_val_split(dataset, 0.4, 0)
        assert len(capsys.readouterr().out.splitlines()) == (rank == 0)


# --- a long list of samples


def own_memory_kb():
    return sum(map(int, re.findall(r"^Private_\w+: +(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)))


def read_all(dataset, grown_kb):
    before = own_memory_kb()
    for index in range(len(dataset.samples)):
        dataset.samples[index]
    grown_kb.value = own_memory_kb() - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_forked_process_copies_nothing_of_what_it_reads_of_the_samples(monkeypatch):
    listed = {f"/dogs/{FOLDER}/{'of a long name ' * 5}{n}.jpg": (n, "") for n in range(100_000)}
    monkeypatch.setattr(photos, "_list_photos", lambda *_: listed)
    dataset, fork = ImageFolder("/dogs"), multiprocessing.get_context("fork")
    assert dataset.samples[1:] == [(path, 0) for path in listed][1:] and dataset.samples[-1] == dataset.samples[99_999]
    grown_kb = fork.Value("l", -1)
    process = fork.Process(target=read_all, args=(dataset, grown_kb))
    process.start()
    process.join()
    assert 0 <= grown_kb.value < 5_000  # with a list of pairs 20,000


def test_a_local_name_that_is_no_utf_8_is_read(tmp_path):
    (tmp_path / FOLDER).mkdir()
    Path(os.fsdecode(bytes(tmp_path / FOLDER) + b"/\xff.jpg")).write_bytes(encoded(GREEN, "JPEG"))
    ((image, label),) = ImageFolder(tmp_path)
    assert image.size == GREEN.size and label == 0
