"""The checkpoint of a training run: all ranks resume from it, and rank 0 writes it."""

import glob
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from distributed.worker import warn
from fsspec.implementations.local import LocalFileSystem

from workshop_utils.loop.preemption import Preempted, ranks_told
from workshop_utils.loop.ranks import check_all_alike, world
from workshop_utils.models import NoCheckpoint, checkpoint_exists, load_checkpoint, save_checkpoint, without_wrappers
from workshop_utils.storage import absolute_address, open_fresh, path_text, whole_file

LEFT_S = 3600  # what was written so long ago, and has no name yet, nobody writes any more
CURE = "Delete it, or choose another checkpoint."


@dataclass
class RunCheckpoint:
    """Where a run is saved, and what is saved there; without a path nothing is.

    The checkpoint before the latest one is kept beside it, as `<path>.before`, for a run whose latest one is damaged.
    """

    path: str | os.PathLike | None
    every: int  # steps between two saves
    settings: dict  # what a run must have in common with the one that it resumes
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    received: list[int]  # grows when this process gets SIGTERM: see `sigterm_noticed`
    image_shapes: list[list[int]] = field(default_factory=list)  # (3, h, w) of the images so far
    expected: list[list[int]] = field(default_factory=list)  # those of the run that is resumed, until its first batch
    damaged: bool = False  # whether the latest checkpoint could not be loaded

    def __post_init__(self):
        if self.path is None:
            return
        absolute_address(self.path)  # raises TypeError, ValueError
        given, self.path = self.path, path_text(self.path).rstrip("/")
        if not self.path:
            raise ValueError(f"checkpoint is {given!r}: give a path or an address, or None to save nothing.")
        fs, key = open_fresh(self.path)
        if isinstance(fs, LocalFileSystem):
            self.path = os.path.realpath(key)  # of a link, the file that it leads to is the one to replace
            if os.path.islink(key) and not os.path.isdir(os.path.dirname(self.path)):
                raise FileNotFoundError(f"checkpoint is {given!r}, a link to {self.path!r}, whose folder is not there.")

    def resume(self) -> tuple[int, dict]:
        """Return (steps done, numbers so far), the same on all ranks, and load the states of the checkpoint, if any.

        Raises ValueError for a checkpoint of another run, and where the ranks differ.
        """
        step, numbers = 0, {}
        if self.path and world()[0] == 0:
            self._remove_parts(self.path)
        if self.path and checkpoint_exists(self.path):
            saved = self._load(self.path)
            if "training" not in saved:
                raise ValueError(f"{self.path!r} was not written by train, so it cannot be resumed. {CURE}")
            step, numbers = saved["training"]["step"], saved["training"]["numbers"]
            old, self.expected = saved["training"]["settings"], saved["training"].get("image_shapes", [])
            self.image_shapes = list(self.expected)
            others = [
                f"{name} {old.get(name)!r}, now {now!r}" for name, now in self.settings.items() if old.get(name) != now
            ]
            if others:
                raise ValueError(f"{self.path!r} is of a run with other settings: {', '.join(others)}. {CURE}")
            try:
                self.model.load_state_dict(saved["state_dict"])
                self.optimizer.load_state_dict(saved["optimizer"])
            except (RuntimeError, ValueError) as error:
                why = without_wrappers(saved["state_dict"], self.model.state_dict()) or str(error)[:300]
                raise ValueError(f"{self.path!r} is of a run with another model ({why}). {CURE}") from error
        given = "given" if self.path else None  # its path may differ from machine to machine
        check_all_alike({"checkpoint": given, "checkpoint's step": step})
        return step, numbers

    def keep(self, step: int, images: torch.Tensor, numbers: dict | None = None) -> None:
        """Save `step` if it is due, if it ends an epoch, which has `numbers`, or if a rank was told to end.

        images: of the step, (n, 3, h, w). Raises ValueError if no image before a run was resumed had their size.
        Raises Preempted on all ranks where any was told to end. All ranks have to call this together.
        """
        if not self.path:
            return
        shape = list(images.shape[1:])
        if self.expected and shape not in self.expected and world()[0] == 0:  # no other rank's sizes were saved
            raise ValueError(f"{self.path!r} is of a run with images {self.expected}, now {shape}. {CURE}")
        if shape not in self.image_shapes:
            self.image_shapes.append(shape)
        self.expected = []
        told = ranks_told(self.received)
        if (told or numbers or step % self.every == 0) and world()[0] == 0:
            self._save(step, numbers or {})
        if told:
            if dist.is_initialized():
                dist.barrier()  # the first rank to fail ends the job, even while another still saves
            raise Preempted(step, told, self.path)

    def _load(self, path):
        try:
            return load_checkpoint(path)
        except NoCheckpoint as error:  # others are of storage that does not answer, and may do so later
            if not checkpoint_exists(before := f"{path}.before"):
                raise
            saved, self.damaged = load_checkpoint(before), True
            if world()[0] == 0:
                warn(f"{error} The run goes on from the checkpoint before it, {before!r}.")
            return saved

    def _remove_parts(self, path):
        """Remove what a run left that was killed while it saved, but not what one may still be writing."""
        beside = Path(path)
        for part in beside.parent.glob(f"{glob.escape(beside.name)}*.part"):
            if re.fullmatch(re.escape(beside.name) + r"(\.before)?\.[0-9a-f]{32}\.part", part.name):
                with suppress(OSError):
                    if time.time() - part.stat().st_mtime > LEFT_S:
                        part.unlink()

    def _put_aside(self, path):
        """Keep the latest checkpoint as the one before; forget one of a run that somebody has deleted."""
        fs, latest = open_fresh(path)
        before = f"{latest}.before"
        if not checkpoint_exists(path):
            if checkpoint_exists(f"{path}.before"):
                fs.rm_file(before)
        elif self.damaged:
            return
        elif isinstance(fs, LocalFileSystem):
            with whole_file(Path(before)) as part:
                try:
                    os.link(latest, part)  # takes no time and no space: the next checkpoint is another file
                except OSError:  # such as a file system without hard links
                    shutil.copyfile(latest, part)
        else:
            with suppress(NotImplementedError):  # some of fsspec's storage cannot copy
                fs.cp_file(latest, before)

    def _save(self, step, numbers):
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
            if len(about.get("categories", ())) != head.out_features:  # those of a head that was replaced
                about.pop("categories", None)
        save_checkpoint(
            self.path,
            partial(self._put_aside, self.path),
            **about,
            state_dict=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            training={
                "settings": self.settings,
                "step": step,
                "numbers": numbers,
                "image_shapes": self.image_shapes,
            },
        )
        self.damaged = False
