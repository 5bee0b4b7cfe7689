"""The checkpoint of a run of `train`: what it holds, when it is written, and which runs may resume from it."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from workshop_utils.arguments import whole_number
from workshop_utils.checkpoint import CURE, OTHER_HEAD, load_on_all_ranks, save_checkpoint
from workshop_utils.labels import Names, categories_of, check_same_classes, name_head, named
from workshop_utils.storage import absolute_address
from workshop_utils.training.batches import world
from workshop_utils.training.lock import checkpoint_lock
from workshop_utils.training.preemption import Preempted, ranks_with_sigterm


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
    check_owned: Callable[[], None] = lambda: None  # raises if another run has taken the checkpoint

    def __post_init__(self) -> None:
        self.every = whole_number("checkpoint_every", self.every, 1)
        if self.path is not None:
            self.path = absolute_address(self.path)
            if hasattr(self.model, "about") and not isinstance(getattr(self.model, "fc", None), torch.nn.Linear):
                warnings.warn(f"{self.path!r} will hold a model of its own kind: {OTHER_HEAD}", stacklevel=3)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs from this checkpoint meanwhile; raise CheckpointInUse on rank 0, which alone writes it."""
        if not self.path or world()[0]:
            yield
        else:
            with checkpoint_lock(self.path) as self.check_owned:
                yield

    def resume(self) -> tuple[int, dict]:
        """Return (steps done, numbers so far), and load the states of the checkpoint, if any; name the model's head.

        Raises ValueError for a checkpoint of another run, WeightsError for a damaged one.
        """
        saved = load_on_all_ranks(self.path) if self.path else None
        if saved is None:
            name_head(self.model, self.classes["train_set"] or {})
            return 0, {}
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
        if world()[0] == 0 and (preempted or numbers or step % self.every == 0):
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
        self.check_owned()
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
