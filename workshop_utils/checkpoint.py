"""Checkpoints: files that are there whole or not at all, from which a training run is resumed."""

import os
import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch.serialization import get_unsafe_globals_in_checkpoint

from workshop_utils.arguments import whole_number
from workshop_utils.labels import Names, categories_of, check_same_classes, name_head, named
from workshop_utils.preemption import Preempted, ranks_with_sigterm
from workshop_utils.storage import absolute_address, open_address, whole_file

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


@dataclass
class RunCheckpoint:
    """Where a run of `train` is saved, and what is saved there; without a path nothing is."""

    path: str | os.PathLike | None
    every: int  # steps between two saves
    settings: dict  # what a run must have in common with the one that it resumes
    classes: dict[str, Names | None]  # of the labels of its datasets and its head; they must mean the same, too
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    signals: list[int]  # each SIGTERM that this process got: see `sigterm_noticed`

    def __post_init__(self) -> None:
        self.every = whole_number("checkpoint_every", self.every, 1)
        if self.path is not None:
            self.path = absolute_address(self.path)
            if hasattr(self.model, "about") and not isinstance(getattr(self.model, "fc", None), torch.nn.Linear):
                warnings.warn(f"{self.path!r} will hold a model of its own kind: {OTHER_HEAD}", stacklevel=3)

    def resume(self) -> tuple[int, dict]:
        """Return (steps done, numbers so far), and load the states of the checkpoint, if any; name the model's head.

        Raises ValueError for a checkpoint of another run, WeightsError for a damaged one.
        """
        if not self.path or not checkpoint_exists(self.path):
            name_head(self.model, self.classes["train_set"] or {})
            return 0, {}
        saved = load_checkpoint(self.path)
        if "training" not in saved:
            raise ValueError(f"{self.path!r} was not written by train, so it cannot be resumed. {CURE}")
        step, numbers, old = (saved["training"][name] for name in ("step", "numbers", "settings"))
        names = self._compare_classes(named(saved.get("categories")), saved["training"].get("classes") or {})
        others = [
            f"{name} {old.get(name)!r}, now {now!r}" for name, now in self.settings.items() if old.get(name) != now
        ]
        if others:
            raise ValueError(f"{self.path!r} is of a run with other settings: {', '.join(others)}. {CURE}")
        try:
            self.model.load_state_dict(saved["state_dict"])
            self.optimizer.load_state_dict(saved["optimizer"])
        except (RuntimeError, ValueError) as error:
            why = str(error)[:300]
            raise ValueError(f"{self.path!r} is of a run with another model ({why}). {CURE}") from error
        name_head(self.model, names)
        return step, numbers

    def _compare_classes(self, of_head: Names, of_images: Names) -> Names:
        """Return all names that are known; raise ValueError if a label was another class when it was saved.

        of_head, of_images: as they were saved. What the training images do not name now, they still mean.
        """
        saved = of_head | of_images
        for of, names in self.classes.items():
            check_same_classes(saved, names, repr(self.path), of, CURE)
        now = self.classes["train_set"] = self.classes["train_set"] or of_images
        if of_images and now.keys() != of_images.keys():
            raise ValueError(f"{self.path!r} is of a run with {len(of_images)} classes, now {len(now)}. {CURE}")
        return saved | now

    def keep(self, step: int, numbers: dict | None = None) -> None:
        """Save `step` if it is due, if it ends an epoch, which has `numbers`, or if a rank got SIGTERM.

        Raises Preempted on all ranks if any got SIGTERM. All ranks have to call this together.
        """
        if not self.path:
            return
        preempted = ranks_with_sigterm(self.signals)
        is_rank_0 = not dist.is_initialized() or dist.get_rank() == 0
        if is_rank_0 and (preempted or numbers or step % self.every == 0):
            self._save(step, numbers or {})
        if preempted:
            if dist.is_initialized():
                dist.barrier()  # the first rank to fail ends the job, even while another still saves
            raise Preempted(step, preempted, self.path)

    def _save(self, step: int, numbers: dict) -> None:
        assert self.path
        # The loss of another rank or the step itself may have spoiled them.
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            raise FloatingPointError(
                f"After step {step}, some weights are infinite or NaN, so {self.path!r} is left as it was: "
                f"lower lr, {self.settings['lr']}."
            )
        about = dict(getattr(self.model, "about", {}))
        if isinstance(head := getattr(self.model, "fc", None), torch.nn.Linear):
            about["num_classes"] = head.out_features
            about |= {"categories": names} if (names := categories_of(self.model)) else {}
        save_checkpoint(
            self.path,
            **about,
            state_dict=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            training={
                "settings": self.settings,
                "classes": self.classes["train_set"],
                "step": step,
                "numbers": numbers,
            },
        )


def _write(values: dict, part: Path) -> None:
    with part.open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())  # a power cut must not leave the name without the content
    if refused := get_unsafe_globals_in_checkpoint(part):  # reads the names of the types, and no tensor
        raise TypeError(f"A checkpoint cannot hold objects of {', '.join(sorted(refused))}. {CONVERT}")


def _in_short(error: Exception) -> str:
    return str(error).split("\n")[0][:200] or repr(error)
