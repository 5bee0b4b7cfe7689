"""Checks of notebook 05 · Training data."""

from workshop_utils.dogs.breeds import find_breed
from workshop_utils.exercises import Answer, exercise, expect, passed


@exercise
def check_to_imagenet(answer: Answer, classes: list[str]) -> None:
    expect(answer is not None, "to_imagenet is still None.")
    expect(hasattr(answer, "__len__"), f"{answer!r} is one value; make a list, with an index for each folder.")
    expect(len(answer) == len(classes), f"it has {len(answer)} entries; make one for each of {len(classes)} folders.")
    found, right = [int(index) for index in answer], [find_breed(name.split("-")[0]).index for name in classes]
    expect(found != list(range(len(classes))), "these are the labels themselves; look each folder's id up in index_of.")
    expect(sorted(found) != sorted(right) or found == right, "the numbers are right, their order is not.")
    wrong = [(name, index) for name, index, truth in zip(classes, found, right, strict=True) if index != truth]
    expect(not wrong, f"{wrong and wrong[0][0]} does not become {wrong and wrong[0][1]}: look its WordNet id up.")
    passed(f"Label {len(classes) - 1} is ImageNet's category {found[-1]}.")


@exercise
def check_order(order: Answer, n_photos: int) -> None:
    first = order(0, 0)
    expect(first is not None, "order returns None; return a list of indices.")
    expect(isinstance(first, list), f"order returns a {type(first).__name__}; return list(sampler).")
    expect(len(set(first)) < n_photos, "rank 0 visits every photo: tell the sampler num_replicas=2.")
    for epoch in (0, 1):
        both = order(0, epoch) + order(1, epoch)
        expect(set(both) <= set(range(n_photos)), f"indices go from 0 to {n_photos - 1}, as list(sampler) gives them.")
        expect(len(both) - len(set(both)) <= n_photos % 2, "both ranks visit the same photos: pass rank and epoch on.")
        expect(n_photos - len(set(both)) <= n_photos % 2, f"together they visit {len(set(both))} of {n_photos} photos.")
    expect(order(0, 0) == first, "asked twice for the same epoch, it answers differently: give the sampler one seed.")
    expect(order(0, 1) != first, "epoch 1 has epoch 0's order: leave shuffling on, and call set_epoch.")
    passed(f"{len(first)} photos for rank 0 and {len(both) - len(first)} for rank 1, in a new order each epoch.")
