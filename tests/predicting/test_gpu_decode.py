"""The way to a GPU gives the images that the CPU reads, whatever the files are; here its decoder runs on the CPU."""

import io
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from PIL import ExifTags, Image

from workshop_utils.dogs.sketches import draw_dog
from workshop_utils.predicting.classifier import load_photos
from workshop_utils.predicting.gpu_decode import PIXELS_PER_CALL, decode_jpegs, load_on_gpu
from workshop_utils.weights import load_resnet

CPU, POOL = torch.device("cpu"), ThreadPoolExecutor(2)
DECODE = "workshop_utils.predicting.gpu_decode.decode_jpegs"
LEVEL = 1 / 255 / 0.224  # one of a pixel's 256 levels, after the transform


@pytest.fixture(scope="module")
def transform():
    return load_resnet("sketches")[1]


def encoded(image, format="JPEG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def dog(*size):
    return draw_dog("beagle", 1).resize(size or (224, 224))


def turned(orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def names_of(contents):
    return [f"{position}.jpg" for position in range(len(contents))]


def on_cpu(contents, transform):
    return load_photos(contents, names_of(contents), transform, POOL)


def on_gpu(contents, transform, device=CPU, left=None):
    """left: a list that gets the names of the files that are left to Pillow."""

    def by_pillow(contents, names):
        if left is not None:
            left.extend(names)
        return load_photos(contents, names, transform, POOL)

    return load_on_gpu(contents, names_of(contents), transform=transform, device=device, load_others=by_pillow)


@pytest.fixture
def calls(monkeypatch):
    """The contents that each call of the decoder was given."""
    seen = []
    monkeypatch.setattr(DECODE, lambda given, device: seen.append(given) or decode_jpegs(given, device))
    return seen


def odd(*blocks):
    """Return a JPEG with these blocks, as its own EXIF would be."""
    plain = encoded(dog())
    return plain[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(one) + 2) + one for one in blocks) + plain[2:]


TIFF = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12"  # big-endian, with one entry, of the orientation
XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
UNUSUAL = {
    "a PNG": encoded(dog(), "PNG"),
    "CMYK": encoded(dog().convert("CMYK")),
    "cut off": encoded(dog())[:-300],
    "with a tail": encoded(dog()) + b"more",
    "narrow": encoded(dog(20, 300)),
    "too narrow": encoded(dog(4, 300)),
    "turned by XMP": odd(XMP),
    "turned by two blocks": odd(*(TIFF + b"\0\x03\0\0\0\x01\0" + bytes([how]) + b"\0\0" for how in (3, 6))),
    "turned by a LONG": odd(b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x04\0\x01\0\0\0\x06\0\0\0"),
    "turned by a BYTE": odd(TIFF + b"\0\x01\0\0\0\x01\x06\0\0\0"),
    "turned in a ninth way": odd(TIFF + b"\0\x03\0\0\0\x01\0\x09\0\0"),
    "turned by an entry that is cut off": odd(TIFF + b"\0\x03\0\0"),
    "empty": b"",
    "no image": b"not a photo",
    "not there": FileNotFoundError("dog.jpg"),
}


def test_jpegs_of_all_sizes_are_decoded_in_one_call_and_resized_as_pillow_does(transform, calls):
    sizes = [(500, 375), (224, 224), (375, 500), (500, 375), (333, 100)]
    contents = [encoded(dog(*size), quality=90) for size in sizes]
    contents.append(encoded(dog(300, 260).convert("L")))
    contents.append(encoded(dog(400, 300), progressive=True))
    contents += [encoded(dog(320, 240), exif=turned(how)) for how in range(1, 9)]  # as a phone's photos are
    left = []
    images, errors = on_gpu(contents, transform, left=left)
    expected, _ = on_cpu(contents, transform)
    assert not left and calls == [contents] and errors == [None] * len(contents) and images.dtype == torch.float32
    assert (images - expected).abs().max() < 3 * LEVEL and (images - expected).abs().mean() < 0.05 * LEVEL


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_no_plain_jpeg_is_left_to_pillow(kind, transform, calls):
    plain = encoded(dog())
    contents = [plain, UNUSUAL[kind], plain]
    left = []
    images, errors = on_gpu(contents, transform, left=left)
    expected, expected_errors = on_cpu(contents, transform)
    assert calls == [[plain, plain]] and left == ["1.jpg"]
    assert errors == expected_errors and images.shape == expected.shape
    assert (images - expected).abs().max() < 3 * LEVEL


def test_a_call_that_fails_is_read_by_pillow_photo_by_photo(transform, monkeypatch):
    def out_of_memory(contents, device):
        raise torch.OutOfMemoryError("tried to allocate too much")

    contents = [encoded(dog(300, 200)), b"no photo", encoded(dog())]
    expected, expected_errors = on_cpu(contents, transform)
    monkeypatch.setattr(DECODE, out_of_memory)
    monkeypatch.setattr("workshop_utils.predicting.gpu_decode._warned", [])
    for expects in (pytest.warns(UserWarning, match="Pillow .*tried to allocate"), nullcontext()):
        with expects:  # the second time it is known
            images, errors = on_gpu(contents, transform)
        assert torch.equal(images, expected) and errors == expected_errors and "1.jpg" in errors[1]


def test_large_photos_are_decoded_few_at_a_time(transform, calls):
    large = encoded(Image.new("RGB", (5000, 4000)))  # 20 megapixels
    images, errors = on_gpu([large] * 7, transform)
    assert [len(call) for call in calls] == [3, 3, 1] and len(images) == 7 and not any(errors)
    assert 3 * 5000 * 4000 <= PIXELS_PER_CALL < 4 * 5000 * 4000


@pytest.mark.gpu
def test_the_gpus_decoder_sees_what_pillow_sees(transform, calls):
    contents = [encoded(dog(*size), quality=90) for size in [(500, 375), (224, 224), (375, 500)] * 40]
    left = []
    images, errors = on_gpu(contents, transform, torch.device("cuda"), left=left)
    expected, _ = on_cpu(contents[:3], transform)
    assert not left and images.is_cuda and not any(errors) and len(calls) == 1
    # nvJPEG repeats samples of colour: 0.3 to 1.3 levels where libjpeg-turbo was told to do so.
    assert ((images.cpu()[:3] - expected).abs().mean((1, 2, 3)) < 1.5 * LEVEL).all()
    reserved = torch.cuda.memory_reserved()
    for _ in range(40):  # each finds the memory of the one before
        on_gpu(contents, transform, torch.device("cuda"))
    assert torch.cuda.memory_reserved() < 2 * reserved
