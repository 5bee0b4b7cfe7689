"""Find the dog photos (or sketches) and read them as a PyTorch dataset, from any place that fsspec can reach."""

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import chain

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from torch.utils.data import Dataset, Subset

from workshop_utils.arguments import fraction
from workshop_utils.dogs.breeds import BREEDS as BREEDS  # "as": notebooks import these from here
from workshop_utils.dogs.breeds import HELD_OUT as HELD_OUT
from workshop_utils.dogs.breeds import Breed, find_breed
from workshop_utils.dogs.sketches import DRAWING_VERSION, write_sketches
from workshop_utils.dogs.sketches import draw_dog as draw_dog
from workshop_utils.labels import CLASS_FOLDER, NAME_OF, ClassNames
from workshop_utils.reading.decode import BadPhoto as BadPhoto
from workshop_utils.reading.decode import decode_photo as decode_photo
from workshop_utils.reading.s3 import Files, list_folder, read_objects
from workshop_utils.shared import copy_for_workers, on_all_workers
from workshop_utils.storage import (
    ADDRESS,
    CacheError,
    absolute_address,
    cache_folder,
    default_storage_options,
    local_path,
    open_address,
    variables,
)
from workshop_utils.training.batches import world
from workshop_utils.weights import resolve_weights

# Hidden files are no photos: macOS puts a "._photo.jpg" beside each.
EXTENSIONS = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp")
PHOTO = re.compile(rf"[^/]+/[^./][^/]*\.(?i:{'|'.join(EXTENSIONS)})")  # its path below the root
SKETCHES_PER_BREED = 8
FOLDERS_AT_ONCE = 64  # listed at the same time: storage takes long to answer, but no longer for many questions
PATIENCE_S = 0.02  # files of a local disk are read in turn for so long; a slow one, as of a network, gets threads then
FILES_AT_ONCE = 16
ENCODING = "utf-8", "surrogateescape"
COMPARED_AT_ONCE, MOST_COMPARED_BYTES = 256, 2_000_000_000  # files of equal size, read to find copies
CURE = "Check the address, or unset WORKSHOP_DATA to use the sketches that need no download."


class NoPhotos(FileNotFoundError):
    """A place holds no photos in folders named like 'n02085620-Chihuahua'."""


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

    All workers can reach the sketches: see `shared.copy_for_workers`.
    Raises NoPhotos if WORKSHOP_DATA holds none; shared.NotShared if workers do not see photos or sketches;
    storage.CacheError if there is no room for sketches.
    """
    if url := variables().data:
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

    A folder may also be called by its WordNet id alone, as ImageNet's are, or with a `_` in between. Images are files
    with one of EXTENSIONS. A line says how many other files and folders there are, and how many links lead
    nowhere; hidden ones do not count.
    breeds: names, WordNet ids or `Breed`s of the folders to list; None for all.

    Paths carry their protocol and host (`s3://…`) except local ones. Raises NoPhotos if there are none.
    """
    return list(_list_photos(url, storage_options, breeds))


def _list_photos(url: str | os.PathLike, storage_options: dict | None, breeds: Iterable[Breed | str] | None) -> Files:
    """Return what `list_photos` does, with sizes and ETags."""
    wanted = None if breeds is None else {find_breed(breed).wnid for breed in breeds}
    others: set[str] = set()
    missing: set[str] = set()

    def is_wanted(folder):
        name = folder.rstrip("/").rpartition("/")[2]
        if not (breed := CLASS_FOLDER.fullmatch(name)) and folder.startswith(root):
            others.add(name)
        return bool(breed and (wanted is None or breed[1] in wanted))

    address = absolute_address(url)
    try:
        fs, root = open_address(address, storage_options)
        files = _list_folders(fs, root, is_wanted, others, missing)
        found = sorted(file for file in files if PHOTO.fullmatch(file.removeprefix(root.rstrip("/")).lstrip("/")))
    except Exception as error:  # each protocol raises errors of its own, such as botocore's
        raise NoPhotos(f"{address!r} cannot be listed ({error}). {CURE}") from error
    _say_what_is_left_out(address, set(files).difference(found), others, missing)
    if not found and isinstance(fs, LocalFileSystem) and not fs.isdir(root):
        raise NoPhotos(f"{address!r} is no folder. {CURE}")
    if not found and not wanted:
        raise NoPhotos(f"{address!r} holds 0 images in folders named like 'n02085620-Chihuahua'. {CURE}")
    if not found:
        _list_photos(address, storage_options, None)  # raises if there are none of other breeds either
    if wanted and (lacking := sorted(wanted - {breed_of(file)[0] for file in found})):
        raise NoPhotos(f"{address!r} holds no images of {', '.join(lacking)}. {CURE}")
    if isinstance(fs, LocalFileSystem):
        return {file: files[file] for file in found}
    # fs.unstrip_protocol would lose a host. Files of http:// have whole addresses.
    begin, below = address.rstrip("/"), root.rstrip("/")
    return {file if "://" in file else begin + file.removeprefix(below): files[file] for file in found}


@cache  # not again for each list of the same folder
def _say(line):
    if world()[0] == 0:  # the other ranks list the same
        print(line)


def _say_what_is_left_out(address, files, folders, missing):
    files = [name for file in files if (name := file.rpartition("/")[2]) and name[0] != "." and "?" not in name]
    folders = [name for name in folders if name[:1] not in (".", "")]
    kinds = sorted({os.path.splitext(name)[1].lower() or "no extension" for name in files})
    shown = ", ".join(ascii(kind)[1:-1] for kind in kinds[:8])
    left_out = [f"files ({len(files)}): {shown}{', …' if len(kinds) > 8 else ''}"] if files else []
    left_out += [f"folders without a WordNet id ({len(folders)}), such as {min(folders)!a}"] if folders else []
    left_out += [f"links that lead nowhere ({len(missing)}), such as {min(missing)!a}"] if missing else []
    if left_out:
        _say(f"Left out of {address}: {'; '.join(left_out)}.")


def _list_folders(fs, root, is_wanted, others, missing):
    """Return the `Files` in the wanted folders directly below `root`; raise what the filesystem raises.

    others gets the names of folders that contain one without a name, as S3's key "breed//1.jpg" makes it; missing gets
    those of links that lead nowhere.
    """

    def note_nameless(folder, infos):
        if any(info.get("StorageClass") == "DIRECTORY" for info in infos):  # s3fs's, and not beside the others
            others.add(f"{folder.rpartition('/')[2]}//")

    def list_one(folder):
        if listed := list_folder(fs, folder):
            return listed[1]
        try:
            found = fs.find(folder, maxdepth=1, detail=True, on_error="raise")
        except FileNotFoundError:
            missing.add(folder.rstrip("/").rpartition("/")[2])
            return {}
        note_nameless(folder, found.values())
        gone = [path for path, info in found.items() if info.get("islink") and not fs.exists(path)]
        missing.update(path.rpartition("/")[2] for path in gone)
        return {path: (info.get("size"), info.get("ETag", "")) for path, info in found.items() if path not in gone}

    if listed := list_folder(fs, root):
        folders = listed[0]
    else:
        folders = []
        for _, below, beside in fs.walk(root, maxdepth=1, detail=True, on_error=_unless_missing):
            note_nameless(root, beside.values())
            links = (info["name"] for info in beside.values() if info.get("islink"))
            folders += [info["name"] for info in below.values()] + [link for link in links if not fs.isfile(link)]
    can_use_threads = fs.async_impl or isinstance(fs, LocalFileSystem)  # ftp:// and others have one connection
    with ThreadPoolExecutor(FOLDERS_AT_ONCE if can_use_threads else 1) as pool:
        return dict(chain.from_iterable(map(dict.items, pool.map(list_one, filter(is_wanted, folders)))))


def _unless_missing(error):
    if not isinstance(error, FileNotFoundError):  # of the root
        raise error


def breed_of(path: str) -> tuple[str, str]:
    """Return (WordNet id, breed name) from the folder that a photo lies in.

    >>> breed_of("dogs/n02085620-Chihuahua/n02085620_7.jpg")
    ('n02085620', 'Chihuahua')
    """
    if found := class_folder(path):
        return found
    raise ValueError(f"{path!r} does not lie in a folder named like 'n02085620-Chihuahua'.")


def class_folder(path: str) -> tuple[str, str] | None:
    """Return what `breed_of` does, or None for a photo in another folder."""
    *_, folder, _ = ["", *path.split("/" if "/" in path else "\\")]
    if not (match := CLASS_FOLDER.fullmatch(folder)):
        return None
    wnid, name = match.groups()
    return wnid, name or NAME_OF.get(wnid, wnid)


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
        return _read_from_disk(paths)
    contents = read_objects(fs, paths)
    left = [position for position, content in enumerate(contents) if content is None]
    # ftp's cat_file takes no address, and s3fs would strip the slash at a key's end.
    keys = [paths[position] if fs.async_impl else fs._strip_protocol(paths[position]) for position in left]
    # fs.cat would take the [1] of a name for a pattern.
    for position, content in zip(left, fs.cat_ranges(keys, None, None, on_error="return"), strict=True):
        contents[position] = content
    return contents


def _read_from_disk(paths):
    """Return what `read_files` does. To hand a file in memory to a thread takes longer than to read it."""
    contents: list[bytes | Exception] = []
    start = time.monotonic()
    while len(contents) < len(paths) and time.monotonic() - start < PATIENCE_S:
        contents.append(_read_local(paths[len(contents)]))
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return contents + list(pool.map(_read_local, paths[len(contents) :]))


def _read_local(path):
    try:
        return local_path(path).read_bytes()
    except Exception as error:
        return error


class _Samples(Sequence):
    """(path, label) pairs of files, in arrays: a list of a million costs each DataLoader worker 170 MB.

    A forked process copies what it reads of a list, because that changes the reference counts.
    """

    def __init__(self, files, labels):
        paths = [path.encode(*ENCODING) for path in files]
        self._paths, self._ends = b"".join(paths), np.cumsum([len(path) for path in paths])
        self._labels = np.array(labels)

    def __len__(self):
        return len(self._labels)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # of those from the end, too
        path = self._paths[self._ends[index - 1] if index else 0 : self._ends[index]]
        return path.decode(*ENCODING), int(self._labels[index])


class ImageFolder(Dataset):
    """A dataset of (image, label) over folders `<wnid>-<Breed_name>`, at a path or an address that fsspec opens.

    Like torchvision's: `classes` are the sorted folder names, a label is a position among them (`class_to_idx`),
    `samples` are (path, label) pairs. The photos of a DataLoader's batch are read at the same time, in any kind of
    child process.

    transform: called on each photo, an upright RGB `PIL.Image`.
    breeds: names, WordNet ids or `Breed`s of the folders to take; None for all.
    classes: names of the labels, such as those of another ImageFolder or of a model; a folder's is found by its WordNet
    id or its name, however that is written. None for the folders here.
    Raises NoPhotos if `url` holds none, or none of one of the `breeds`; ValueError if two folders have one WordNet id,
    and for a folder that is none of the `classes`; BadPhoto on reading a file that is no photo.

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
        classes: Sequence[str] | None = None,
    ) -> None:
        self.url, self.transform, self.storage_options = url, transform, storage_options
        files = _list_photos(url, storage_options, breeds)
        folders = {path: path.split("/")[-2] for path in files}
        names = {folder: "-".join(dict.fromkeys(breed_of(path))) for path, folder in folders.items()}
        _refuse_two_of_one_id(names)
        if isinstance(classes, str | Mapping | Set):
            raise ValueError(f"classes is {classes!r:.100}: give a list of names, in the order of their labels.")
        self.classes = sorted(names.values()) if classes is None else list(map(str, classes))
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        known = ClassNames(self.classes)
        labels = {folder: known.label_of(name) for folder, name in names.items()}
        if others := sorted(folder for folder, label in labels.items() if label is None):
            raise ValueError(
                f"{url!r} has {len(others)} folders that are none of the {len(self.classes)} classes, such as "
                f"{others[0]!r}: leave them out with breeds, or add them to classes."
            )
        if len(set(labels.values())) < len(labels):
            raise ValueError(f"Several folders of {url!r} are one of the classes: {labels}. Give classes that differ.")
        self.samples: Sequence[tuple[str, int]] = _Samples(files, [labels[folder] for folder in folders.values()])
        n_alike = Counter(files.values())
        # Sizes of files that may be copies, as another one has the same size and ETag.
        self.sizes_alike = {path: file[0] for path, file in files.items() if file[0] and n_alike[file] > 1}

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


def _refuse_two_of_one_id(names):
    """names: {folder: class}. Two folders would be two labels of one class."""
    first: dict[str, str] = {}
    for folder, name in sorted(names.items()):
        if (other := first.setdefault(name[:9], folder)) != folder:
            raise ValueError(f"The folders {other!a} and {folder!a} have one WordNet id: keep one, or move its photos.")


def train_val_split(dataset: ImageFolder, val_fraction: float, seed: int) -> tuple[Subset, Subset]:
    """Return (train, val): disjoint subsets with each label in the same proportion; the same seed gives the same.

    Copies of a photo, with the same bytes, are on its side, also if they have another label, and don't count in the
    proportion. A line says how many there are.
    val_fraction: in (0, 1); each label with 2 or more different photos, not counting copies of another label's, has at
    least one on each side.
    Raises BadPhoto if a photo can't be read whose size is that of another.
    """
    val_fraction = fraction("val_fraction", val_fraction)
    labels, shuffle = np.array([label for _, label in dataset.samples]), np.random.default_rng(seed)
    first = _first_copies(dataset, labels)
    is_first = first == np.arange(len(labels))
    val: list[int] = []
    for label in np.unique(labels):
        members = shuffle.permutation(np.flatnonzero((labels == label) & is_first))
        n_val = min(max(1, round(len(members) * val_fraction)), len(members) - 1)
        val += members[:n_val].tolist()
    in_val = np.isin(first, val)
    return Subset(dataset, np.flatnonzero(~in_val).tolist()), Subset(dataset, np.flatnonzero(in_val).tolist())


def _first_copies(dataset, labels):
    """Return, for each photo, the index of the first one with the same bytes, which is mostly its own."""
    samples, first = dataset.samples, np.arange(len(labels))
    sizes = getattr(dataset, "sizes_alike", {})  # of a dataset of another kind nothing is known
    alike = [index for index, (path, _) in enumerate(samples) if path in sizes] if sizes else []
    n_bytes = sum(sizes.values())
    if n_bytes > MOST_COMPARED_BYTES:
        _say(
            f"Copies among the photos of {dataset.url} are not looked for: {len(alike):,} are as large as another one, "
            f"and have {n_bytes / 1e9:.0f} GB to read."
        )
        return first
    of_content: dict[bytes, int] = {}
    for start in range(0, len(alike), COMPARED_AT_ONCE):
        indices = alike[start : start + COMPARED_AT_ONCE]
        paths = [samples[index][0] for index in indices]
        for index, path, content in zip(indices, paths, read_files(paths, dataset.storage_options), strict=True):
            if isinstance(content, Exception):  # ranks that went on might split differently
                raise BadPhoto(f"{path}: cannot be read ({content})") from content
            first[index] = of_content.setdefault(sha256(content).digest(), index)
    copies = np.flatnonzero(first != np.arange(len(labels)))
    if len(copies):
        mislabeled = copies[labels[copies] != labels[first[copies]]]
        example = [*mislabeled, *copies][0]
        _say(
            f"{len(copies)} of the {len(labels)} photos of {dataset.url} are copies of others, {len(mislabeled)} of "
            "them with another label. Each is in the same part of a split as its original. For example, "
            f"{samples[example][0]} is a copy of {samples[first[example]][0]}."
        )
    return first
