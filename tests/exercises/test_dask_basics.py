"""Notebook 02: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import dask
import pytest
from stand_ins import Client

from workshop_utils.exercises import (
    NotYet,
    dask_basics,
)


def cube(x):
    return x**3


def puzzle(x):
    return 1 / (x % 3)


def cubes(n):
    return [dask.delayed(cube)(x) for x in range(n)]


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        (36, "a number already"),
        (dask.delayed(sum)(map(cube, range(4))), "does not look into generators"),
        (cubes(4), "one Delayed"),
        (dask.delayed(cube)(1), "has one task"),
        (dask.delayed(sum)(cubes(3)), "has 4 tasks; make one for each"),
        (dask.delayed(max)(cubes(4)), "another number"),
        (dask.delayed(sum)(*cubes(4)), "cannot read this answer .*sum.. takes at most 2 arguments"),
    ],
)
def test_no_wrong_graph_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        dask_basics.check_one_graph(answer, [cube(x) for x in range(4)])


def test_the_graph_of_a_sum_passes():
    dask_basics.check_one_graph(dask.delayed(sum)(cubes(4)), [cube(x) for x in range(4)])


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ([0.1, 0.2], "a list of three"),
        ("abc", "a list of three"),
        ([object(), 0.1, 0.2], "not the future"),
        ([0.1, 0.1, 0.2], "twice"),
        ([0.1, 0.2, 0.9], "waited for the longest nap"),
    ],
)
def test_no_wrong_first_three_pass(answer, hint):
    with pytest.raises(NotYet, match=hint):
        dask_basics.check_first_three(answer, [0.9, 0.1, 0.2, 0.3], Client(1, 1))


def test_the_first_three_pass():
    dask_basics.check_first_three([0.1, 0.3, 0.2], [0.9, 0.1, 0.2, 0.3], Client(1, 1))


def test_on_one_thread_the_longest_nap_may_be_among_the_first():
    dask_basics.check_first_three([0.9, 0.1, 0.2], [0.9, 0.1, 0.2, 0.3], Client(1))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ([], "it is empty"),
        (3, "should be a list"),
        ([1, 2], "is 'error'"),
        ([(0, "error")], "numbers, not futures"),
        ([ZeroDivisionError()], "numbers, not futures"),
        ([0, 3], "is 'error'"),
    ],
)
def test_no_wrong_list_of_culprits_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        dask_basics.check_culprits(answer, list(range(7)), puzzle)


def test_the_culprits_pass_in_any_order():
    dask_basics.check_culprits([6, 0, 3], list(range(7)), puzzle)
