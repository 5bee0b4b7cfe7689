"""Fetch the photos of Stanford Dogs once: the download resumes, is checked, and writes to its own folder only."""

import hashlib
import re
import shutil
import tarfile
from pathlib import Path
from typing import IO, cast

from fsspec.asyn import sync
from fsspec.callbacks import TqdmCallback
from tqdm import tqdm

from daskrun.screen import screen
from workshop_utils.storage import cache_folder, local_path, open_address

N_PHOTOS = 20_580  # of Stanford Dogs
BUCKET = "s3://saturn-public-data/dogs/Images"
ARCHIVE = "http://vision.stanford.edu/aditya86/ImageNetDogs/images.tar"
# github.com/tensorflow/datasets, tensorflow_datasets/url_checksums/stanford_dogs.txt
SHA256 = {ARCHIVE: "a443fc2f9a851aa1a7b8e4fa4af94b8459fce2c9f5a2f4dd4669cf9673a4ec58"}
ANSWER_S = 8  # time limit for the first answer of a source
CHUNK_BYTES = 2**22
BREED = re.compile(r"n\d{8}-[\w-]+")
PHOTO = re.compile(BREED.pattern + r"/[\w-]+\.(jpg|jpeg|png)", re.IGNORECASE)
AGAIN = "Run the same command again to go on; what has arrived is kept."


class PhotosError(RuntimeError):
    """The photos could not be fetched; the message says why and what to do."""


def fetch_photos(source: str | None = None, folder: str | Path | None = None, *, n_photos: int = N_PHOTOS) -> Path:
    """Fetch all photos into `<folder>/Images/<wnid>-<Breed_name>/`, write `<folder>/complete`, and return `Images`.

    source: the path or address of a folder in that layout, or of a .tar with `Images/` in it; None for the public
    bucket or, if that is out of reach, the dataset's own archive. folder: None for the one where `find_data` looks.
    Files of the right size are not fetched again, and an archive continues where it stopped. Raises PhotosError.
    """
    try:
        folder = local_path(folder or cache_folder() / "photos")
    except ValueError as error:
        raise PhotosError(f"The photos cannot be written: {error}") from error
    images, complete = folder / "Images", folder / "complete"
    if complete.exists() and len(_sizes(*open_address(images))) == n_photos:
        return images
    url, fs, path, n_bytes = _reach([source] if source else [BUCKET, ARCHIVE])
    try:
        images.mkdir(parents=True, exist_ok=True)
        complete.unlink(missing_ok=True)
        sizes, copy = _archive(fs, path, url, n_bytes, images) if url.endswith(".tar") else _listing(fs, path, images)
        if len(sizes) != n_photos:
            raise PhotosError(f"{url} holds {len(sizes)} photos, not {n_photos}: check the address.")
        missing = dict(sizes.items() - _sizes(*open_address(images)).items())
        if (needed := sum(missing.values())) > (free := shutil.disk_usage(folder).free):
            raise PhotosError(f"{folder} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed: use --folder.")
        for name in missing:
            (images / name).parent.mkdir(exist_ok=True)
        copy(sorted(missing))
        if strange := sorted(_sizes(*open_address(images)).items() ^ sizes.items()):
            raise PhotosError(f"{images} differs from {url}: move {strange[0][0]} away. {AGAIN}")
        complete.write_text(f"{n_photos} photos from {url}\n", encoding="utf-8")
        return images
    except PhotosError:
        raise
    except Exception as error:  # each filesystem raises errors of its own
        raise PhotosError(f"{url} stopped: {str(error) or type(error).__name__}. {AGAIN}") from error


def _reach(urls):
    reasons = ""
    for url in urls:
        try:
            fs, path = open_address(url)
            info = sync(fs.loop, fs._info, path, timeout=ANSWER_S) if fs.async_impl else fs.info(path)
            return url, fs, path, info.get("size")
        except Exception as error:
            reasons += f"\n  {url}: {str(error.__cause__ or error) or f'no answer within {ANSWER_S} s'}"
    cure = "Check the address and the network. Without photos the lessons draw sketches, which need no download."
    raise PhotosError(f"No photos can be fetched from{reasons}\n{cure}")


# Both `_listing` and `_archive` return the size of each photo, and a function that copies the named ones into `images`.
def _listing(fs, root, images):
    def copy(names):
        theirs = [f"{root.rstrip('/')}/{name}" for name in names]
        bar = TqdmCallback({"desc": "photos", "file": screen()})
        fs.get(theirs, [str(images / name) for name in names], callback=bar)

    return _sizes(fs, root), copy


def _archive(fs, path, url, n_bytes, images):
    def copy(names):
        with tarfile.open(part, "r:") as tar:
            for name in tqdm(names, desc="photos", file=screen()):
                (images / name).write_bytes(cast(IO[bytes], tar.extractfile(members[name])).read())
        part.unlink()

    part = images.with_name(f"{hashlib.sha256(url.encode()).hexdigest()[:8]}.tar.part")
    with fs.open(path, "rb", block_size=CHUNK_BYTES) as source, part.open("ab") as target:
        try:
            if n_bytes is not None and part.stat().st_size > n_bytes:
                raise ValueError("it is no part of this archive: another one had this address before")
            source.seek(part.stat().st_size)
        except ValueError:  # or the server cannot send part of a file
            target.truncate(0)
        so_far = part.stat().st_size
        with tqdm.wrapattr(target, "write", n_bytes, initial=so_far, desc="archive", file=screen()) as counted:
            shutil.copyfileobj(source, counted, CHUNK_BYTES)
    if n_bytes not in (None, arrived := part.stat().st_size):
        raise PhotosError(f"{url} stopped after {arrived:,} of {n_bytes:,} bytes. {AGAIN}")
    try:
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256.get(url, digest):
            raise tarfile.TarError(f"it has SHA-256 {digest}, not {SHA256[url]}")
        with tarfile.open(part, "r:") as tar:  # "r:" reads no compressed archive, so it cannot be a bomb
            members = {name: member for member in tar if (name := _safe_name(member))}
        return {name: member.size for name, member in members.items()}, copy
    except tarfile.TarError as error:
        part.unlink()
        raise PhotosError(f"{url} is not what it should be: {error}. It is deleted: run the command again.") from error


def _safe_name(member):
    name = member.name.removeprefix("./").removeprefix("Images/")
    if member.isreg() and PHOTO.fullmatch(name):
        return name
    if not (member.isdir() and (name in (".", "Images") or BREED.fullmatch(name))):
        raise tarfile.TarError(f"it holds {member.name!r}, no photo in a breed's folder, so nothing was unpacked")


def _sizes(fs, root):
    found = {path[len(root) :].strip("/"): info["size"] for path, info in fs.find(root, detail=True).items()}
    return {name: size for name, size in found.items() if PHOTO.fullmatch(name)}
