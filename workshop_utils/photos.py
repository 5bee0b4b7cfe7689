"""Find the dog photos (or sketches) and read them as a PyTorch dataset, from any place that fsspec can reach."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import chain

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.utils.data import Dataset, Subset

from workshop_utils.dogs.breeds import BREEDS as BREEDS  # "as": notebooks import these from here
from workshop_utils.dogs.breeds import HELD_OUT as HELD_OUT
from workshop_utils.dogs.breeds import Breed, find_breed
from workshop_utils.dogs.sketches import DRAWING_VERSION, write_sketches
from workshop_utils.dogs.sketches import draw_dog as draw_dog
from workshop_utils.s3 import list_folders, read_objects
from workshop_utils.storage import (
    ADDRESS,
    CacheError,
    absolute_address,
    cache_folder,
    copy_for_workers,
    default_storage_options,
    local_path,
    on_all_workers,
    open_address,
    resolve_weights,
    settings,
)

IN_BREED = re.compile(r"(?:.*[/\\])?(n\d{8})-([^/\\]+)[/\\][^/\\]*", re.DOTALL)  # a file in a folder of a breed
# A photo's path below the root. Hidden files are no photos: macOS puts a "._photo.jpg" beside each.
PHOTO = re.compile(r"n\d{8}-[^/\\]+/[^./\\][^/\\]*\.(?i:jpg|jpeg|png|webp|gif|bmp)")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # a stranger's file should not reach the decoders of other formats
MAX_PIXELS = 50_000_000  # decoded, a photo of this size already takes 150 MB
MAX_ASPECT = 50  # resizing the short side of 1 x 1,000,000 pixels to 256 would take 200 GB
SKETCHES_PER_BREED = 8
FOLDERS_AT_ONCE = 32  # listed at the same time: storage takes long to answer, but no longer for many questions
FILES_AT_ONCE = 16  # read at the same time from a local disk, which may be one of a network
CURE = "Check the address, or unset WORKSHOP_DATA to use the sketches that need no download."


class NoPhotos(FileNotFoundError):
    """A place holds no photos in folders named like 'n02085620-Chihuahua'."""


class BadPhoto(ValueError):
    """A file is not a photo that a model can be given; the message names the file and the reason."""


@dataclass(frozen=True)
class DataSource:
    """Where the lesson's images are.

    url: folder of folders `<wnid>-<Breed_name>`. kind: "custom" (WORKSHOP_DATA), "photos" or "sketches".
    storage_options: what fsspec needs to open `url`. weights: those that suit the images, for `load_resnet`:
    WORKSHOP_WEIGHTS of the process that makes this; else "sketches" for these, and "imagenet" for photos.
    """

    url: str
    kind: str
    storage_options: dict = field(default_factory=dict)
    weights: str = ""

    def __post_init__(self) -> None:
        default = "sketches" if self.kind == "sketches" else "imagenet"
        # A rank's WORKSHOP_WEIGHTS may differ from the client's.
        object.__setattr__(self, "weights", resolve_weights(self.weights or "auto", default))

    @property
    def noun(self) -> str:
        """What a sentence calls the images: "sketches" or "photos"."""
        return "sketches" if self.kind == "sketches" else "photos"


def find_data(
    per_breed: int = SKETCHES_PER_BREED, breeds: Iterable[Breed | str] | None = None, light: str = "day"
) -> DataSource:
    """Return the DataSource of the first that applies: WORKSHOP_DATA, downloaded photos, sketches drawn now.

    per_breed: number of sketches of each breed. breeds: those that are needed, None for all; there may be photos of
    others as well. light: "day" or "dusk" for sketches; photos are what they are.

    All workers can reach the sketches: see `storage.copy_for_workers`.
    Raises NoPhotos if WORKSHOP_DATA holds none; storage.NotShared if workers do not see photos or sketches;
    storage.CacheError if there is no room for sketches.
    """
    if url := settings().data:
        list_photos(url, breeds=breeds)  # raises NoPhotos
        return DataSource(absolute_address(url), "custom", default_storage_options(url))
    photos, wanted = cache_folder() / "photos", f"sketches-v{DRAWING_VERSION}-{per_breed}"
    sketches = cache_folder() / (wanted if light == "day" else f"{wanted}-{light}")
    try:
        has_photos = (photos / "complete").exists()
        if not has_photos:
            write_sketches(sketches, per_breed, breeds, light=light)
    except OSError as error:
        raise CacheError(
            f"The cache {str(cache_folder())!r} cannot be used for sketches ({error.strerror}): take another folder. "
            "Type\n%env WORKSHOP_CACHE=FOLDER\nin a cell, or in a shell\nexport WORKSHOP_CACHE=FOLDER"
        ) from error
    if has_photos:
        return DataSource(on_all_workers(str(photos / "Images")), "photos")
    url = copy_for_workers(sketches)
    return DataSource(url, "sketches", default_storage_options(url))


def list_photos(
    url: str | os.PathLike, *, storage_options: dict | None = None, breeds: Iterable[Breed | str] | None = None
) -> list[str]:
    """Return the sorted paths of all images in folders `<wnid>-<Breed_name>` directly below `url`.

    breeds: names, WordNet ids or `Breed`s of the folders to list; None for all.

    Paths carry their protocol and host (`s3://…`) except local ones. Raises NoPhotos if there are none.
    """
    wanted = None if breeds is None else {find_breed(breed).wnid for breed in breeds}

    def is_wanted(folder):
        breed = IN_BREED.fullmatch(f"{folder.rstrip('/')}/")
        return bool(breed and (wanted is None or breed[1] in wanted))

    address = absolute_address(url)
    try:
        fs, root = open_address(address, storage_options)
        files = list_folders(fs, root, is_wanted)
        if files is None:
            files = _list_folders(fs, root, is_wanted)
        found = sorted(file for file in files if PHOTO.fullmatch(file.removeprefix(root.rstrip("/")).lstrip("/")))
    except Exception as error:  # each protocol raises errors of its own, such as botocore's
        raise NoPhotos(f"{address!r} cannot be listed ({error}). {CURE}") from error
    if not found and wanted is None:
        raise NoPhotos(f"{address!r} holds 0 images in folders named like 'n02085620-Chihuahua'. {CURE}")
    if not found:
        list_photos(address, storage_options=storage_options)  # raises if there are none of other breeds either
    if wanted and (missing := sorted(wanted - {breed_of(file)[0] for file in found})):
        raise NoPhotos(f"{address!r} holds no images of {', '.join(missing)}. {CURE}")
    if isinstance(fs, LocalFileSystem):
        return found
    # fs.unstrip_protocol would lose a host. Files of http:// have whole addresses.
    return [file if "://" in file else address.rstrip("/") + file.removeprefix(root.rstrip("/")) for file in found]


def _list_folders(fs, root, is_wanted):
    """Return what `s3.list_folders` does, from any filesystem; raise what it raises of a folder that it cannot list."""
    folders = [
        info["name"]
        for _, below, beside in fs.walk(root, maxdepth=1, detail=True, on_error=_unless_missing)
        for info in chain(below.values(), (file for file in beside.values() if file.get("islink")))
        if is_wanted(info["name"])
    ]
    can_use_threads = fs.async_impl or isinstance(fs, LocalFileSystem)  # ftp:// and others have one connection
    with ThreadPoolExecutor(FOLDERS_AT_ONCE if can_use_threads else 1) as pool:
        return list(chain.from_iterable(pool.map(partial(fs.find, maxdepth=1, on_error=_unless_missing), folders)))


def _unless_missing(error):
    if not isinstance(error, FileNotFoundError):  # such as a link that leads nowhere
        raise error


def breed_of(path: str) -> tuple[str, str]:
    """Return (WordNet id, breed name) from the folder that a photo lies in.

    >>> breed_of("dogs/n02085620-Chihuahua/n02085620_7.jpg")
    ('n02085620', 'Chihuahua')
    """
    if match := IN_BREED.fullmatch(path):
        return match.group(1), match.group(2)
    raise ValueError(f"{path!r} does not lie in a folder named like 'n02085620-Chihuahua'.")


def read_files(paths: Sequence[str], storage_options: dict | None = None) -> list[bytes | Exception]:
    """Return the bytes of each file, in order; an unreadable file gives its exception.

    The files may lie in several storages. Those of one are read at the same time, except that storage with one
    connection, such as ftp://, gives one file after the other.
    """
    by_storage: dict[tuple[str, bool], list[int]] = defaultdict(list)  # positions of the paths that begin alike
    for position, path in enumerate(paths):
        begin = ADDRESS.match(path)
        has_version = "?versionId=" in path  # s3fs reads versions through another filesystem
        by_storage[begin[0] if begin else "", has_version].append(position)
    contents: dict[int, bytes | Exception] = {}
    for positions in by_storage.values():
        of_one = _read_from_one_storage([paths[position] for position in positions], storage_options)
        contents |= zip(positions, of_one, strict=True)
    return [contents[position] for position in range(len(paths))]


def _read_from_one_storage(paths, storage_options):
    """Return what `read_files` does, for paths that begin with the same protocol and host, or for local ones."""
    try:
        fs, _ = open_address(paths[0], storage_options)
    except Exception as error:  # an unknown protocol, a missing package, a server that refuses
        return [error] * len(paths)
    if isinstance(fs, LocalFileSystem):
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            return list(pool.map(_read_local, paths))
    contents = read_objects(fs, paths)
    left = [position for position, content in enumerate(contents) if content is None]
    # ftp's cat_file takes no address, and s3fs would strip the slash at a key's end.
    keys = [paths[position] if fs.async_impl else fs._strip_protocol(paths[position]) for position in left]
    # fs.cat would take the [1] of a name for a pattern.
    for position, content in zip(left, fs.cat_ranges(keys, None, None, on_error="return"), strict=True):
        contents[position] = content
    return contents


def _read_local(path):
    try:
        return local_path(path).read_bytes()
    except Exception as error:
        return error


def decode_photo(content: bytes | Exception, path: str) -> Image.Image:
    """Return a file's bytes as an upright RGB `PIL.Image`; raise BadPhoto, which names `path`, for anything else.

    Upright: turned as the file's EXIF says, as `PIL.ImageOps.exif_transpose` does. Damaged EXIF is no error.
    content: bytes, or the exception that reading them raised.
    """
    if isinstance(content, Exception):
        missing = isinstance(content, FileNotFoundError)
        raise BadPhoto(f"{path}: {'there is no such file' if missing else f'cannot be read ({content})'}") from content
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width}x{image.height} pixels, more than {MAX_PIXELS:,}: make it smaller")
        if max(image.size) > MAX_ASPECT * min(image.size):
            raise ValueError(f"{image.width}x{image.height} pixels, too narrow: crop it")
        if (n_frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # a phone's JPEG with a preview
            raise ValueError(f"animated, {n_frames} frames: save one frame")
        if depth := {"I": "16-bit", "F": "float"}.get(image.mode[0]):
            raise ValueError(f"{depth} pixels: save it with 8 bits a channel")
        pixels = image.convert("RGB")
        with suppress(Exception):  # Pillow raises errors of many types for damaged EXIF, and the pixels may be fine
            ImageOps.exif_transpose(pixels, in_place=True)  # a phone stores photos as its sensor sees them
        return pixels
    except Exception as error:  # Pillow raises errors of nearly any type for a damaged header
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image that Pillow can read" if content else "the file is empty"
        raise BadPhoto(f"{path}: {reason}") from error


class ImageFolder(Dataset):
    """A dataset of (image, label) over folders `<wnid>-<Breed_name>`, at a path or an address that fsspec opens.

    Like torchvision's: `classes` are the sorted folder names, a label is a position among them (`class_to_idx`),
    `samples` are (path, label) pairs. The photos of a DataLoader's batch are read at the same time, in any kind of
    child process.

    transform: called on each photo, an upright RGB `PIL.Image`.
    breeds: names, WordNet ids or `Breed`s of the folders to take; None for all.
    Raises NoPhotos if `url` holds none, or none of one of the `breeds`; BadPhoto on reading a file that is no photo.

    >>> from tempfile import TemporaryDirectory
    >>> from workshop_utils.dogs.sketches import write_sketches
    >>> with TemporaryDirectory() as folder:
    ...     n_written = write_sketches(folder, per_breed=2, breeds=["boxer", "pug"])
    ...     dataset = ImageFolder(folder)
    ...     image, label = dataset[3]
    >>> dataset.classes, len(dataset), image.size, label
    (['n02108089-boxer', 'n02110958-pug'], 4, (224, 224), 1)
    """

    def __init__(
        self,
        url: str | os.PathLike,
        transform: Callable | None = None,
        *,
        storage_options: dict | None = None,
        breeds: Iterable[Breed | str] | None = None,
    ) -> None:
        self.url, self.transform, self.storage_options = url, transform, storage_options
        paths = list_photos(url, storage_options=storage_options, breeds=breeds)
        folders = ["-".join(breed_of(path)) for path in paths]
        self.classes = sorted(set(folders))
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        self.samples = [(path, self.class_to_idx[name]) for path, name in zip(paths, folders, strict=True)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple]:
        samples = [self.samples[index] for index in indices]
        contents = read_files([path for path, _ in samples], self.storage_options)
        images = (decode_photo(content, path) for content, (path, _) in zip(contents, samples, strict=True))
        transformed = map(self.transform, images) if self.transform else images
        return [(image, label) for image, (_, label) in zip(transformed, samples, strict=True)]


def train_val_split(dataset: ImageFolder, val_fraction: float, seed: int) -> tuple[Subset, Subset]:
    """Return (train, val): disjoint subsets with each label in the same proportion; the same seed gives the same.

    val_fraction: in (0, 1); each label with 2 or more photos has at least one on each side.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction!r}: give a fraction between 0 and 1, such as 0.2.")
    labels, shuffle = np.array([label for _, label in dataset.samples]), np.random.default_rng(seed)
    val: list[int] = []
    for label in np.unique(labels):
        members = shuffle.permutation(np.flatnonzero(labels == label))
        n_val = min(max(1, round(len(members) * val_fraction)), len(members) - 1)
        val += members[:n_val].tolist()
    return Subset(dataset, np.setdiff1d(np.arange(len(labels)), val).tolist()), Subset(dataset, sorted(val))
