"""Notebook 01: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import numpy as np
import pytest
import stand_ins

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


@pytest.mark.parametrize("answer", [42, 42.0, np.int64(42)])
def test_the_sum_of_bones_passes(answer):
    getting_started.check_total_bones(answer, Client("30", "12"))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ("aa", "a tuple of two"),
        (["aa"], "a tuple of two"),
        ((3, "tcp://a"), "neither 3 nor 'tcp://a'"),
        (("aaa", "tcp://a"), "there is a darker one"),
        (("aa", "tcp://elsewhere"), "address of a worker"),
        (("aa", 4711), "address of a worker"),
        (("aa", ["tcp://a"]), "address of a worker"),
    ],
)
def test_no_wrong_photo_is_the_darkest(answer, hint):
    with pytest.raises(NotYet, match=hint):
        getting_started.check_darkest(answer, ["aaa", "aa", "aaaa"], len, Client())


@pytest.mark.parametrize("answer", [("aa", "tcp://b"), ["aa", "tcp://b"], ("tcp://b", "aa")])
def test_the_darkest_photo_passes(answer):
    getting_started.check_darkest(answer, ["aaa", "aa", "aaaa"], len, Client())
