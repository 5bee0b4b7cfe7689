"""A photo that a phone stored sideways is seen upright, whichever way it takes; damaged EXIF costs no photo."""

import io
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from workshop_utils.classify import classify
from workshop_utils.decode import decode_jpegs, load_on_cpu, load_on_gpu, n_pixels_if_plain
from workshop_utils.dogs.sketches import draw_dog
from workshop_utils.photos import BadPhoto, decode_photo
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


@all_orientations
@pytest.mark.parametrize("load", [load_on_cpu, load_on_gpu])
def test_a_models_image_is_upright_and_the_gpus_decoder_gets_no_photo_that_has_to_be_turned(
    load, orientation, monkeypatch
):
    decoded = []
    monkeypatch.setattr(
        "workshop_utils.decode.decode_jpegs", lambda given, device: decoded.extend(given) or decode_jpegs(given, device)
    )
    transform, plain, phone = load_resnet("sketches")[1], as_phones_store(1), as_phones_store(orientation)
    given = [plain, phone], ["plain.jpg", "phone.jpg"], transform, POOL
    images, errors = load(*given, *([CPU] if load is load_on_gpu else []))
    expected = transform(Image.fromarray(UPRIGHT))
    assert errors == [None, None] and (images - expected).abs().mean() < 0.1
    if load is load_on_gpu:
        assert decoded == ([plain, phone] if orientation == 1 else [plain])
        assert bool(n_pixels_if_plain(phone)) == (orientation == 1)


def test_photos_are_classified_as_their_upright_copies(client, tmp_path):
    paths = [tmp_path / f"{orientation}.png" for orientation in STORED]
    for orientation, path in zip(STORED, paths, strict=True):
        path.write_bytes(as_phones_store(orientation, "PNG"))
    frame = classify(client, paths, weights="sketches", precision="fp32")
    assert frame.prediction.nunique() == 1 and np.ptp(frame.probability) < 1e-4


# --- damaged EXIF


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_turns_nothing(orientation):
    assert is_upright(decode_photo(as_phones_store(1, exif=exif_of(orientation)), "odd.jpg"))


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_exif_costs_no_photo(kind):
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
        n_pixels_if_plain(file)


def test_a_truncated_photo_is_still_named_as_that_if_it_has_to_be_turned():
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    for orientation in STORED:
        for kind in ("JPEG", "PNG"):
            with pytest.raises(BadPhoto, match="phone: .*truncated"):
                decode_photo(as_phones_store(orientation, kind)[:-2000], "phone")
