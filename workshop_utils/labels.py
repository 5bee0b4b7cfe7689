"""What labels mean: the names of classes, found again in other lists of names, before their numbers are compared."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import ConcatDataset, Subset

from workshop_utils.dogs.breeds import BREEDS

CLASS_FOLDER = re.compile(r"(n\d{8})(?:[-_ ](.*))?", re.DOTALL)  # "n02085620-Chihuahua"; ImageNet's own is the id alone
NAME_OF = {breed.wnid: breed.name for breed in BREEDS}
Names = dict[int, str]  # the name of each label
SAME_CLASSES = (
    "Read the second with the first one's classes, by the workshop's ImageFolder(url, classes=first.classes); or "
    "give both datasets the same folders. If a dataset's classes are not the names of its labels, set its classes."
)
NEW_HEAD = (
    "To read images with the model's classes, write ImageFolder(url, classes=model.fc.categories). To train the model "
    "on other classes, give it a new head: with_new_head(model, n_classes). If only the names differ, set "
    "model.fc.categories."
)


def unnamed(label: int) -> str:
    """Return what an output of a model is called whose name is not known."""
    return f"category {label}"


class ClassNames:
    """Names by label. Finds the label of a class that another list names, perhaps in another spelling."""

    def __init__(self, names: Sequence[str] | Names) -> None:
        self.names: Names = dict(names) if isinstance(names, Mapping) else dict(enumerate(names))
        self._alike: dict[str, list[int]] = defaultdict(list)
        for label, name in self.names.items():
            for identity in _identities(name):
                self._alike[identity].append(label)

    def label_of(self, name: str) -> int | None:
        """Return the label of the class with this name, or None if it has none, or several that nothing tells apart.

        The WordNet id decides, or for a dog the breed's name; else the name but for case, spaces, underscores and
        hyphens between letters. If these leave several, it is the one in the same spelling: ImageNet has a dog called
        Cardigan, and a garment called cardigan.

        >>> ClassNames(["Chihuahua", "German short-haired pointer"]).label_of("n02100236-German_short-haired_pointer")
        1
        """
        alike: list[int] = next((self._alike[who] for who in _identities(name) if who in self._alike), [])
        for spelled in (str, _spelled):
            if len(alike) > 1:
                alike = [label for label in alike if spelled(self.names[label]) == spelled(name)] or alike
        return alike[0] if len(alike) == 1 else None

    def contradict(self, label: int, name: str) -> bool:
        """Return whether another list's name for a label is another class's name here."""
        mine, found = self.names.get(label), self.label_of(name)
        if mine is None:
            return found is not None
        return mine != name and found != label and not (_cannot_compare(mine, name) or _cannot_compare(name, mine))


def class_names(dataset: Any) -> Names | None:
    """Return the name of each label of a dataset, also through `Subset` and `ConcatDataset`; None if they are unknown.

    They are a dataset's `classes` and `class_to_idx`, as torchvision's datasets have them. They are unknown if a
    `target_transform` changes the labels, or a label has several names.
    Raises ValueError if the parts of a `ConcatDataset` give one label several meanings.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        names: Names = {}
        for part in map(class_names, dataset.datasets):
            check_same_classes(names, part, "a part of a ConcatDataset", "another part")
            names |= part or {}
        return names or None
    if getattr(dataset, "target_transform", None) is not None:
        return None
    listed = _listed(getattr(dataset, "classes", None))
    labels: Any = getattr(dataset, "class_to_idx", None)
    is_map = isinstance(labels, Mapping) and all(isinstance(label, int) for label in labels.values())
    if not is_map or (listed and set(listed.values()) != set(map(str, labels))):
        return listed
    if listed and all(listed.get(label) == str(name) for name, label in labels.items()):
        return listed  # some of its names may occur twice
    return {label: str(name) for name, label in labels.items()} if len(set(labels.values())) == len(labels) else None


def check_same_classes(
    names: Names | None, others: Names | None, of: str, of_others: str, cure: str = SAME_CLASSES
) -> None:
    """Raise ValueError if a label of the others is another class among `names`; None means unknown."""
    if not names or not others or names == others:
        return
    known = ClassNames(names)
    for label, name in others.items():
        if known.contradict(label, name):
            raise ValueError(
                f"The classes differ: label {label} is {name!r} in {of_others}, and {names.get(label)!r} in {of}. "
                f"All in {of_others}: {_in_short(others)}. All in {of}: {_in_short(names)}. {cure}"
            )


def head_of(model: nn.Module) -> Any:
    """Return the last layer of a model's `fc`, also if a wrapper such as DDP holds the model; None if it has none."""
    head = getattr(getattr(model, "module", model), "fc", None)
    layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear)] if head else []
    return layers[-1] if layers else None


def categories_of(model: nn.Module) -> list[str] | None:
    """Return the names of the classes that a model's head tells apart, None if it has none.

    Raises ValueError unless `categories` of the head is a list of as many names as it has outputs.
    """
    head = head_of(model)
    if (categories := getattr(head, "categories", None)) is None:
        return None
    names = _listed(categories) if isinstance(categories, Sequence) else None
    if not names or len(names) != head.out_features:
        raise ValueError(
            f"model.fc.categories is {categories!r:.200}: give a list of {head.out_features} names, one of each output."
        )
    return list(names.values())


def name_head(model: nn.Module, names: Names | None) -> None:
    """Give a model's head the names of its outputs, if it has none."""
    head = head_of(model)
    if names and head is not None and categories_of(model) is None:
        head.categories = [names.get(label, unnamed(label)) for label in range(head.out_features)]


def agreed_names(model: nn.Module, **datasets: Any) -> dict[str, Any]:
    """Return the names of the labels of each dataset, and those of the model's head; None for what is unknown.

    Raises ValueError if a label is one class for the first dataset, or for the head, and another one elsewhere.
    """
    names = {of: class_names(dataset) for of, dataset in datasets.items()}
    categories = categories_of(model)
    named = {label: name for label, name in enumerate(categories or ()) if name != unnamed(label)}
    for of in names:
        check_same_classes(names[first := next(iter(names))], names[of], first, of)
        check_same_classes(named, names[of], "the model's head", of, NEW_HEAD)
    return {**names, "the head": categories}


def n_outputs(model: nn.Module) -> int | None:
    """Return how many classes the model's head tells apart, if that is known."""
    return getattr(head_of(model), "out_features", None)


def _plain(name):
    """Return a name without what its writers do not agree on."""
    name = unicodedata.normalize("NFC", name.casefold())
    return re.sub(r"[\s_]+|(?<=[^\W\d])['’-](?=[^\W\d])", "", name)


_BREEDS = {_plain(name): wnid for wnid, name in NAME_OF.items()}


def _identities(name):
    """Return what a class is known by: its WordNet id, else its plain name.

    An id that is no breed's may be somebody's own, so the name counts after it.
    """
    folder = CLASS_FOLDER.fullmatch(name.strip())
    if folder and folder[1] in NAME_OF:
        return [folder[1]]
    own = [folder[1]] if folder else []
    letters = _plain((folder[2] or "") if folder else name)
    return [*own, _BREEDS.get(letters, letters)] if letters else own


def _cannot_compare(one, other):
    """Return whether one name is an id alone, as of ImageNet's other classes, whose names we do not know."""
    folder = CLASS_FOLDER.fullmatch(one.strip())
    return bool(folder and not folder[2] and folder[1] not in NAME_OF) and not CLASS_FOLDER.fullmatch(other.strip())


def _spelled(name):
    folder = CLASS_FOLDER.fullmatch(name.strip())
    own = NAME_OF.get(folder[1], folder[2] or "") if folder else name
    return unicodedata.normalize("NFC", own).replace("_", " ")


def _listed(classes):
    """Return the names in a list or an array by label; None if it holds others than names."""
    if isinstance(classes, str | Mapping) or not isinstance(classes, Iterable):
        return None
    names = list(classes)
    is_names = names and all(isinstance(name, str) for name in names)
    return {label: str(name) for label, name in enumerate(names)} if is_names else None


def _in_short(names):
    shown = ", ".join(repr(name) for _, name in sorted(names.items())[:12])
    return f"{shown}, … ({len(names)})" if len(names) > 12 else shown
