"""Notebook 01: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import pytest
from stand_ins import Client

from workshop_utils.exercises import (
    NotYet,
    getting_started,
)


@pytest.mark.parametrize(
    ("answer", "hint"), [(None, "still None"), ({"a": 3, "b": 3}, "add up the dict's values"), (3, "3 is not the sum")]
)
def test_no_wrong_sum_of_threads_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        getting_started.check_total_threads(answer, Client(1, 1))


def test_the_sum_of_threads_passes():
    getting_started.check_total_threads(6, Client(1, 1))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [(None, "still None"), (3, "one of the paths"), (["aa"], "one of the paths"), ("aaa", "there is a darker one")],
)
def test_no_wrong_photo_is_the_darkest(answer, hint):
    with pytest.raises(NotYet, match=hint):
        getting_started.check_darkest(answer, ["aaa", "aa", "aaaa"], len)


def test_the_darkest_photo_passes():
    getting_started.check_darkest("aa", ["aaa", "aa", "aaaa"], len)
