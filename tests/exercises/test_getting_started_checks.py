"""Notebook 01: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import os
from functools import partial
from itertools import chain, repeat

import numpy as np
import pytest
import torch
from answers import judged
from distributed import get_worker

from workshop_utils.exercises import NotYet, getting_started


def buried(client, *bones):
    """Let each worker have so many bones."""

    def bury(bone):
        os.environ["BONES"] = bone

    for worker, bone in zip(client.nthreads(), bones, strict=True):
        client.run(bury, bone, workers=[worker])


def bones():
    return os.environ.get("BONES")


@pytest.fixture
def with_bones(client):
    buried(client, "30", "12")
    yield client
    client.run(lambda: os.environ.pop("BONES", None) and None)


def test_bones_that_went_with_their_worker_are_no_mistake_of_the_attendee(client):
    with pytest.raises(NotYet, match="`bury`"):
        getting_started.check_total_bones(lambda client: 42, client)


def by_map_with_luck(client):
    workers = list(client.nthreads())
    futures = [client.submit(bones, workers=[worker], pure=False) for worker in workers]
    return sum(map(int, client.gather(futures)))


test_total_bones = pytest.mark.smoke(
    judged(
        lambda answer, with_bones: getting_started.check_total_bones(answer, with_bones),
        (lambda client: sum(map(int, client.run(bones).values())), "Correct"),
        (lambda client: np.array([42]), "Correct"),
        (lambda client: torch.tensor(42), "Correct"),
        (by_map_with_luck, "luck"),
        (lambda client: client.run(bones), "add up"),
        (lambda client: "3012", "is text: turn each"),
        (lambda client: [30, 12], "should return one number"),
        (lambda client: 2, "2 isn't"),  # the number of workers
    )
)


PHOTOS = [f"dogs/n02085620-Chihuahua/{name}.jpg" for name in ("rex", "lo", "bella", "milo", "max", "cookie")]


def looks(client, measure, paths):
    """Return (number, path, address of the worker that measured it) of each path."""

    def look(path):
        return measure(path), path, get_worker().address

    return client.gather(client.map(look, paths))


def checked_with(choose, client):
    """Check the answer that chooses among what was measured."""
    getting_started.check_darkest(lambda measure, paths: choose(looks(client, measure, paths)), len, PHOTOS, client)


def test_each_worker_may_be_asked_for_its_darkest(client):
    def find_darkest(measure, paths):
        found = client.run(lambda: min((measure(path), path) for path in paths))
        address, (_, path) = min(found.items(), key=lambda item: item[1])
        return path, address

    getting_started.check_darkest(find_darkest, len, PHOTOS, client)


def asked_in_the_notebook(client, measure, paths):
    client.gather(client.map(measure, paths))
    return min(paths, key=measure), get_worker().address


def asked_in_run(client, measure, paths):
    return min(client.run(lambda: (*min((measure(path), path) for path in paths), get_worker().address)).values())[1:]


def another_error(client, measure, paths):
    raise ValueError("no such dog")


test_get_worker_outside_a_task_gets_a_hint = judged(
    lambda answer, client: getting_started.check_darkest(partial(answer, client), len, PHOTOS, client),
    (asked_in_the_notebook, "in the notebook"),
    (asked_in_run, "client.run makes none.*keys of the dict"),
    (another_error, "no such dog"),
)


def with_the_worker_of_another(found):
    _, path, here = min(found)
    return path, next(worker for _, _, worker in found if worker != here)


test_what_no_worker_measured_is_not_the_darkest = judged(
    lambda answer, client: getting_started.check_darkest(answer, len, PHOTOS, client),
    (lambda measure, paths: None, "a tuple .path, address., not None"),
    (lambda measure, paths: (3, "tcp://a"), "neither 3 nor 'tcp://a'"),
    (lambda measure, paths: (min(paths, key=measure), "tcp://a"), "no worker called `measure`"),
    (lambda measure, paths: ("elsewhere.jpg", "tcp://a"), "one of the paths that it was called with"),
)


def test_a_worker_that_is_right_by_luck_once_does_not_pass(client):
    choices = chain([lambda found: min(found)[1:]], repeat(with_the_worker_of_another))
    with pytest.raises(NotYet, match="not the one that measured"):
        checked_with(lambda found: next(choices)(found), client)


test_no_wrong_photo_and_no_other_worker_passes = judged(
    checked_with,
    (lambda found: np.array(min(found)[1:]), "Correct"),
    (lambda found: min(found)[:0:-1], "Correct"),
    (lambda found: max(found)[1:], "there is a darker one"),
    (lambda found: (min(found)[1], "tcp://elsewhere"), "address of a worker"),
    (with_the_worker_of_another, "not the one that measured"),
)
