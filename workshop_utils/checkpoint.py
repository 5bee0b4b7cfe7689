"""Checkpoints: files that are there whole or not at all."""

import os
import pickle
import re
import zipfile
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch.serialization import get_unsafe_globals_in_checkpoint

from workshop_utils.storage import open_address, whole_file

A_FOLDER = 0x10  # a bit of a zip's directory, as MS-DOS had it
CURE = "Delete it, or give another path."
OTHER_HEAD = (
    "its fc is not one Linear, so load_resnet cannot make it. A run resumes from the file; elsewhere, make the model "
    "as you did, and model.load_state_dict(load_checkpoint(path)['state_dict'])."
)
CONVERT = (
    "Convert them before you save: `.item()` of a NumPy number, `torch.as_tensor` of an array, `str` of a path, `vars` "
    "of a Namespace."
)


class WeightsError(RuntimeError):
    """Weights or a checkpoint cannot be loaded; the message says which, why, and what to do."""


def save_checkpoint(path: str | os.PathLike, /, **values: object) -> None:
    """Write `values` (tensors, numbers, strings, dicts and lists of them) to `path`: whole or not at all.

    path: a local path, or an address, protocol://…, such as "s3://…"; fsspec takes what it needs there, such as
    an endpoint, from the environment. A process that is killed leaves what was there before, or all that is new; and
    perhaps, on a local disk, a part of it beside that, which nobody reads: `<path>.….part`.
    Raises OSError, for example if the disk is full, and TypeError for a value that `load_checkpoint` refuses.
    """
    fs, key = open_address(path)
    try:
        if isinstance(fs, LocalFileSystem):
            with whole_file(Path(os.path.realpath(key))) as part:  # of a link, the file that it leads to
                _write(values, part)
        else:
            with TemporaryDirectory() as folder:
                _write(values, part := Path(folder, "checkpoint.pt"))
                fs.put_file(str(part), key)  # an object store shows a file once all of it is there
    except (RuntimeError, OSError) as error:
        why = error if isinstance(error, OSError) else error.__context__  # PyTorch calls a full disk "unexpected pos"
        if isinstance(why, OSError) and why.errno:
            raise OSError(why.errno, why.strerror, str(path)) from error
        raise


def load_checkpoint(path: str | os.PathLike) -> dict:
    """Return the dict in a checkpoint file, on the CPU, without running any code that the file may hold.

    path: as in `storage.absolute_address`.
    Raises WeightsError if there is no file, or it cannot be read, is damaged, or could run code.
    """
    name = repr(str(path))
    try:
        fs, key = open_address(path)
        file = BytesIO(fs.cat_file(key))
    except FileNotFoundError as error:
        raise WeightsError(f"There is no file {name}: check the path, or unset WORKSHOP_WEIGHTS.") from error
    except Exception as error:  # fsspec raises errors of many types
        raise WeightsError(f"{name} cannot be read: {_in_short(error)}") from error
    try:
        if zipfile.is_zipfile(file):  # torch.load checks no checksum, and reads nothing of what is marked as a folder
            archive = zipfile.ZipFile(file)
            folders = [part.filename for part in archive.infolist() if part.external_attr & A_FOLDER]
            if part := archive.testzip() or next(iter(folders), ""):
                raise ValueError(f"its part {part!r} is damaged")
        file.seek(0)
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises errors of many types
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            raise WeightsError(f"{name} holds objects of {refused[1]}, which could run code. {CONVERT}") from error
        # PyTorch's own sentence advises to trust the file.
        why = "it is no pickle of PyTorch" if isinstance(error, pickle.UnpicklingError) else _in_short(error)
        raise WeightsError(f"{name} is damaged, or no checkpoint of PyTorch ({why}). {CURE}") from error
    if not isinstance(checkpoint, dict):
        raise WeightsError(f"{name} holds a {type(checkpoint).__name__}, not a dict of named values.")
    return checkpoint


def load_on_all_ranks(path: str | os.PathLike) -> dict | None:
    """Return the dict in a checkpoint file as rank 0 reads it, on every rank; None if there's no file.

    Rank 0 alone reads, because another rank may see a new file late, on NFS for example, and begin elsewhere. All ranks
    have to call this together. Without a process group, it's read here.

    Args:
        path: As in `storage.absolute_address`.

    Raises:
        WeightsError: On rank 0, which ends the job, for a file that can't be loaded.
    """
    grouped = dist.is_initialized()
    saved: list[dict | None] = [None]
    if not grouped or dist.get_rank() == 0:
        saved = [load_checkpoint(path) if checkpoint_exists(path) else None]
    if grouped:
        dist.broadcast_object_list(saved, src=0)
    return saved[0]


def checkpoint_exists(path: str | os.PathLike) -> bool:
    """Return whether there is a file at `path`, which is as in `storage.absolute_address`.

    Raises OSError where the storage does not say: fsspec's own `exists` would then answer that there is none. Raises
    IsADirectoryError for a folder.
    """
    fs, key = open_address(path)
    try:
        if fs.info(key)["type"] == "directory":
            raise IsADirectoryError(f"{str(path)!r} is a folder: give the path of a file.")
    except FileNotFoundError:
        return False
    return True


def _write(values: dict, part: Path) -> None:
    with part.open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())  # a power cut must not leave the name without the content
    if refused := get_unsafe_globals_in_checkpoint(part):  # reads the names of the types, and no tensor
        raise TypeError(f"A checkpoint cannot hold objects of {', '.join(sorted(refused))}. {CONVERT}")


def _in_short(error: Exception) -> str:
    return str(error).split("\n")[0][:200] or repr(error)
