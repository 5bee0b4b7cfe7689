"""Turn the bytes of photos into images for a model: by Pillow, or on a GPU, which decodes many JPEGs in one call."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from io import BytesIO

import torch
from PIL import Image
from torchvision.transforms.functional import resize

from workshop_utils.data import BadPhoto, decode_photo

PIXELS_PER_CALL = 2**26  # decoded together: 358 photos of 500 x 375, or five of 12 megapixels; 0.8 GB in float32
END_OF_JPEG = b"\xff\xd9"


def load_on_cpu(contents: Sequence[bytes | Exception], paths: Sequence[str], transform: Callable,
                pool: Executor) -> tuple[torch.Tensor, list[str | None]]:
    """Return (images, errors): an image for each photo that can be read, and for each path None or why it cannot.

    contents: of `data.read_files`. transform: of `load_resnet`. pool: of the threads that decode.
    images: (n, 3, 224, 224) float32.
    """
    loaded = list(pool.map(partial(_load_photo, transform), contents, paths))
    images = [image for image, _ in loaded if image is not None]
    return torch.stack(images) if images else torch.empty(0), [error for _, error in loaded]


def load_on_gpu(contents: Sequence[bytes | Exception], paths: Sequence[str], transform: Callable, pool: Executor,
                device: torch.device) -> tuple[torch.Tensor, list[str | None]]:
    """Return what `load_on_cpu` does, with the images on `device`, a GPU, which decodes, resizes and normalises JPEGs.

    Pillow reads what the GPU's decoder refuses or might read in another way. So errors are the same as on a CPU, and a
    call that fails on the GPU costs time, not photos. The work has a CUDA stream of its own, and is done on return.
    """
    images: dict[int, torch.Tensor] = {}
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):  # of None, it changes nothing
        for part in _parts(contents):
            try:
                images |= _load_jpegs({position: contents[position] for position in part}, transform, device)
            except Exception:  # one damaged file fails the whole call; so do a missing decoder and too little memory
                continue
        left = [position for position in range(len(paths)) if position not in images]
        by_pillow, why = load_on_cpu([contents[i] for i in left], [paths[i] for i in left], transform, pool)
        errors = dict(zip(left, why, strict=True))
        images |= zip((i for i in left if not errors[i]), by_pillow.to(device), strict=True)
        batch = torch.stack([images[position] for position in sorted(images)]) if images else torch.empty(0)
    if stream:
        stream.synchronize()  # the forward pass is on another one
    return batch, [errors.get(position) for position in range(len(paths))]


def n_pixels_if_plain(content: bytes | Exception) -> int:
    """Return how many pixels a JPEG has that any decoder reads alike; 0 for all else, such as CMYK or a cut file."""
    try:
        image = Image.open(BytesIO(content), formats=["JPEG"])  # type: ignore[arg-type]  # reads the header alone
    except Exception:
        return 0
    n_pixels = math.prod(image.size)
    alike = image.mode in ("RGB", "L") and image.info.get("adobe_transform", 1) != 0
    whole = content.endswith(END_OF_JPEG)  # type: ignore[union-attr]
    usual = n_pixels <= PIXELS_PER_CALL // 2 and max(image.size) <= 8 * min(image.size)  # Pillow's rules are stricter
    return n_pixels if alike and whole and usual else 0


def _load_photo(transform, content, path):
    try:
        return transform(decode_photo(content, path)), None
    except BadPhoto as error:
        return None, str(error)


def _parts(contents):
    """Return lists of positions of plain JPEGs, each of at most PIXELS_PER_CALL together."""
    parts, room = [], 0
    for position, content in enumerate(contents):
        n_pixels = n_pixels_if_plain(content)
        if n_pixels > room:
            parts.append([])
            room = PIXELS_PER_CALL
        if n_pixels:
            parts[-1].append(position)
            room -= n_pixels
    return parts


def _load_jpegs(contents, transform, device):
    """Return {position: image (3, 224, 224) float32} of {position: content}."""
    decoded = decode(list(contents.values()), device)
    alike = defaultdict(list)  # only images of one size can be transformed together
    for position, image in zip(contents, decoded, strict=True):
        alike[image.shape].append((position, image))
    images = {}
    for group in alike.values():
        positions, of_one_size = zip(*group, strict=True)
        images |= zip(positions, transform(_resized(torch.stack(of_one_size), *transform.resize_size)), strict=True)
    return images


def _resized(images, shorter_side):
    """Return (n, 3, h, w) uint8 images as the transform would resize them, but rounded between the axes as by Pillow.

    Of 960 photos, 955 then had the CPU's prediction, and 951 where both axes were resized at once.
    """
    height, width = images.shape[-2:]
    wide = shorter_side if width <= height else int(shorter_side * width / height)
    high = shorter_side if height <= width else int(shorter_side * height / width)
    return resize(resize(images, [height, wide]), [high, wide])


def decode(contents: Sequence[bytes], device: torch.device) -> list[torch.Tensor]:
    """Return each JPEG as a (3, h, w) uint8 tensor on `device`; raise RuntimeError where one cannot be decoded."""
    from torchcodec.decoders import decode_jpeg

    files = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    return list(decode_jpeg(files, device=device))
