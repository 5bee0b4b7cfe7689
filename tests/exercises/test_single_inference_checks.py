"""Notebook 03: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from answers import judged
from torch import nn

from workshop_utils.exercises import NotYet, single_inference

CATEGORIES = ["eel", "dog", "ant", "cat", "bee"]


@pytest.fixture(scope="module")
def model():
    """A small model with a BatchNorm, in train mode."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[-1].weight *= 4
    return model.train()


@pytest.fixture(scope="module")
def images():
    random = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, 12, 12, generator=random) + 2 * torch.randn(6, 3, 1, 1, generator=random)


def namer(*, eval_mode=True, dim=1, order=list, number=float):
    """Return a name_dogs, right unless told otherwise."""

    def name_dogs(model, images, categories):
        model.train(not eval_mode)
        with torch.inference_mode():
            values, indices = model(images).softmax(dim).max(1)
        return [(order(categories)[index], number(value)) for value, index in zip(values, indices, strict=True)]

    return name_dogs


test_name_dogs = pytest.mark.smoke(
    judged(
        lambda function, model, images: single_inference.check_name_dogs(function, model, images, CATEGORIES),
        (namer(number=np.float32), "Correct"),
        (namer(number=lambda p: p.reshape(1)), "Correct"),
        (namer(number=lambda p: round(float(p), 2)), "Correct"),
        (lambda model, images, names: None, "a list of pairs .*, not None"),
        (lambda model, images, names: [("dog", 0.5)], "1 entries for 6 images"),
        (lambda model, images, names: ["dog"] * 6, "return pairs"),
        (namer(number=lambda p: f"{p:.0%}"), "as a number, not .*%"),
        (namer(number=lambda p: 100 * p), "the probabilities are not"),
        (namer(order=sorted), "^Not yet: the names are sorted[^.]*$"),
        (namer(dim=0), "^Not yet: the probabilities of one image[^.]*over which dimension[^.]*$"),
        (namer(eval_mode=False), "^Not yet: the model is still in train mode[^.]*.$"),
        (
            namer(eval_mode=False, dim=0, order=sorted),
            "^Not yet: the model .* And: the prob.* And: the names",
        ),
        (lambda model, images, _: namer()(model, images, CATEGORIES), "the list you are given"),
    )
)


def test_an_answer_may_be_an_iterator_and_write_into_what_it_is_given(model, images):
    before, seen = deepcopy(model.state_dict()), images.clone()

    def name_dogs(model, images, categories):
        answers = namer()(model, images, categories)
        images.zero_()
        categories.clear()
        return iter(answers)

    single_inference.check_name_dogs(name_dogs, model, images, CATEGORIES)
    assert model.training and images.equal(seen) and len(CATEGORIES) == 5
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_the_stub_gets_a_hint_until_our_solution_is_there(model, images, capsys):
    cell = {"check": single_inference.check_name_dogs, "name_dogs": single_inference.given_name_dogs}
    cell |= {"model": model, "images": images, "categories": CATEGORIES}
    with pytest.raises(NotYet):
        exec("check(name_dogs, model, images, categories)", cell)
    exec("check(name_dogs, model, images, categories)", cell | {"our_name_dogs": namer()})
    assert "solution" in capsys.readouterr().out
