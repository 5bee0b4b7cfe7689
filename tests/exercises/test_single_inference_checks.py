"""Notebook 03: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from answers import judged
from scipy.optimize import minimize, minimize_scalar
from torch import nn
from torch.nn.functional import cross_entropy

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


GRID = torch.logspace(-1.3, 0.7, 81).tolist()
EVEN, ODD, ALL, FIRST = slice(0, None, 2), slice(1, None, 2), slice(None), slice(0, 200)


def loss_of_the_right(logits, truth):
    return cross_entropy(logits, truth).item()


def sum_of_losses(logits, truth):
    return cross_entropy(logits, truth, reduction="sum").item()


def loss_of_the_likeliest(logits, truth):
    return -logits.log_softmax(1).max(1).values.mean().item()


def confidence_minus_accuracy(logits, truth):
    probability, answer = logits.softmax(1).max(1)
    return abs(probability.mean() - (answer == truth).float().mean()).item()


def calibration_error(logits, truth):
    """Return the expected calibration error over ten bins."""
    probability, answer = logits.softmax(1).max(1)
    right, tenth = (answer == truth).float(), (10 * probability).long()
    parts = [(tenth == i).nonzero().squeeze(1) for i in range(11)]
    return sum(abs((probability[part] - right[part]).sum().item()) for part in parts) / len(truth)


def on_a_grid(logits, truth, loss):
    return min(GRID, key=lambda t: loss(logits / t, truth))


def by(optimizer, n_steps=1, *, log=False, start=1.0, reduction="mean"):
    """Return a search for T with an optimiser of PyTorch."""

    def search(logits, truth, _):
        x = torch.tensor([start], requires_grad=True)
        optimiser = optimizer([x])

        def closure():
            optimiser.zero_grad()
            loss = cross_entropy(logits / (x.exp() if log else x), truth, reduction=reduction)
            loss.backward()
            return loss

        for _ in range(n_steps):
            optimiser.step(closure)
        return x.exp().item() if log else x.item()

    return search


def by_scipy(logits, truth, loss):
    return minimize(lambda x: loss(logits / x[0], truth), 1.0).x


def in_float64_by_scipy(logits, truth, loss):
    return by_scipy(logits.double(), truth, loss)


def bounded_by_scipy(logits, truth, loss):
    return minimize_scalar(lambda t: loss(logits / t, truth), bounds=(0.05, 10)).x


def calibrator(
    *, loss=loss_of_the_right, search=on_a_grid, fitted=EVEN, tested=ODD, reported=loss_of_the_right, wrap=tuple
):
    """Return a calibrate, right unless told otherwise, which writes into what it is given."""

    def calibrate(logits, truth):
        best = search(logits[fitted], truth[fitted], loss)
        pair = best, reported(logits[tested] / torch.tensor(best), truth[tested])
        logits.zero_()
        return wrap(pair)

    return calibrate


@pytest.fixture(scope="module")
def batch():
    """Return (logits, truth) of a model that is too unsure: divided by 0.4, its logits are calibrated."""
    random = torch.Generator().manual_seed(3)
    honest = 2 * torch.randn(800, 10, generator=random)
    return 0.4 * honest, honest.softmax(1).multinomial(1, generator=random).squeeze(1)


LBFGS, ADAM = torch.optim.LBFGS, torch.optim.Adam


def by_unseeded_search(logits, truth):
    candidates = 0.05 + 4.95 * torch.rand(1000)  # others at each call
    losses = [cross_entropy(logits[::2] / t, truth[::2]) for t in candidates]
    best = float(candidates[torch.stack(losses).argmin()])
    return best, float(cross_entropy(logits[1::2] / best, truth[1::2]))


test_a_right_fit_passes_however_it_searches = judged(
    lambda function, batch: single_inference.check_calibrate(function, *batch),
    (calibrator(wrap=np.array), "Correct"),
    (by_unseeded_search, "Correct"),
    (calibrator(wrap=lambda pair: [torch.ones(1, requires_grad=True) * value for value in pair]), "Correct"),
    (calibrator(wrap=lambda pair: (pair[0], round(pair[1], 2))), "Correct"),
    (calibrator(loss=sum_of_losses), "Correct"),
    (calibrator(search=by(partial(LBFGS, max_iter=50), start=0.5)), "Correct"),
    (calibrator(search=by(partial(LBFGS, lr=0.1, max_iter=100), start=0.5)), "Correct"),
    (calibrator(search=by(partial(LBFGS, line_search_fn="strong_wolfe"))), "Correct"),
    (calibrator(search=by(partial(LBFGS, max_iter=50), start=0.0, log=True)), "Correct"),
    (calibrator(search=by(partial(ADAM, lr=0.05), 200)), "Correct"),
    (calibrator(search=by(partial(ADAM, lr=0.05), 200, reduction="sum")), "Correct"),
    (calibrator(search=in_float64_by_scipy), "Correct"),
    (calibrator(search=bounded_by_scipy), "Correct"),
)

test_a_wrong_fit_gets_a_hint_that_fits = judged(
    lambda function, batch: single_inference.check_calibrate(function, *batch),
    (lambda logits, truth: 0.38, "return .T, loss of the other half., not 0.38"),
    (lambda logits, truth: (torch.tensor([0.4, 0.5]), 0.1), "should be numbers, not tensor"),
    (lambda logits, truth: (1 / calibrator()(logits, truth)[0], 0.1), "Is yours 1 / T"),
    (lambda logits, truth: (-0.38, 0.1), "^Not yet: your T is -0.38.*smaller steps"),
    (lambda logits, truth: (float("nan"), 0.1), "^Not yet: your T is nan.*smaller steps"),
    (calibrator(search=by(partial(ADAM, lr=0.01), 20)), "^Not yet: your T is 0.7.* search longer"),
    (calibrator(search=by_scipy), "^Not yet: your T is 1: .*leave 1.*double"),
    (calibrator(loss=loss_of_the_likeliest), "^Not yet: your T .*right breed, or of the likeliest"),
    (calibrator(loss=confidence_minus_accuracy), "your T .*the share of right answers.*log-likelihood"),
    (calibrator(loss=calibration_error), "your T .*the share of right answers.*log-likelihood"),
    (calibrator(fitted=ALL), "^Not yet: for some other photos, your T is .* is not fitted on photos 0, 2, 4, … alone"),
    (calibrator(fitted=FIRST), "your T is .* is not fitted on photos 0, 2, 4, … alone"),
    (calibrator(fitted=ODD, tested=EVEN), "for some other photos, your T is .*photos 1, 3, 5"),
    (calibrator(tested=EVEN), "that T was fitted on"),
    (calibrator(tested=ALL), "not that of the photos 1, 3, 5"),
    (calibrator(loss=sum_of_losses, reported=sum_of_losses), "^Not yet: T is right; .* is a sum: return the mean"),
)


def test_an_answer_that_leaves_the_mode_alone_is_told_though_the_notebooks_model_is_in_eval_mode(model, images):
    def name_dogs(model, images, categories):
        with torch.inference_mode():
            values, indices = model(images).softmax(1).max(1)
        return [(categories[index], float(value)) for value, index in zip(values, indices, strict=True)]

    with pytest.raises(NotYet, match="still in train mode"):
        single_inference.check_name_dogs(name_dogs, deepcopy(model).eval(), images, CATEGORIES)
