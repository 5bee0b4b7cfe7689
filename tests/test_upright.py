"""A photo that a phone stored sideways is seen upright, and predicted as its upright copy."""

import io

import numpy as np
import pytest
from PIL import ExifTags, Image
from samples import classified

from workshop_utils.dogs.sketches import draw_dog
from workshop_utils.photos import decode_photo

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


def as_phones_store(orientation):
    """Return the bytes of a PNG, which loses nothing: it shows UPRIGHT, if it is turned as its tag says."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(np.ascontiguousarray(STORED[orientation])).save(file, "PNG", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("orientation", STORED)
def test_a_photo_is_decoded_upright(orientation):
    assert np.array_equal(np.asarray(decode_photo(as_phones_store(orientation), "phone")), UPRIGHT)


def test_photos_are_predicted_as_their_upright_copies(tmp_path):
    for orientation in STORED:
        (tmp_path / f"{orientation}.png").write_bytes(as_phones_store(orientation))
    paths = sorted(map(str, tmp_path.iterdir()))
    _, rows = classified([paths], weights="sketches", precision="fp32")
    assert len({prediction for _, _, prediction, *_ in rows}) == 1
    assert np.ptp([probability for *_, probability, _, _ in rows]) < 1e-4
