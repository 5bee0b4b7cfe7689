"""Each line of the page of limits is true: a test for each, and no line without one."""

import io
import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torchvision
from distributed import LocalCluster, get_client, worker_client
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset
from torchvision.models import resnet18

import daskrun
from workshop_utils.checkpoint import load_checkpoint, save_checkpoint
from workshop_utils.classify import classify
from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.dogs.sketches import draw_dog
from workshop_utils.labels import ClassNames, class_names
from workshop_utils.photos import MOST_COMPARED_BYTES, ImageFolder, breed_of, list_photos
from workshop_utils.reading.decode import FORMATS, MAX_ASPECT, MAX_PIXELS, BadPhoto, decode_photo
from workshop_utils.reading.s3 import FAILURES, PAUSE_S
from workshop_utils.train import evaluate, train
from workshop_utils.weights import WeightsError, load_resnet, with_new_head

PAGE = (Path(__file__).parents[1] / "docs/limits.md").read_text(encoding="utf-8")
LINES = [line.removeprefix("- ") for line in PAGE.splitlines() if line.startswith("- ")]
TESTED = []
CHIHUAHUA, BOXER = BREEDS[0], next(breed for breed in BREEDS if breed.name == "boxer")
DOG = draw_dog("beagle", 1)


def holds(beginning):
    """Say which line of the page a test holds, by its first words."""
    TESTED.append(beginning)
    return lambda test: test


def test_every_line_of_the_page_has_a_test():
    assert len(LINES) > 20
    assert [line for line in LINES if sum(line.startswith(known) for known in set(TESTED)) != 1] == []
    assert [known for known in TESTED if not any(line.startswith(known) for line in LINES)] == []


def stored(image=DOG, kind="JPEG", **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def refusal(content):
    with pytest.raises(BadPhoto) as caught:
        decode_photo(content, "photo")
    return str(caught.value)


def folders(root, *names, content=None):
    """Make a folder of one photo for each name, and return the root."""
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "1.jpg").write_bytes(content or stored())
    return root


# --- files


@holds("A photo's name ends in")
def test_names_of_photos_have_these_endings(tmp_path):
    endings = re.findall(r"`(\.\w+)`", LINES[0])
    folder = tmp_path / CHIHUAHUA.folder
    folder.mkdir()
    for ending in [*endings, *map(str.upper, endings)]:
        (folder / f"a{ending}").write_bytes(stored())
    for other in (".txt", ".heic", ".avif", ".tif", ".jpg.part", ""):
        (folder / f"b{other}").touch()
    assert {Path(path).suffix.lower() for path in list_photos(tmp_path)} == set(endings)
    assert len(list_photos(tmp_path)) == 2 * len(endings)


@holds("What is in the file counts")
@pytest.mark.parametrize("kind", FORMATS)
def test_these_formats_are_read(kind, tmp_path):
    assert kind in LINES[1].upper()
    path = folders(tmp_path, CHIHUAHUA.folder, content=stored(kind=kind)) / CHIHUAHUA.folder / "1.jpg"
    assert ImageFolder(tmp_path)[0][0].size == DOG.size and decode_photo(path.read_bytes(), "x").mode == "RGB"


@holds("A file in another format")
@pytest.mark.parametrize("kind", ["AVIF", "HEIC", "TIFF", "JPEG2000", "PPM", "ICO", "TGA"])
def test_another_format_is_named(kind):
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
    said = refusal(heic if kind == "HEIC" else stored(DOG.resize((64, 64)), kind))
    assert f"its format is {kind}, and photos are {', '.join(FORMATS)}" in said and "Pillow can" not in said


@pytest.mark.parametrize("content", [b"n", b"no", b"BM", b"BM\0", b"\xff\xd8\xff"])
def test_a_file_of_a_few_bytes_is_no_photo(content):
    assert "Pillow can" in refusal(content)


@pytest.mark.parametrize(
    ("brand", "kind"), [(b"mif1", "HEIC"), (b"heix", "HEIC"), (b"avis", "AVIF"), (b"isom", "ISOM")]
)
def test_relatives_of_heic_and_avif_have_their_common_name(brand, kind):
    assert f"its format is {kind}," in refusal(b"\0\0\0\x18ftyp" + brand + bytes(100))


def test_a_damaged_file_is_not_called_another_format():
    assert "a damaged JPEG" in refusal(stored()[:20] + b"garbage" * 20)


WHITE, HIDDEN = (255, 255, 255), (200, 10, 10)


def half_transparent(mode, kind):
    """Return a file whose left half is opaque, and whose right half is transparent over another colour."""
    if mode in ("RGB", "P", "L"):  # one colour is transparent
        image = Image.new("RGB", (8, 8), "blue")
        image.paste(HIDDEN, (4, 0, 8, 8))
        image = image.convert(mode, palette=Image.Palette.ADAPTIVE) if mode == "P" else image.convert(mode)
        hidden = HIDDEN if mode == "RGB" else image.getpixel((7, 0))
        return stored(image, kind, transparency=hidden)
    image = Image.new(mode, (8, 8), (0, 0, 255, 255) if mode == "RGBA" else (29, 255))
    image.paste((*HIDDEN, 0) if mode == "RGBA" else (90, 0), (4, 0, 8, 8))
    return stored(image, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))


@holds("What is transparent becomes white")
@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGBA", "PNG"), ("RGBA", "WEBP"), ("LA", "PNG"), ("RGB", "PNG"), ("P", "PNG"), ("L", "PNG"), ("P", "GIF")],
)
def test_transparency_is_white(mode, kind):
    image = decode_photo(half_transparent(mode, kind), "photo")
    grey = image.getpixel((0, 0))[0] == image.getpixel((0, 0))[2]
    assert image.mode == "RGB" and image.getpixel((7, 7)) == WHITE
    assert image.getpixel((0, 0)) == (0, 0, 255) or (grey and mode in ("L", "LA") and image.getpixel((0, 0)) != WHITE)


@holds("What is transparent becomes white")
def test_half_of_the_opacity_is_half_white_and_an_opaque_photo_stays_as_it_is():
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert decode_photo(stored(half, "PNG"), "photo").getpixel((0, 0)) == pytest.approx((127, 127, 127), abs=1)
    opaque = DOG.convert("RGBA")
    assert np.array_equal(np.asarray(decode_photo(stored(opaque, "PNG"), "photo")), np.asarray(DOG.convert("RGB")))


def exif(orientation):
    about = Image.Exif()
    about[0x0112] = orientation
    return about.tobytes()


@holds("A photo is turned as its EXIF data says")
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_photo_is_turned_also_if_it_has_transparency(mode):
    upright = Image.new(mode, (30, 20), "red")
    assert decode_photo(stored(upright, "PNG", exif=exif(6)), "photo").size == (20, 30)
    assert decode_photo(stored(upright, "PNG", exif=b"Exif\0\0nonsense"), "photo").size == (30, 20)


def png(bits, kind, row, transparent=None):
    """Return a PNG of 4 x 4 pixels, which Pillow would not write. kind: 0 for grey, 2 for colours."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 4, 4, bits, kind, 0, 0, 0))]
    chunks += [(b"tRNS", transparent)] if transparent else []
    chunks += [(b"IDAT", zlib.compress(b"".join(b"\0" + row for _ in range(4)))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


@holds("What is transparent becomes white")
@pytest.mark.parametrize(
    ("bits", "row", "shown"),
    [(1, b"\x50", [0, 255, 0, 255]), (2, b"\x1b", [0, 255, 170, 255]), (4, b"\x51\xf0", [85, 255, 255, 0])],
)
def test_a_transparent_grey_of_few_bits_is_white(bits, row, shown):
    image = decode_photo(png(bits, 0, row, transparent=b"\0\1"), "photo")
    assert [image.getpixel((x, 0))[0] for x in range(4)] == shown


@holds("What is transparent becomes white")
@pytest.mark.parametrize(("opacity", "shown"), [((0, 0), [200, 200]), ((0, 255), [255, 200])])
def test_a_bmp_without_any_opacity_is_opaque(opacity, shown):
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)  # BITMAPV4HEADER, BI_BITFIELDS
    header = struct.pack("<IiiHHIIiiII", 108, 2, 1, 1, 32, 3, 8, 0, 0, 0, 0) + masks + bytes(52)
    pixels = b"".join(bytes([0, 0, 200, alpha]) for alpha in opacity)
    image = decode_photo(struct.pack("<2sIHHI", b"BM", 130, 0, 0, 122) + header + pixels, "photo")
    assert [image.getpixel((x, 0))[0] for x in range(2)] == shown and image.getpixel((1, 0)) == (200, 0, 0)


@holds("Grey images with 16 bits")
def test_sixteen_bits():
    assert "16-bit" in refusal(stored(Image.new("I;16", (40, 30)), "PNG"))
    assert decode_photo(png(16, 2, b"\x80\x12" * 12), "photo").getpixel((0, 0)) == (128, 128, 128)
    assert "16-bit" in refusal(png(16, 2, b"\x80\x12" * 12, transparent=b"\0\1" * 3))


@holds("An animation is refused")
def test_animations():
    other = Image.new("RGB", DOG.size, "red")
    for kind in ("GIF", "WEBP", "PNG"):
        assert "animated, 2 frames" in refusal(stored(kind=kind, save_all=True, append_images=[other]))
    assert decode_photo(stored(kind="MPO", save_all=True, append_images=[other]), "photo").size == DOG.size


@holds("A JPEG in CMYK")
def test_cmyk():
    assert decode_photo(stored(Image.new("CMYK", (8, 8), (0, 255, 255, 0))), "photo").getpixel((3, 3))[0] > 200


def noisy(width=600, height=400):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


@holds("A file that was cut off")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_half_a_file(kind):
    whole = stored(noisy(), kind)
    refusal(whole[: len(whole) // 2])


def zeros_from(content, part):
    kept = int(len(content) * part)
    return content[:kept] + bytes(len(content) - kept)


@holds("A JPEG whose last part is zeros")
@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("settings", [{}, {"progressive": True}, {"exif": exif(6)}], ids=str)
def test_zeros_at_the_end_of_a_jpeg(part, settings):
    whole = stored(noisy(), **settings)
    refusal(zeros_from(whole, part))
    thumbnail = stored(DOG.resize((60, 60)))
    with_thumbnail = whole[:2] + b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail + whole[2:]
    assert decode_photo(with_thumbnail, "photo").size in ((600, 400), (400, 600))
    assert "zeros" in refusal(zeros_from(with_thumbnail, 0.99))  # a thumbnail's end is not the photo's
    for after in (bytes(1), bytes(5000), b"trailer of a phone" + bytes(600)):
        assert decode_photo(whole + after, "photo").size in ((600, 400), (400, 600))


@holds("A JPEG whose last part is zeros")
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_zeros_at_the_end_of_a_phones_photo_with_a_thumbnail(part):
    begin = stored(DOG.resize((60, 60)))
    segment = b"\xff\xe1" + (len(begin) + 2).to_bytes(2, "big") + begin
    phone = stored(noisy(), "MPO", save_all=True, append_images=[DOG])
    phone = phone[:2] + b"\xff" + segment + phone[2:]  # a segment may begin with several bytes of FF
    first = phone.index(b"\xff\xd9", 10_000)
    refusal(zeros_from(phone, part * first / len(phone)))


@holds("Damage that leaves a file readable")
def test_what_is_not_noticed():
    for kind in ("WEBP", "BMP"):
        assert decode_photo(zeros_from(stored(noisy(), kind), 0.5), "photo").size == (600, 400)
    changed = bytearray(stored(noisy()))
    changed[len(changed) // 2] ^= 0x10
    assert decode_photo(bytes(changed), "photo").size == (600, 400)


@holds("A photo has at most")
def test_sizes():
    line = next(line for line in LINES if line.startswith("A photo has at most"))
    assert f"{MAX_PIXELS:,} pixels" in line and f"{MAX_ASPECT} times" in line
    assert "too narrow" in refusal(stored(Image.new("L", (MAX_ASPECT * 10 + 1, 10))))
    assert decode_photo(stored(Image.new("L", (MAX_ASPECT * 10, 10))), "photo").height == 10
    side = int(MAX_PIXELS**0.5) + 1
    assert "more than 50,000,000" in refusal(stored(Image.new("1", (side, side)), "PNG"))


# --- folders


@holds("Photos lie directly in folders")
@pytest.mark.parametrize("folder", ["n02085620-Chihuahua", "n02085620_Chihuahua", "n02085620"])
def test_layouts(folder, tmp_path):
    assert f"`{folder}`" in PAGE
    dataset = ImageFolder(folders(tmp_path, folder, BOXER.folder), breeds=["Chihuahua"])
    assert dataset.classes == ["n02085620-Chihuahua"] and len(dataset) == 1
    assert breed_of(dataset.samples[0][0]) == ("n02085620", "Chihuahua")


@holds("Photos lie directly in folders")
def test_a_name_with_a_backslash_is_a_photo(tmp_path):
    (folders(tmp_path, CHIHUAHUA.folder) / CHIHUAHUA.folder / "a\\b.jpg").write_bytes(stored())
    assert [image.size for image, label in ImageFolder(tmp_path)] == [DOG.size] * 2


def test_imagenets_other_classes_are_known_by_their_ids(tmp_path):
    dataset = ImageFolder(folders(tmp_path, "n01440764", "n02085620"))
    assert dataset.classes == ["n01440764", "n02085620-Chihuahua"]


@holds("One line says how many other files")
def test_what_is_left_out_is_said_once(tmp_path, capsys):
    folders(tmp_path, CHIHUAHUA.folder, "cats", ".git")
    for name in ("a.HEIC", "b.avif", "c.tif", "notes", ".hidden.jpg"):
        (tmp_path / CHIHUAHUA.folder / name).touch()
    list_photos(tmp_path)
    said = "files (4): .avif, .heic, .tif, no extension; folders without a WordNet id (1), such as 'cats'.\n"
    assert capsys.readouterr().out == f"Left out of {tmp_path}: {said}"
    list_photos(tmp_path)
    assert capsys.readouterr().out == ""
    for number in range(100):
        (tmp_path / CHIHUAHUA.folder / f"frame.{number}\n").touch()
    list_photos(tmp_path)
    assert len(said := capsys.readouterr().out) < 300 and len(said.splitlines()) == 1 and "files (104)" in said


def test_nothing_is_said_where_nothing_is_left_out(dogs, s3, capsys):
    list_photos(dogs, breeds=[CHIHUAHUA])
    list_photos("s3://workshop/served/dogs", storage_options=s3, breeds=[CHIHUAHUA])
    assert capsys.readouterr().out == ""


@holds("A slash more in a key of S3")  # see tests/reading/test_s3.py
@holds("`train_val_split` puts")  # see tests/test_photos.py
def test_the_page_has_the_size_up_to_which_copies_are_looked_for():
    assert f"more than {MOST_COMPARED_BYTES / 1e9:.0f} GB" in next(line for line in LINES if "train_val_split" in line)


@holds("Hidden files, hidden folders")
def test_hidden_and_deeper_files_are_no_photos(tmp_path):
    folders(tmp_path, CHIHUAHUA.folder, f"{CHIHUAHUA.folder}/deeper")
    (tmp_path / CHIHUAHUA.folder / "._1.jpg").touch()
    assert list_photos(tmp_path) == [str(tmp_path / CHIHUAHUA.folder / "1.jpg")]


@holds("`ImageFolder` refuses two folders")
@pytest.mark.parametrize(
    "other",
    [
        "n02085620-chihuahua",
        "n02085620-Chihuahua - Copy",
        "n02085620-Chihuahua (1)",
        "n02085620-Chihuahua ",
        "n02085620",
        "n02085620_Chihuahua",
    ],
)
def test_one_breed_is_one_label(other, tmp_path):
    folders(tmp_path, CHIHUAHUA.folder, other, BOXER.folder)
    with pytest.raises(ValueError, match="one WordNet id") as caught:
        ImageFolder(tmp_path)
    assert repr(CHIHUAHUA.folder) in str(caught.value) and repr(other) in str(caught.value)


def test_composed_and_decomposed_letters_are_one_name_and_are_told_apart_in_the_error(tmp_path):
    folders(tmp_path, "n00000001-W\u00f6lfe", "n00000001-Wo\u0308lfe")
    with pytest.raises(ValueError, match=r"W\\xf6lfe.*Wo\\u0308lfe|Wo\\u0308lfe.*W\\xf6lfe"):
        ImageFolder(tmp_path)


# --- names of classes


IMAGENET = torchvision.models.ResNet50_Weights.DEFAULT.meta["categories"]


@holds("A folder's breed is known by its WordNet id")
def test_the_id_decides():
    known = ClassNames(["boxer", "Chihuahua", "wolf"])
    assert known.label_of("n02085620-boxer") == 1
    assert ClassNames(["boxer", "wolf"]).label_of("n02085620-boxer") is None  # a Chihuahua, which it does not know
    assert known.label_of("n00000001-Wolf") == 2 and known.label_of("n00000001") is None
    assert ClassNames(["n02123045-tabby"]).label_of("n02124075-tabby") is None  # another class
    assert ClassNames(["n02123045-tabby"]).label_of("tabby") == 0
    for twice in ("n02012849-crane", "n02963159-Cardigan", "n02963159-cardigan", "n03710721-maillot"):
        assert ClassNames(IMAGENET).label_of(twice) is None
    assert [ClassNames(IMAGENET).label_of(breed.wnid) for breed in BREEDS] == [breed.index for breed in BREEDS]
    assert [ClassNames(IMAGENET).label_of(breed.folder) for breed in BREEDS] == [breed.index for breed in BREEDS]


@pytest.mark.parametrize(
    "pair",
    [
        ("cat+", "cat-"),
        ("C", "C++"),
        ("\u00c4", "A"),
        ("type 1", "type-1"),
        ("1.5", "15"),
        ("-10", "10"),
        ("1_12", "11_2"),
        ("\u0e40\u0e2a\u0e37\u0e2d", "\u0e40\u0e2a\u0e37\u0e49\u0e2d"),  # Thai: tiger, shirt
        ("\u30da\u30c3\u30c8", "\u30d9\u30c3\u30c9"),  # Japanese: pet, bed
    ],
)
def test_names_that_differ_in_an_accent_or_a_sign_are_two(pair):
    known = ClassNames(["something else", *pair])
    assert [known.label_of(name) for name in pair] == [1, 2]
    assert [known.label_of(f"n00000001-{name}") for name in pair] == [1, 2]
    assert ClassNames([pair[0]]).label_of(pair[1]) is None


@holds("Case, hyphens between letters")
def test_names_that_differ_in_case_or_hyphens_are_one_unless_both_are_there():
    for written in ("west-highland white_terrier", "West Highland White Terrier", "WESTHIGHLANDWHITETERRIER"):
        assert ClassNames(["pug", "West Highland white terrier"]).label_of(written) == 1
    assert ClassNames(["Lo\u0308wchen"]).label_of("l\u00f6wchen") == 0  # composed and decomposed
    known = ClassNames(["Cardigan", "cardigan"])
    assert [known.label_of(name) for name in ("Cardigan", "cardigan", "n02113186", "CARDIGAN")] == [0, 1, 0, None]
    assert ClassNames(["n01440764-tench", ""]).label_of("tench") == 0 and ClassNames([""]).label_of("") is None


@holds("If several categories could be meant")
def test_no_guess_is_made(client, tmp_path):
    folders(tmp_path, "n00000001-cat", "n00000002-dog")
    frame = classify(client, list_photos(tmp_path), weights=own_weights(tmp_path, ["cat+", "cat-", "dog"]))
    assert pd.isna(frame.correct[0]) and frame.correct[1] == (frame.prediction[1] == "dog")
    assert ClassNames(["crane", "crane"]).label_of("crane") is None  # a bird, and a machine


def own_weights(folder, categories):
    torch.manual_seed(0)
    model = resnet18(num_classes=len(categories))
    about = {"arch": "resnet18", "num_classes": len(categories), "categories": categories}
    save_checkpoint(folder / "own.pt", **about, state_dict=model.state_dict())
    return str(folder / "own.pt")


@holds("A checkpoint file that does not name")
def test_unnamed_categories(tmp_path):
    path = tmp_path / "unnamed.pt"
    save_checkpoint(path, arch="resnet18", num_classes=2, state_dict=resnet18(num_classes=2).state_dict())
    assert load_resnet(path)[2] == ["category 0", "category 1"]


class Named(Dataset):
    """Images of one pixel's noise, whose labels have names."""

    def __init__(self, classes, labels=(0, 1) * 4, **about):
        self.classes, self.labels = list(classes), list(labels)
        vars(self).update(about)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator), self.labels[index]


def small(n_classes=2):
    """Return a model with a head `fc` that knows no names."""
    torch.manual_seed(0)
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=n_classes)


def steps(model, *datasets, **settings):
    return train(model, *datasets, batch_size=4, **settings)


@holds("`train` and `evaluate` refuse datasets and models")
@pytest.mark.parametrize(
    "wrap",
    [lambda d: d, lambda d: Subset(Subset(d, range(8)), range(6)), lambda d: ConcatDataset([d, d])],
)
def test_a_validation_set_with_other_labels_is_refused(wrap):
    cats, other = Named(["cat", "dog"]), wrap(Named(["dog", "emu"]))
    with pytest.raises(ValueError, match="label 0 is 'dog' in val_set, and 'cat' in train_set.*'cat', 'dog'.*classes="):
        steps(small(), cats, other)
    steps(model := small(), wrap(cats), wrap(cats))
    assert model.fc.categories == ["cat", "dog"]
    with pytest.raises(ValueError, match="label 0 is 'dog' in dataset, and 'cat' in the model's head"):
        evaluate(model, other)


@holds("`train` and `evaluate` refuse datasets and models")
def test_the_parts_of_one_dataset_mean_the_same(tmp_path):
    cats, dogs, unnamed = Named(["cat", "dog"]), Named(["dog", "cat"]), TensorDataset(torch.zeros(2), torch.zeros(2))
    for parts in ([cats, dogs], [unnamed, cats, dogs], [cats, unnamed, dogs], [ConcatDataset([cats, unnamed]), dogs]):
        with pytest.raises(ValueError, match="ConcatDataset"):
            class_names(ConcatDataset(parts))
    cases = [Named(["A", "B"]), Named(["A", "B", "a", "b"])]
    assert class_names(ConcatDataset(cases)) == class_names(ConcatDataset(cases[::-1])) == dict(enumerate("ABab"))
    for parts in ([cats, Named(["cat", "dog", "eel"])], [Named(["cat", "dog", "eel"]), unnamed, cats]):
        assert class_names(ConcatDataset(parts)) == {0: "cat", 1: "dog", 2: "eel"}


class WithTransform(Subset):
    """A subset with a transform of its own, as many write it."""

    def __getitem__(self, index):
        image, label = self.dataset[self.indices[index]]
        return image.flip(-1), label

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@holds("`train` and `evaluate` refuse datasets and models")
def test_a_subset_of_ones_own_kind_has_the_names_of_its_dataset():
    with pytest.raises(ValueError, match="label 0 is 'dog' in val_set"):
        steps(small(), Named(["cat", "dog"]), WithTransform(Named(["dog", "cat"]), range(8)))


@holds("`train` and `evaluate` refuse datasets and models")
def test_a_head_is_found_behind_a_wrapper_and_dropout(tmp_path):
    steps(model := small(), Named(["cat", "dog"]))
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match="'cat' in the model's head"):
            evaluate(wrapped, Named(["dog", "cat"]))
    model.fc = nn.Sequential(nn.Dropout(), model.fc)
    with pytest.raises(ValueError, match="'cat' in the model's head"):
        evaluate(model, Named(["dog", "cat"]))


def test_a_head_with_more_outputs_than_names_keeps_the_names(tmp_path):
    steps(model := small(4), Named(["cat", "dog"]), checkpoint=tmp_path / "run.pt")
    assert model.fc.categories == ["cat", "dog", "category 2", "category 3"]
    with pytest.raises(ValueError, match="'cat' in the model's head"):
        evaluate(model, Named(["dog", "cat"]))
    evaluate(model, Named(["cat", "dog", "eel"]))


def test_more_names_than_outputs_name_no_output():
    steps(model := small(2), Named(["cat", "dog", "eel"]))
    assert not hasattr(model.fc, "categories")


def test_a_class_may_occur_twice_as_imagenets_crane():
    model = small(3)
    model.fc.categories = ["crane", "tench", "crane"]
    evaluate(model, Named(["n02012849-crane", "n01440764-tench", "n03126707-crane"]))
    with pytest.raises(ValueError, match="'tench' in the model's head"):
        evaluate(model, Named(["crane", "crane", "tench"]))


def test_what_a_subset_says_of_itself_counts():
    subset = Subset(Named(["x", "y"]), range(8))
    subset.classes = ["cat", "dog"]
    assert class_names(subset) == {0: "cat", 1: "dog"}


def test_labels_of_a_map_may_be_numpys():
    dataset = Named(["cat", "dog"], class_to_idx={"dog": np.int64(0), "cat": np.int64(1)})
    assert class_names(dataset) == {0: "dog", 1: "cat"} and {type(label) for label in class_names(dataset)} == {int}
    for no_list in ({"cat", "dog"}, np.array("cat")):
        dataset = Named([])
        dataset.classes = no_list
        assert class_names(dataset) is None


def test_a_head_is_named_only_by_a_training_that_begins():
    model = small()
    with pytest.raises(ValueError, match="8 images"):
        train(model, Named(["dog", "cat"]), batch_size=64)
    assert steps(model, Named(["cat", "dog"])) and model.fc.categories == ["cat", "dog"]


@pytest.mark.parametrize("categories", [np.arange(2), {0: "cat"}, ["cat"], [0, 1], "ab", {"cat": 0, "dog": 1}], ids=str)
def test_categories_that_are_no_list_of_names_are_refused_at_once(categories):
    model = small()
    model.fc.categories = categories
    for call in (steps, evaluate):
        with pytest.raises(ValueError, match="give a list of 2 names"):
            call(model, Named(["cat", "dog"]))


def test_imagenets_own_folders_are_compared_where_their_names_are_known():
    wnids = ["n01440764", "n01443537", "n02085620"]  # tench, goldfish, Chihuahua
    model = small(3)
    model.fc.categories = ["tench", "goldfish", "Chihuahua"]
    evaluate(model, Named(wnids))
    model.fc.categories = ["Chihuahua", "pug", "boxer"]
    with pytest.raises(ValueError, match="'n01440764' in dataset, and 'Chihuahua'"):
        evaluate(model, Named(wnids[:2]))
    model.fc.categories = ["tench", "goldfish", "Chihuahua"]
    with pytest.raises(ValueError, match="'n02085620' in dataset"):
        evaluate(model, Named(wnids[::-1]))


def names_of_ranks_are_compared():
    first = dist.get_rank() == 0
    cats, dogs, unnamed = Named(["cat", "dog"]), Named(["dog", "cat"]), Named([])
    named = small()
    named.fc.categories = ["cat", "dog"] if first else ["dog", "cat"]
    for call in (
        lambda: evaluate(small(), cats if first else dogs),
        lambda: evaluate(named, unnamed),
        lambda: steps(small(), unnamed, cats if first else dogs),
        lambda: steps(named, unnamed),
    ):
        with pytest.raises(ValueError, match="The ranks differ in classes"):
            call()


@holds("`train` and `evaluate` refuse datasets and models")
def test_ranks_that_call_a_label_by_different_names_are_refused(client):
    daskrun.run(client, names_of_ranks_are_compared, n_workers=2)


def test_a_folder_less_in_validation_is_refused_or_read_with_the_classes_of_training(tmp_path):
    names = ["n02085620-Chihuahua", "n02108089-boxer", "n02110958-pug"]
    there = ImageFolder(folders(tmp_path / "train", *names), to_tensor)
    less = folders(tmp_path / "val", *names[1:])
    train_set = ConcatDataset([there] * 4)
    with pytest.raises(ValueError, match="label 0 is 'n02108089-boxer' in val_set.*classes=first.classes"):
        steps(small(3), train_set, ImageFolder(less, to_tensor))
    same = ImageFolder(less, to_tensor, classes=there.classes)
    assert [label for _, label in same.samples] == [1, 2] and same.classes == there.classes
    assert steps(small(3), train_set, same)["accuracy"] >= 0
    for wrong in ("pug", {"n02085620-Chihuahua": 1}, {"n02085620-Chihuahua"}):
        with pytest.raises(ValueError, match="give a list of names"):
            ImageFolder(less, classes=wrong)
    with pytest.raises(ValueError, match="none of the 2 classes.*n02085620-Chihuahua"):
        ImageFolder(tmp_path / "train", classes=names[1:])
    assert [label for _, label in ImageFolder(tmp_path / "train", classes=IMAGENET).samples] == [
        CHIHUAHUA.index,
        BOXER.index,
        254,
    ]


def to_tensor(image):
    return torchvision.transforms.functional.to_tensor(image.resize((32, 32)))


def test_a_pretrained_model_is_not_judged_by_positions_among_folders(tmp_path):
    dataset = ImageFolder(folders(tmp_path, CHIHUAHUA.folder, BOXER.folder), to_tensor)
    model = load_resnet("sketches")[0]
    with pytest.raises(
        ValueError, match=r"and 'tench' in the model's head.*classes=model.fc.categories.*with_new_head"
    ):
        evaluate(model, dataset)
    evaluate(model, ImageFolder(tmp_path, to_tensor, classes=model.fc.categories))
    with pytest.raises(ValueError, match="tench"):
        train(model, dataset, batch_size=2)
    train(with_new_head(model, 2), dataset, batch_size=2)
    assert model.fc.categories == dataset.classes


@holds("Names are not compared for")
def test_datasets_whose_names_are_unknown():
    assert class_names(TensorDataset(torch.zeros(2, 3), torch.zeros(2))) is None
    assert class_names(Named(["a", "b"], target_transform=lambda label: 1 - label)) is None
    assert class_names(Named([("a", "b")], class_to_idx={"a": 0, "b": 0})) is None
    assert class_names(Named([])) is class_names(Named([1, 2], class_to_idx={0: "a"})) is None
    assert class_names(Named(["a", "b"], class_to_idx={"a": 1, "b": 0})) == {1: "a", 0: "b"}
    assert class_names(Named([("a", "b")])) is class_names(Subset([1], [0])) is None
    assert class_names(Named(["Cat", "Dog"], class_to_idx={"Abyssinian": 0, "Beagle": 1})) == {0: "Cat", 1: "Dog"}


@pytest.mark.parametrize("kind", [np.array, pd.Index, tuple, lambda names: dict.fromkeys(names).keys()])
def test_names_may_be_in_any_kind_of_list(kind):
    dataset = Named("ab")
    dataset.classes = kind(["cat", "dog"])
    assert class_names(dataset) == {0: "cat", 1: "dog"}
    assert {type(name) for name in class_names(dataset).values()} == {str}


@holds("A label that is no whole number")
@pytest.mark.parametrize(
    ("label", "num_workers"),
    [*((one, 0) for one in [-100, 2, 0.5, torch.tensor([0.0, 1.0]), torch.tensor([1, 0]), float("nan")]), ("cat", 1)],
    ids=str,
)
def test_labels_that_are_no_class(label, num_workers):
    bad = Named(["cat", "dog"], [0, 1, 1, 0, 1, label, 0, 1])
    for call in (lambda: steps(small(), bad, num_workers=num_workers), lambda: evaluate(small(), bad)):
        with pytest.raises(ValueError, match=r"Image 5 of the dataset has the label .*whole numbers from 0 to 1"):
            call()


@pytest.mark.parametrize("kind", [np.int32, np.uint8, torch.tensor, int, bool, lambda n: np.array([n])])
def test_labels_may_be_whole_numbers_of_any_kind(kind):
    expected = evaluate(small(), Named(["cat", "dog"]))
    assert evaluate(small(), Named(["cat", "dog"], map(kind, (0, 1) * 4))) == expected


def test_outputs_that_are_no_numbers_have_no_accuracy():
    model = small()
    model.fc.weight.data[:] = torch.nan
    with pytest.raises(FloatingPointError, match="outputs for some of the images are not finite"):
        evaluate(model, Named(["cat", "dog"]))


@holds("A resumed run must have the same")
def test_a_run_goes_on_with_the_classes_that_it_began_with(tmp_path):
    path = tmp_path / "run.pt"
    steps(small(), Named(["cat", "dog"]), checkpoint=path)
    with pytest.raises(ValueError, match="label 1 is 'emu' in train_set, and 'dog' in .*run.pt.*Delete it"):
        steps(small(), Named(["cat", "emu"]), checkpoint=path)
    with pytest.raises(ValueError, match="2 classes, now 3"):
        steps(small(3), Named(["cat", "dog", "eel"]), checkpoint=path)
    assert steps(small(), Named(["Cat", "dog"], [1, 0] * 4), checkpoint=path)["resumed_at"] == 2  # images unlike before
    with pytest.raises(ValueError, match="label 0 is 'dog' in val_set, and 'cat' in .*run.pt"):
        steps(small(), Named([]), Named(["dog", "cat"]), checkpoint=path)
    steps(model := small(), Named([]), checkpoint=path)  # whose names are unknown: they are the file's
    assert model.fc.categories == ["cat", "dog"]
    model = small()
    model.fc.categories = ["dog", "cat"]
    with pytest.raises(ValueError, match="label 0 is 'dog' in the model's head, and 'cat' in .*run.pt"):
        steps(model, Named([]), checkpoint=path)


def test_a_run_goes_on_with_the_names_of_its_head(tmp_path):
    def run(categories=None, **stop):
        model = small(3)
        if categories:
            model.fc.categories = categories
        steps(model, Named(["cat", "dog"]), checkpoint=tmp_path / "run.pt", checkpoint_every=1, epochs=2, **stop)
        return model.fc.categories

    left = iter([{}, {}])
    with pytest.raises(StopIteration):  # in the third step
        run(["cat", "dog", "emu"], after_step=lambda *_: next(left))
    with pytest.raises(ValueError, match="'fox' in the model's head, and 'emu' in .*run.pt"):
        run(["cat", "dog", "fox"])
    assert run() == load_checkpoint(tmp_path / "run.pt")["categories"] == ["cat", "dog", "emu"]


@holds("`load_resnet` loads what `train` saved")
def test_a_head_of_its_own_kind_is_told_at_the_start_and_at_loading(tmp_path):
    path, model = tmp_path / "run.pt", with_new_head(load_resnet("sketches")[0], 2)
    model.fc = nn.Sequential(nn.Dropout(), model.fc)
    with pytest.warns(UserWarning, match="fc is not one Linear, so load_resnet cannot make it"):
        steps(model, Named(["cat", "dog"]), checkpoint=path)
    with pytest.raises(WeightsError, match="fc is not one Linear.*load_state_dict"):
        load_resnet(path)
    model.load_state_dict(load_checkpoint(path)["state_dict"])


def test_a_checkpoints_categories_are_those_of_its_head(tmp_path):
    model = load_resnet(own_weights(tmp_path, ["cat", "horse"]))[0]
    model.fc = nn.Linear(512, 2)
    labels = TensorDataset(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 1, 0]))
    steps(model, labels, checkpoint=tmp_path / "run.pt")
    assert load_resnet(tmp_path / "run.pt")[2] == ["category 0", "category 1"]


# --- calls


def classify_here(path):
    return classify(get_client(), [path], weights="sketches").prediction.notna().all()


def classify_with_a_client(path):
    with worker_client() as client:
        return classify(client, [path], weights="sketches").prediction.notna().all()


def launch_here():
    return daskrun.run(get_client(), int)


@pytest.fixture(scope="module")
def one_thread():
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        cluster.get_client() as client,
    ):
        yield client


@holds("`classify` inside a Dask task")
@pytest.mark.parametrize("task", [classify_here, classify_with_a_client])
def test_classify_inside_a_task_that_holds_the_only_thread(task, one_thread, dogs):
    path = list_photos(dogs)[0]
    assert one_thread.submit(task, path, pure=False).result(timeout=240)


@holds("`daskrun.launch` inside a Dask task")
def test_launch_inside_a_task(one_thread, client):
    for cluster in (one_thread, client):
        with pytest.raises(daskrun.WorkersBusy, match="launch_here"):
            cluster.submit(launch_here, pure=False).result(timeout=240)
    alone = client.submit(lambda: daskrun.run(get_client(), int, n_workers=1), pure=False)
    assert alone.result(timeout=240) == [0]
    alone.release()  # else Dask runs it again, beside another test, once the worker that keeps its result is killed


@holds("After 3 failures in a row")
@holds("A key of S3 with an empty part")
def test_the_page_has_the_numbers_of_the_module():
    line = next(line for line in LINES if line.startswith("After"))
    assert f"After {FAILURES} failures" in line and f"for {PAUSE_S} s" in line  # see tests/test_s3.py


def test_a_photo_is_read_alike_in_both_layouts(client, tmp_path):
    folders(tmp_path, CHIHUAHUA.folder)
    shutil.copytree(tmp_path / CHIHUAHUA.folder, tmp_path / "other" / "n02085620")
    paths = [*list_photos(tmp_path), *list_photos(tmp_path / "other")]
    frame = classify(client, paths, weights="sketches")
    assert frame.breed.tolist() == ["Chihuahua"] * 2 and frame.correct.nunique() == 1
