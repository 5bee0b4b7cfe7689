"""What labels mean: the names of classes, found again in other lists of names, before their numbers are compared."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import nn
from torch.utils.data import ConcatDataset, Subset

from workshop_utils.dogs.breeds import BREEDS

CLASS_FOLDER = re.compile(r"(n\d{8})(?:[-_ ](.*))?", re.DOTALL)  # "n02085620-Chihuahua"; ImageNet's own is the id alone
NAME_OF = {breed.wnid: breed.name for breed in BREEDS}
TWICE = ("cardigan", "crane", "maillot")  # names that ImageNet has for two classes each
Names = dict[int, str]  # the name of each label
SAME_CLASSES = (
    "Read the second with the first one's classes, by the workshop's ImageFolder(url, classes=first.classes); or "
    "give both datasets the same folders. If a dataset's classes are not the names of its labels, set its classes."
)
HEAD = "the model's head"
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
            identity, *more = _identities(name) or [""]
            self._alike[identity].append(label)
            for plain in more:  # of a class with an id of its own: only a name without an id may mean it
                self._alike[f"id and {plain}"].append(label)

    def label_of(self, name: str) -> int | None:
        """Return the label of the class with this name, or None if it has none, or several that nothing tells apart.

        The WordNet id decides, or for a dog the breed's name; else the name but for case, spaces, underscores and
        hyphens between letters. If these leave several, it is the one in the same spelling: ImageNet has a dog called
        Cardigan, and a garment called cardigan.

        >>> ClassNames(["Chihuahua", "German short-haired pointer"]).label_of("n02100236-German_short-haired_pointer")
        1
        """
        alike = self._labels_of(name)
        return alike[0] if len(alike) == 1 else None

    def contradict(self, label: int, others: Names) -> bool:
        """Return whether another list's name for a label is another class's name here."""
        mine, name = self.names.get(label), others[label]
        if mine == name or label in (found := self._labels_of(name)):
            return False
        if mine is None:  # a class more than here, unless it is one of those with another label
            return any(others.get(known) != self.names[known] for known in found)
        return not (_cannot_compare(mine, name) or _cannot_compare(name, mine))

    def _labels_of(self, name):
        """Return the labels of all classes that this name may mean."""
        who = _identities(name)
        who += [f"id and {who[0]}"] if len(who) == 1 else []
        alike: list[int] = next((self._alike[one] for one in who if one in self._alike), [])
        for spelled in (str, _spelled):
            if len(alike) > 1:
                alike = [label for label in alike if spelled(self.names[label]) == spelled(name)] or alike
        return alike


def class_names(dataset: Any) -> Names | None:
    """Return the name of each label of a dataset, also through `Subset` and `ConcatDataset`; None if they are unknown.

    They are a dataset's `classes` and `class_to_idx`, as torchvision's datasets have them. They are unknown if a
    `target_transform` changes the labels, or a label has several names.
    Raises ValueError if the parts of a `ConcatDataset` give one label several meanings.
    """
    while isinstance(dataset, Subset) and "classes" not in vars(dataset):
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
    is_map = isinstance(labels, Mapping) and all(isinstance(label, Integral) for label in labels.values())
    if not is_map or (listed and set(listed.values()) != set(map(str, labels))):
        return listed
    if listed and all(listed.get(label) == str(name) for name, label in labels.items()):
        return listed  # some of its names may occur twice
    names = {int(label): str(name) for name, label in labels.items()}
    return names if len(names) == len(labels) else None


def check_same_classes(
    names: Names | None, others: Names | None, of: str, of_others: str, cure: str = SAME_CLASSES
) -> None:
    """Raise ValueError if a label of the others is another class among `names`; None means unknown."""
    if not names or not others or names == others:
        return
    known = ClassNames(names)
    for label, name in others.items():
        if known.contradict(label, others):
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


def named(categories: Sequence[str] | None) -> Names:
    """Return the names of categories that have one."""
    return {label: name for label, name in enumerate(categories or ()) if name != unnamed(label)}


def name_head(model: nn.Module, names: Names) -> None:
    """Give the outputs of a model's head these names, where they have none; nothing if it has too few outputs."""
    head, known = head_of(model), names | named(categories_of(model))
    if head is not None and known and max(known) < head.out_features:
        head.categories = [known.get(label, unnamed(label)) for label in range(head.out_features)]


def names_of(model: nn.Module, **datasets: Any) -> dict[str, Names | None]:
    """Return the names of the labels of each dataset, and of the outputs of the model's head, last."""
    return {of: class_names(one) for of, one in datasets.items()} | {HEAD: named(categories_of(model))}


def check_agree(names: dict[str, Names | None], check_all_alike: Callable[[dict[str, Any]], None]) -> None:
    """Raise ValueError if a label is one class for the first dataset, or for the head, and another one elsewhere.

    check_all_alike: called first, it does so on all ranks if these have other names, so that none waits for another.
    """
    check_all_alike({"classes": names})
    first, *others = names
    check_same_classes(names[HEAD], names[first], HEAD, first, NEW_HEAD)
    for of in others[:-1]:
        check_same_classes(names[first], names[of], first, of)
        check_same_classes(names[HEAD], names[of], HEAD, of, NEW_HEAD)


def n_outputs(model: nn.Module) -> int | None:
    """Return how many classes the model's head tells apart, if that is known."""
    return getattr(head_of(model), "out_features", None)


def _plain(name):
    """Return a name without what its writers do not agree on."""
    name = unicodedata.normalize("NFC", name.casefold())
    return re.sub(r"(?<!\d)[\s_]+|[\s_]+(?!\d)|(?<=[^\W\d])-(?=[^\W\d])", "", name)


_BREEDS = {_plain(name): wnid for wnid, name in NAME_OF.items()}


def _identities(name):
    """Return what a class is known by: its WordNet id, else its plain name.

    An id that is no breed's may be somebody's own, so the name counts after it, unless it says too little.
    """
    folder = CLASS_FOLDER.fullmatch(name.strip())
    if folder and folder[1] in NAME_OF:
        return [folder[1]]
    own = [folder[1]] if folder else []
    letters = _plain((folder[2] or "") if folder else name)
    return [*own, _BREEDS.get(letters, letters)] if letters and not (own and letters in TWICE) else own


def _cannot_compare(one, other):
    """Return whether one class is known by an id alone, as ImageNet's others may be, and the other one by no id."""
    known_by = _identities(one)
    is_only_an_id = len(known_by) == 1 and CLASS_FOLDER.fullmatch(known_by[0]) and known_by[0] not in NAME_OF
    return bool(is_only_an_id) and not any(CLASS_FOLDER.fullmatch(who) for who in _identities(other))


def _spelled(name):
    folder = CLASS_FOLDER.fullmatch(name.strip())
    own = NAME_OF.get(folder[1], folder[2] or "") if folder else name
    return unicodedata.normalize("NFC", own).replace("_", " ")


def _listed(classes):
    """Return the names in a list or an array by label; None if it holds others than names."""
    if isinstance(classes, str | Mapping | set | frozenset) or not isinstance(classes, Iterable):
        return None
    names = list(classes) if getattr(classes, "shape", [1]) else []  # an array of no dimension has no items
    is_names = names and all(isinstance(name, str) for name in names)
    return {label: str(name) for label, name in enumerate(names)} if is_names else None


def _in_short(names):
    shown = ", ".join(repr(name) for _, name in sorted(names.items())[:12])
    return f"{shown}, … ({len(names)})" if len(names) > 12 else shown
