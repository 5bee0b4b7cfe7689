"""Notebook 01: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import numpy as np
import pytest
import stand_ins
import torch
from distributed import get_worker

from workshop_utils.exercises import NotYet, getting_started


class Client(stand_ins.Client):
    """Two workers, "tcp://a" and "tcp://b", each with so many buried bones."""

    def __init__(self, *bones):
        self.threads = {"tcp://a": 1, "tcp://b": 1}
        self.bones = bones

    def run(self, function):
        return dict(zip(self.threads, self.bones, strict=True))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ({"tcp://a": 30, "tcp://b": 12}, "add up"),
        ("3012", "is text: turn each"),
        ([30, 12], "should be one number"),
        (2, "2 is not"),  # the number of workers
    ],
)
def test_no_wrong_sum_of_bones_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        getting_started.check_total_bones(answer, Client("30", "12"))


def test_bones_that_went_with_their_worker_are_no_mistake_of_the_attendee():
    with pytest.raises(NotYet, match="`bury`"):
        getting_started.check_total_bones(42, Client("30", None))


@pytest.mark.smoke
@pytest.mark.parametrize("answer", [42, np.array([42]), torch.tensor(42)])
def test_the_sum_of_bones_passes(answer):
    getting_started.check_total_bones(answer, Client("30", "12"))


PHOTOS = [f"dogs/n02085620-Chihuahua/{name}.jpg" for name in ("rex", "lo", "bella", "milo", "max")]


def looks(client, measure, paths):
    """Return (number, path, address of the worker that measured it) of each path."""

    def look(path):
        return measure(path), path, get_worker().address

    return client.gather(client.map(look, paths))


@pytest.mark.parametrize("order", [tuple, np.array, lambda pair: tuple(pair)[::-1]])
def test_the_darkest_photo_passes_with_the_worker_that_measured_it(client, capsys, order):
    getting_started.check_darkest(
        lambda measure, paths: order(min(looks(client, measure, paths))[1:]), len, PHOTOS, client
    )
    assert "Chihuahua" in capsys.readouterr().out


def test_a_worker_that_measured_another_photo_does_not_pass(client):
    def with_the_worker_of_another(measure, paths):
        _, path, here = min(looks(client, measure, paths))
        return path, next(worker for worker in client.nthreads() if worker != here)

    assert len(client.nthreads()) > 1
    with pytest.raises(NotYet, match="not the one that measured"):
        getting_started.check_darkest(with_the_worker_of_another, len, PHOTOS, client)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "should be a function"),
        (lambda measure, paths: None, "returns None"),
        (lambda measure, paths: paths[1], "a tuple of two"),
        (lambda measure, paths: (3, "tcp://a"), "neither 3 nor 'tcp://a'"),
        (lambda measure, paths: (min(paths, key=measure), "tcp://a"), "no worker called `measure`"),
    ],
)
def test_what_no_worker_measured_is_not_the_darkest(client, answer, hint):
    with pytest.raises(NotYet, match=hint):
        getting_started.check_darkest(answer, len, PHOTOS, client)


@pytest.mark.parametrize(
    ("choose", "hint"),
    [
        (lambda found: max(found)[1:], "there is a darker one"),
        (lambda found: (min(found)[1], "tcp://elsewhere"), "address of a worker"),
    ],
)
def test_no_wrong_photo_and_no_made_up_worker_passes(client, choose, hint):
    with pytest.raises(NotYet, match=hint):
        getting_started.check_darkest(lambda measure, paths: choose(looks(client, measure, paths)), len, PHOTOS, client)
