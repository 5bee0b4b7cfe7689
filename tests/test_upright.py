"""A photo that a phone stored sideways is seen upright, whichever way it takes; damaged EXIF costs no photo."""

import io
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from workshop_utils.classify import classify, load_photos
from workshop_utils.dogs.sketches import draw_dog
from workshop_utils.photos import BadPhoto, decode_photo
from workshop_utils.predicting.gpu_decode import decode_jpegs, load_on_gpu
from workshop_utils.weights import load_resnet

UPRIGHT = np.asarray(draw_dog("beagle", 1).resize((200, 120)))  # (height, width, 3); no turn gives the same again
# By EXIF's own definition: where the first row and the first column of what is stored belong.
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.swapaxes(0, 1),
    6: np.rot90(UPRIGHT, 1),
    7: UPRIGHT[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90(UPRIGHT, -1),
}
ORIENTATION = 0x0112
CPU, POOL = torch.device("cpu"), ThreadPoolExecutor(2)
all_orientations = pytest.mark.parametrize("orientation", STORED)


def exif_of(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif.tobytes()


def as_phones_store(orientation, kind="JPEG", **settings):
    """Return the bytes of a file that shows UPRIGHT, if it is turned as its tag says."""
    file = io.BytesIO()
    settings = {"exif": exif_of(orientation), "quality": 95, "lossless": True, "method": 0} | settings
    Image.fromarray(np.ascontiguousarray(STORED[orientation])).save(file, kind, **settings)
    return file.getvalue()


def is_upright(image):
    """Return whether an image is UPRIGHT, but for what JPEG loses."""
    pixels = np.asarray(image, dtype=float)
    return pixels.shape == UPRIGHT.shape and np.abs(pixels - UPRIGHT).mean() < 4


@all_orientations
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photo_is_decoded_upright(orientation, kind):
    image = decode_photo(as_phones_store(orientation, kind), "phone")
    assert image.mode == "RGB" and is_upright(image)


@pytest.fixture
def decoded(monkeypatch):
    """The contents that the GPU's decoder, here on the CPU, was given."""
    seen = []
    monkeypatch.setattr(
        "workshop_utils.predicting.gpu_decode.decode_jpegs",
        lambda given, device: seen.extend(given) or decode_jpegs(given, device),
    )
    return seen


def on_gpu(contents, transform):
    paths = [f"{position}.jpg" for position in range(len(contents))]
    by_pillow = partial(load_photos, transform=transform, pool=POOL)
    return load_on_gpu(contents, paths, transform=transform, device=CPU, load_others=by_pillow)


@all_orientations
def test_the_gpus_decoder_turns_photos_as_well(orientation, decoded):
    transform, plain, phone = load_resnet("sketches")[1], as_phones_store(1), as_phones_store(orientation)
    images, errors = on_gpu([plain, phone], transform)
    assert errors == [None, None] and (images - transform(Image.fromarray(UPRIGHT))).abs().mean() < 0.1
    assert decoded == [plain, phone]


TIFF = b"MM\0*\0\0\0\x08\0\x01\x01\x12"  # big-endian, with one entry, of the orientation
XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize(
    "blocks",
    [
        [XMP],
        [b"Exif\0\0", b"Exif\0\0" + TIFF + b"\0\x03\0\0\0\x01\0\x06\0\0"],
        [b"Exif\0\0" + TIFF + b"\0\x04\0\0\0\x01\0\0\0\x06"],  # a LONG
        [b"Exif\0\0" + TIFF + b"\0\x01\0\0\0\x01\x06\0\0\0"],  # a BYTE
        [b"Exif\0\0" + TIFF + b"\0\x03\0\0\0\x01\0\x09\0\0"],  # no orientation
        [b"Exif\0\0" + TIFF + b"\0\x03\0\0"],  # cut off
    ],
)
def test_what_turns_a_photo_in_an_odd_way_is_left_to_pillow(blocks, decoded):
    transform, plain = load_resnet("sketches")[1], as_phones_store(1)
    plain = plain[:2] + plain[plain.index(b"\xff\xdb") :]  # without its own EXIF
    odd = plain[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(one) + 2) + one for one in blocks) + plain[2:]
    images, errors = on_gpu([plain, odd], transform)
    assert decoded == [plain] and errors == [None, None]
    assert torch.equal(images[1:], load_photos([odd], ["odd.jpg"], transform, POOL)[0])


def test_photos_are_classified_as_their_upright_copies(client, tmp_path):
    paths = [tmp_path / f"{orientation}.png" for orientation in STORED]
    for orientation, path in zip(STORED, paths, strict=True):
        path.write_bytes(as_phones_store(orientation, "PNG"))
    frame = classify(client, paths, weights="sketches", precision="fp32")
    assert frame.prediction.nunique() == 1 and np.ptp(frame.probability) < 1e-4


# --- damaged EXIF


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_exif_costs_no_photo(kind, decoded):
    transform = load_resnet("sketches")[1]
    exif, draw = Image.Exif(), random.Random(0)
    exif[ORIENTATION], exif[0x010F], exif[0x0110], exif[0x011A] = 6, "Phone", "7", 72.0
    whole = exif.tobytes()
    cut = [whole[:n] for n in range(7, len(whole))]
    changed = [bytearray(whole) for _ in range(200)]
    for content in changed:
        for _ in range(draw.randrange(1, 6)):
            content[draw.randrange(6, len(content))] = draw.randrange(256)
    for damaged in (*cut, *map(bytes, changed), b"Exif\0\0", b"Exif\0\0II*\0", b"Exif\0\0nonsense"):
        file = as_phones_store(6, kind, exif=damaged)
        image = decode_photo(file, "damaged")
        assert sorted(image.size) == [120, 200]
        assert on_gpu([file], transform)[1] == [None]


def test_a_truncated_photo_is_still_named_as_that_if_it_has_to_be_turned():
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    for orientation in STORED:
        for kind in ("JPEG", "PNG"):
            with pytest.raises(BadPhoto, match="phone: .*truncated"):
                decode_photo(as_phones_store(orientation, kind)[:-2000], "phone")
