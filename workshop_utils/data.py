"""Find the dog photos (or sketches) and read them as a PyTorch dataset, from any place that fsspec can reach."""

import os
import re
import warnings
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import fsspec
import numpy as np
import platformdirs
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset, Subset

from workshop_utils.dogs.breeds import BREEDS, HELD_OUT, find_breed  # noqa: F401  BREEDS is part of this module's contract
from workshop_utils.dogs.sketches import draw_dog, write_sketches  # noqa: F401  one is for notebooks

FOLDER = re.compile(r"(n\d{8})-([^/\\]+)")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # others have decoders that a file from a stranger should not reach
N_PHOTOS = 20_580  # of Stanford Dogs
MAX_PIXELS = 50_000_000  # decoded, a photo of this size already takes 150 MB
MAX_ASPECT = 50  # resizing the short side of 1 x 1,000,000 pixels to 256 would take 200 GB
SKETCHES_PER_BREED = 8
S3_CONNECTIONS = 64  # with botocore's own 10, a batch of 32 would wait four times for storage far away


class NoPhotos(FileNotFoundError):
    """A place holds no photos in folders named like 'n02085620-Chihuahua'."""


class BadPhoto(ValueError):
    """A file is not a photo that a model can be given; the message names the file and the reason."""


@dataclass(frozen=True)
class DataSource:
    """Where the lesson's images are.

    url: folder of folders `<wnid>-<Breed_name>`. kind: "custom" (WORKSHOP_DATA), "photos" or "sketches".
    storage_options: what fsspec needs to open `url`. weights: what `load_resnet` should be asked for to suit them.
    """

    url: str
    kind: str
    storage_options: dict = field(default_factory=dict)

    @property
    def noun(self):
        return "sketches" if self.kind == "sketches" else "photos"

    @property
    def weights(self):
        return "sketches" if self.kind == "sketches" and not os.environ.get("WORKSHOP_WEIGHTS") else "auto"


def cache_folder():
    """Return the folder for downloads and sketches: WORKSHOP_CACHE, else the user's cache folder."""
    return Path(os.environ.get("WORKSHOP_CACHE") or platformdirs.user_cache_dir("workshop-dask-pytorch"))


def find_data(per_breed=SKETCHES_PER_BREED, breeds=None):
    """Return the DataSource of the first that applies: WORKSHOP_DATA, downloaded photos, sketches made now.

    per_breed: sketches to have of each breed. breeds: those that are needed, None for all; photos of others may be
    there as well. Raises NoPhotos where WORKSHOP_DATA holds none.
    """
    if url := os.environ.get("WORKSHOP_DATA"):
        options = default_storage_options(url)
        list_photos(url, storage_options=options, breeds=breeds)
        return DataSource(url, "custom", options)
    photos = cache_folder() / "photos"
    if (photos / "complete").exists():
        return DataSource(str(photos / "Images"), "photos")
    sketches = cache_folder() / f"sketches-{per_breed}"
    write_sketches(sketches, per_breed, breeds)
    return DataSource(str(sketches), "sketches")


def default_storage_options(url):
    """Return {"anon": True} for an s3:// address where neither the environment nor ~/.aws holds credentials, else {}.

    An instance's role is not looked for: set FSSPEC_S3_ANON=false to use it.
    """
    signs = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY", "AWS_CONTAINER_CREDENTIALS", "FSSPEC_S3_")
    known = any(name.startswith(signs) for name in os.environ) or Path.home().joinpath(".aws/credentials").exists()
    return {} if known or not str(url).startswith("s3://") else {"anon": True}


def list_photos(url, *, storage_options=None, breeds=None):
    """Return the sorted paths of all images in folders `<wnid>-<Breed_name>` directly below `url`.

    breeds: names, WordNet ids or `Breed`s to keep to; None for every folder.
    Paths carry their protocol (`s3://…`) except local ones. Raises NoPhotos where there are none.
    """
    fs, root = _open(url, storage_options)
    root = root.rstrip("/")
    try:
        files = fs.find(root, maxdepth=2)
    except Exception as error:  # each protocol has its own, such as botocore's
        raise NoPhotos(f"{url!r} cannot be listed ({error}). {_CURE}") from error
    found = sorted(file for file in files if _is_photo(file[len(root) :].lstrip("/")))
    if not found:
        raise NoPhotos(f"{url!r} holds 0 images in folders named like 'n02085620-Chihuahua'. {_CURE}")
    if breeds is not None:
        wanted = {find_breed(breed).wnid for breed in breeds}
        found = [file for file in found if breed_of(file)[0] in wanted]
        if missing := sorted(wanted - {breed_of(file)[0] for file in found}):
            raise NoPhotos(f"{url!r} holds no images of {', '.join(missing)}. {_CURE}")
    return found if _is_local(fs) else [fs.unstrip_protocol(file) for file in found]


_CURE = "Check the address, or unset WORKSHOP_DATA to use the sketches that need no download."


def breed_of(path):
    """Return (wnid, breed name) from the folder that a photo lies in.

    >>> breed_of("dogs/n02085620-Chihuahua/n02085620_7.jpg")
    ('n02085620', 'Chihuahua')
    """
    match = FOLDER.fullmatch(path.replace("\\", "/").split("/")[-2]) if "/" in path.replace("\\", "/") else None
    if not match:
        raise ValueError(f"{path!r} does not lie in a folder named like 'n02085620-Chihuahua'.")
    return match.group(1), match.group(2)


def read_files(paths, storage_options=None):
    """Return the bytes of each file, in order, all read at once; in place of an unreadable one, its exception."""
    if not paths:
        return []
    fs, _ = _open(paths[0], storage_options)
    keys = [fs._strip_protocol(path) for path in paths]
    return fs.cat_ranges(keys, None, None, on_error="return")  # fs.cat would take the [1] of a name for a pattern


def decode_photo(content, path):
    """Return a file's bytes as an RGB `PIL.Image`; raise BadPhoto, which names `path`, for anything else.

    content: bytes, or the exception that reading them raised.
    """
    if isinstance(content, FileNotFoundError):
        raise BadPhoto(f"{path}: there is no such file") from content
    if isinstance(content, Exception):
        raise BadPhoto(f"{path}: cannot be read ({content})") from content
    try:
        if not content:
            raise OSError("the file is empty")
        image = Image.open(BytesIO(content), formats=FORMATS)
        _refuse_unfit(image)
        return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise BadPhoto(f"{path}: not an image that Pillow can read") from error
    except Exception as error:  # Pillow raises nearly anything for a damaged header
        raise BadPhoto(f"{path}: {str(error) or type(error).__name__}") from error


class ImageFolder(Dataset):
    """A dataset of (image, label) over folders `<wnid>-<Breed_name>`, at any address that fsspec can open.

    Like torchvision's: `classes` are the sorted folder names, a label is a position among them, `samples` are
    (path, label) pairs. A DataLoader's batch is read in one concurrent call. Safe with fork and spawn.

    transform: called on each RGB `PIL.Image`.
    breeds: names, WordNet ids or `Breed`s to keep to; None for every folder.
    on_error: "raise" a BadPhoto for a bad file, or "skip" it in a batch with a warning that names it.
    Raises NoPhotos where `url` holds none, or none of one of the `breeds`.
    """

    def __init__(self, url, transform=None, *, storage_options=None, breeds=None, on_error="raise"):
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {on_error!r}: write 'raise' or 'skip'.")
        self.url, self.transform, self.on_error = url, transform, on_error
        self.storage_options = storage_options
        paths = list_photos(url, storage_options=self.storage_options, breeds=breeds)
        folders = ["-".join(breed_of(path)) for path in paths]
        self.classes = sorted(set(folders))
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        self.samples = [(path, self.class_to_idx[name]) for path, name in zip(paths, folders, strict=True)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        return self._load(read_files([path], self.storage_options)[0], path), label

    def __getitems__(self, indices):
        samples = [self.samples[index] for index in indices]
        contents = read_files([path for path, _ in samples], self.storage_options)
        batch = []
        for content, (path, label) in zip(contents, samples, strict=True):
            try:
                batch.append((self._load(content, path), label))
            except BadPhoto as error:
                if self.on_error == "raise":
                    raise
                warnings.warn(f"Skipped {error}", stacklevel=2)
        if samples and not batch:
            raise BadPhoto(f"All {len(samples)} files of a batch are bad, {samples[0][0]} first.")
        return batch

    def _load(self, content, path):
        image = decode_photo(content, path)
        return self.transform(image) if self.transform else image


def train_val_split(dataset, val_fraction, seed):
    """Return (train, val) subsets: disjoint, each label in the same proportion, the same for the same seed.

    dataset: an ImageFolder. val_fraction: in (0, 1); each label with 2 or more photos has at least one on each side.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction!r}: give a fraction between 0 and 1, such as 0.2.")
    labels = np.array([label for _, label in dataset.samples])
    shuffle = np.random.default_rng(seed)
    train, val = [], []
    for label in np.unique(labels):
        members = shuffle.permutation(np.flatnonzero(labels == label))
        n_val = min(max(1, round(len(members) * val_fraction)), len(members) - 1)
        val += members[:n_val].tolist()
        train += members[n_val:].tolist()
    return Subset(dataset, sorted(train)), Subset(dataset, sorted(val))


def _open(url, storage_options):
    # fsspec keeps one filesystem per process and set of options, so this is cheap, and right after a fork.
    options = default_storage_options(url) if storage_options is None else storage_options
    if str(url).startswith("s3://"):
        of_botocore = {"max_pool_connections": S3_CONNECTIONS, **options.get("config_kwargs", {})}
        # Parts of a file at once; for more than one, s3fs asks for each file's size before it asks for the file.
        options = {"max_concurrency": 1, **options, "config_kwargs": of_botocore}
    try:
        return fsspec.core.url_to_fs(str(url), **options)
    except (ValueError, ImportError) as error:
        raise NoPhotos(f"{url!r} is no address that fsspec can open ({error}). {_CURE}") from error


def _is_local(fs):
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def _is_photo(relative):
    folder, _, name = relative.partition("/")
    hidden = name.startswith(".")  # macOS puts a "._photo.jpg" that is no photo beside each
    return bool(FOLDER.fullmatch(folder)) and "/" not in name and name.lower().endswith(SUFFIXES) and not hidden


def _refuse_unfit(image):
    n_pixels = image.width * image.height
    if n_pixels > MAX_PIXELS:
        raise ValueError(f"{image.width}x{image.height} pixels, more than {MAX_PIXELS:,}: make it smaller")
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise ValueError(f"{image.width}x{image.height} pixels, too narrow: crop it")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # a phone's JPEG with a preview or depth map
        raise ValueError(f"animated, {image.n_frames} frames: save one frame")
    if image.mode == "CMYK":
        raise ValueError("CMYK colours: save it as RGB")
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"{'16-bit' if image.mode.startswith('I') else 'float'} pixels: save it with 8 bits a channel")
