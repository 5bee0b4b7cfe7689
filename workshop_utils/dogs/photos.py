"""Fetch the photos of Stanford Dogs once: resumable, checked, and never written outside their folder."""

import hashlib
import re
import shutil
import tarfile
from contextlib import contextmanager
from pathlib import Path

from fsspec.asyn import sync
from tqdm import tqdm

from workshop_utils.data import N_PHOTOS
from workshop_utils.storage import cache_folder, open_address, whole_file

BUCKET = "s3://saturn-public-data/dogs/Images"
ARCHIVE = "http://vision.stanford.edu/aditya86/ImageNetDogs/images.tar"
# github.com/tensorflow/datasets, tensorflow_datasets/url_checksums/stanford_dogs.txt
SHA256 = {ARCHIVE: "a443fc2f9a851aa1a7b8e4fa4af94b8459fce2c9f5a2f4dd4669cf9673a4ec58"}
ANSWER_S = 8  # a source that says nothing for so long counts as out of reach
CHUNK_BYTES = 2**22
FILES_AT_ONCE = 128
BREED = re.compile(r"n\d{8}-[\w-]+")
PHOTO = re.compile(BREED.pattern + r"/[\w-]+\.(jpg|jpeg|png)", re.IGNORECASE)
AGAIN = "What arrived is kept: run the same command again to go on."


class PhotosError(RuntimeError):
    """The photos could not be fetched; the message says why and what to do."""


def fetch_photos(source: str | None = None, folder: str | Path | None = None, *, n_photos: int = N_PHOTOS) -> Path:
    """Fetch all photos into `<folder>/Images/<wnid>-<Breed_name>/`, mark them `<folder>/complete`, return `Images`.

    source: any fsspec address of a folder in that layout, or of a .tar with `Images/` in it; None for the public
    bucket, else the dataset's own archive. folder: None for where `find_data` looks.
    Files of the right size are not fetched again; an archive goes on where it stopped. Raises PhotosError.
    """
    folder = Path(folder or cache_folder() / "photos")
    images, complete = folder / "Images", folder / "complete"
    if complete.exists() and len(_on_disk(images)) == n_photos:
        return images
    url, fs, path, size = _reach([source] if source else [BUCKET, ARCHIVE])
    try:
        images.mkdir(parents=True, exist_ok=True)
        complete.unlink(missing_ok=True)
        with _archive(fs, path, url, size, folder) if url.endswith(".tar") else _listing(fs, path) as (sizes, read):
            if len(sizes) != n_photos:
                raise PhotosError(f"{url} holds {len(sizes)} photos, not {n_photos}: check the address.")
            _fill(images, sizes, read)
        if (n_found := len(_on_disk(images))) != n_photos:
            raise PhotosError(f"{images} holds {n_found} photos, not {n_photos}: move strange ones away.")
        complete.write_text(f"{n_photos} photos from {url}\n", encoding="utf-8")
    except PhotosError:
        raise
    except Exception as error:  # each filesystem has its own
        raise PhotosError(f"{url} stopped: {error or type(error).__name__}. {AGAIN}") from error
    return images


def _reach(urls):
    reasons = ""
    for url in urls:
        try:
            fs, path = open_address(url)
            info = sync(fs.loop, fs._info, path, timeout=ANSWER_S) if fs.async_impl else fs.info(path)
            return url, fs, path, info.get("size")
        except Exception as error:
            reason = str(error.__cause__ or "") or str(error) or f"no answer within {ANSWER_S} s"
            reasons += f"\n  {url}: {reason}"
    cure = "Check the address and the network. The sketches need no download: workshop data sketches"
    raise PhotosError(f"No photos can be fetched from{reasons}\n{cure}")


@contextmanager
def _listing(fs, root):
    found = {path[len(root) :].strip("/"): info for path, info in fs.find(root, detail=True).items()}
    sizes = {name: info["size"] for name, info in found.items() if PHOTO.fullmatch(name)}
    yield sizes, lambda names: fs.cat_ranges([found[name]["name"] for name in names], None, None, on_error="return")


@contextmanager
def _archive(fs, path, url, size, folder):
    part = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:8]}.tar.part"
    _download(fs, path, url, size, part)
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if url in SHA256 else None
    if digest != SHA256.get(url):
        part.unlink()
        raise PhotosError(f"{url} has SHA-256 {digest}, not {SHA256[url]}. It is deleted: run the command again.")
    try:
        with tarfile.open(part, "r:") as tar:  # "r:" reads no compressed archive, so none can be a bomb
            photos = {name: member for member in tar if (name := _safe_name(member))}
            sizes = {name: member.size for name, member in photos.items()}
            yield sizes, lambda names: [tar.extractfile(photos[name]).read() for name in names]
    except tarfile.TarError as error:
        part.unlink()
        raise PhotosError(f"{url} is not what it should be: {error}. What arrived of it is deleted.") from error
    part.unlink()


def _safe_name(member):
    name = member.name.removeprefix("./").removeprefix("Images/")
    if member.isreg() and PHOTO.fullmatch(name):
        return name
    if not (member.isdir() and (name in (".", "Images") or BREED.fullmatch(name))):
        raise tarfile.TarError(f"it holds {member.name!r}, no photo in a breed's folder, so nothing was unpacked")


def _download(fs, path, url, size, part):
    done = part.stat().st_size if part.exists() else 0
    _check_space(part.parent, 2 * (size or 0) - done)  # the archive, and then what is in it
    with fs.open(path, "rb", block_size=CHUNK_BYTES) as source, part.open("ab") as target, _bar(size, done) as bar:
        try:
            source.seek(done)
        except ValueError:  # the server cannot send a part, or the part is of a longer archive
            target.truncate(0)
            bar.reset()
        while bar.n != size and (chunk := source.read(CHUNK_BYTES)):
            bar.update(target.write(chunk))
    if size not in (None, part.stat().st_size):
        raise PhotosError(f"{url} stopped after {part.stat().st_size:,} of {size:,} bytes. {AGAIN}")


def _fill(images, sizes, read):
    there = _on_disk(images)
    missing = [name for name, size in sizes.items() if there.get(name) != size]
    n_bytes, missing_bytes = sum(sizes.values()), sum(sizes[name] for name in missing)
    _check_space(images, missing_bytes)
    with _bar(n_bytes, n_bytes - missing_bytes) as bar:
        for start in range(0, len(missing), FILES_AT_ONCE):
            names = missing[start : start + FILES_AT_ONCE]
            for name, content in zip(names, read(names), strict=True):
                if isinstance(content, Exception):
                    raise PhotosError(f"{name} could not be read ({content}). {AGAIN}") from content
                if len(content) != sizes[name]:
                    raise PhotosError(f"{name} is cut off after {len(content)} of {sizes[name]} bytes. {AGAIN}")
                with whole_file(images / name) as part:
                    part.write_bytes(content)
                bar.update(len(content))


def _check_space(folder, n_bytes):
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise PhotosError(f"{folder} has {free / 1e9:.1f} GB free, {n_bytes / 1e9:.1f} GB are needed: use --folder.")


def _bar(total, done):
    return tqdm(total=total, initial=done, desc="photos", unit="B", unit_scale=True)


def _on_disk(images):
    found = {path.relative_to(images).as_posix(): path.stat().st_size for path in images.glob("*/*")}
    return {name: size for name, size in found.items() if PHOTO.fullmatch(name)}
