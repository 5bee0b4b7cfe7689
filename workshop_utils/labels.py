"""What labels mean: the names of classes, found again in other lists of names, before their numbers are compared."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from workshop_utils.dogs.breeds import BREEDS

CLASS_FOLDER = re.compile(r"(n\d{8})(?:[-_ ](.*))?", re.DOTALL)  # "n02085620-Chihuahua"; ImageNet's own is the id alone
NAME_OF = {breed.wnid: breed.name for breed in BREEDS}
Names = dict[int, str]  # the name of each label
SAME_CLASSES = "Read the second with the first one's classes: ImageFolder(url, classes=first.classes)."
NEW_HEAD = (
    "To read images with the model's classes, write ImageFolder(url, classes=model.fc.categories). To train the model "
    "on other classes, give it a new head: with_new_head(model, n_classes). If only the names differ, set "
    "model.fc.categories."
)


class ClassNames:
    """Names by label. Finds the label of a class that another list names, perhaps in another spelling."""

    def __init__(self, names: Sequence[str] | Names) -> None:
        self.names: Names = dict(names) if isinstance(names, Mapping) else dict(enumerate(names))
        self._alike: dict[str, list[int]] = defaultdict(list)
        for label, name in self.names.items():
            self._alike[_identities(name)[0]].append(label)

    def label_of(self, name: str) -> int | None:
        """Return the label of the class with this name, or None if it has none, or several that nothing tells apart.

        The WordNet id decides, or for a dog the breed's name; else the letters and digits. Of names that these leave
        alike, it is the one in the same spelling: ImageNet has a dog called Cardigan, and a garment called cardigan.

        >>> ClassNames(["Chihuahua", "German short-haired pointer"]).label_of("n02100236-German_short-haired_pointer")
        1
        """
        alike: list[int] = next((self._alike[who] for who in _identities(name) if who in self._alike), [])
        for spelled in (str, _spelled):
            if len(alike) > 1:
                alike = [label for label in alike if spelled(self.names[label]) == spelled(name)] or alike
        return alike[0] if len(alike) == 1 else None


def class_names(dataset: Any) -> Names | None:
    """Return the name of each label of a dataset, also through `Subset` and `ConcatDataset`; None if they are unknown.

    They are a dataset's `class_to_idx`, or its `classes`, as torchvision's datasets have them. They are unknown if a
    `target_transform` changes the labels, or a label has several names.
    Raises ValueError if the parts of a `ConcatDataset` give one label several meanings.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        parts = [class_names(part) for part in dataset.datasets]
        for part in parts[1:]:
            check_same_classes(parts[0], part, "the first part of a ConcatDataset", "another part")
        return parts[0] if all(parts) else None
    if getattr(dataset, "target_transform", None) is not None:
        return None
    labels: Any = getattr(dataset, "class_to_idx", None)
    classes: Any = getattr(dataset, "classes", None)
    if not isinstance(labels, Mapping):
        is_list = isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
        return dict(enumerate(classes)) if is_list else None
    names = {int(label): str(name) for name, label in labels.items()}
    return names if len(names) == len(labels) else None


def check_same_classes(
    names: Names | None, others: Names | None, of: str, of_others: str, cure: str = SAME_CLASSES
) -> None:
    """Raise ValueError if a label of the others means another class, or none, among `names`; None means unknown."""
    if names is None or others is None:
        return
    known = ClassNames(names)
    for label, name in others.items():
        if names.get(label) != name and known.label_of(name) != label:
            raise ValueError(
                f"The classes differ: label {label} is {name!r} in {of_others}, and {names.get(label)!r} in {of}. "
                f"All in {of_others}: {_in_short(others)}. All in {of}: {_in_short(names)}. {cure}"
            )


def agreed_classes(model: nn.Module, train_set: Dataset, val_set: Dataset | None) -> Names | None:
    """Return the names of the labels, if they are known; the model's head `fc` gets them, if it has none.

    Raises ValueError unless both datasets, and the head, mean the same by a label.
    """
    names, head = class_names(train_set), getattr(model, "fc", None)
    check_same_classes(names, class_names(val_set), "train_set", "val_set")
    check_head(model, names, "train_set")
    check_head(model, class_names(val_set), "val_set")
    has_no_names = isinstance(head, nn.Linear) and not hasattr(head, "categories")
    if names and has_no_names and sorted(names) == list(range(head.out_features)):  # type: ignore[union-attr]
        head.categories = [names[label] for label in sorted(names)]  # type: ignore[union-attr, assignment]
    return names


def check_head(model: nn.Module, names: Names | None, of: str) -> None:
    """Raise ValueError if the categories of the model's head `fc` are known, and a label means another one there."""
    if categories := getattr(getattr(model, "fc", None), "categories", None):
        check_same_classes(dict(enumerate(categories)), names, "the model's head", of, NEW_HEAD)


def n_outputs(model: nn.Module) -> int | None:
    """Return how many classes the model's head `fc` tells apart, if that is known."""
    return getattr(getattr(model, "fc", None), "out_features", None)


def plain(name: str) -> str:
    """Return a name's letters and digits, without what its writers do not agree on.

    >>> plain("German short-haired_pointer")
    'germanshorthairedpointer'
    """
    return "".join(letter for letter in unicodedata.normalize("NFKD", name.casefold()) if letter.isalnum())


_BREEDS = {plain(name): wnid for wnid, name in NAME_OF.items()}


def _identities(name):
    """Return what a class is known by: its WordNet id, else the letters of its name.

    An id that is no breed's may be somebody's own, so the name counts after it.
    """
    folder = CLASS_FOLDER.fullmatch(name.strip())
    if folder and folder[1] in NAME_OF:
        return [folder[1]]
    own = [folder[1]] if folder else []
    name = (folder[2] or "") if folder else name
    letters = plain(name) or name
    return [*own, _BREEDS.get(letters, letters)] if name else own


def _spelled(name):
    folder = CLASS_FOLDER.fullmatch(name.strip())
    own = NAME_OF.get(folder[1], folder[2] or "") if folder else name
    return unicodedata.normalize("NFC", own).replace("_", " ")


def _in_short(names):
    shown = ", ".join(repr(name) for _, name in sorted(names.items())[:12])
    return f"{shown}, … ({len(names)})" if len(names) > 12 else shown
