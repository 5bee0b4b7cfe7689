"""Notebook 02: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import dask
import pytest
import stand_ins

from workshop_utils.exercises import NotYet, dask_basics


class Client(stand_ins.Client):
    """Runs tasks here; its workers are named 0, 1, …"""

    def map(self, function, *arguments):
        return list(map(function, *arguments))

    def gather(self, results):
        return results


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    def known(client):
        return {f"tcp://{name}": {"name": name} for name in client.threads}

    monkeypatch.setattr(dask_basics, "known_workers", known)


def add_pair(a, b):
    return a + b


def puzzle(x):
    return [1, 2, 3, 4, 5][x] / (x % 3)


def tree(values):
    while len(values) > 1:
        values = [dask.delayed(add_pair)(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def chain(values):
    total = values[0]
    for value in values[1:]:
        total = dask.delayed(add_pair)(total, value)
    return total


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        (28, "a number already"),
        ([tree(range(8))], "take the Delayed out"),
        ([tree(range(4)), tree(range(4))], "one Delayed"),
        (dask.delayed(sum)(list(range(8))), "no task"),
        (tree(range(4)), "3, .*takes 7"),
        (chain(range(8)), "7 calls.*3 are enough"),
        (tree([0] * 8), "another number"),
        (tree(["a"] * 8), "another number"),
        (tree([0, "a"] * 4), "cannot read.*TypeError"),
    ],
)
def test_no_wrong_graph_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        dask_basics.check_tree(answer, list(range(8)))


@pytest.mark.parametrize("values", [range(8), range(7, -1, -1), [dask.delayed(x) for x in range(8)]])
def test_a_tree_passes_in_any_order(values, capsys):
    dask_basics.check_tree(tree(list(values)), list(range(8)))
    assert "7 calls, of which at most 3 wait" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ([(0.1, 0), (0.2, 1)], "a list of three"),
        ("abc", "a list of three"),
        ([0.1, 0.2, 0.3], "what `nap` returns"),
        ([(0.1, 0), (0.2, 1), (0.3, "this notebook")], "not results of `nap`"),
        ([(0.1, 0), (0.2, 1), (7, 1)], "not results of `nap`"),
        ([(0.1, 0), (0.1, 0), (0.2, 1)], "twice"),
        ([(0.1, 0), (0.2, 0), (0.9, 1)], "last try"),
    ],
)
def test_no_wrong_first_three_pass(answer, hint):
    with pytest.raises(NotYet, match=hint):
        dask_basics.check_first_three(answer, [0.9, 0.1, 0.2, 0.3], Client(1, 1))


@pytest.mark.parametrize("answer", [[(0.1, 0), (0.3, 1), (0.2, 0)], ([0.1, 0], [0.3, 1], [0.2, 0])])
def test_the_first_three_pass(answer):
    dask_basics.check_first_three(answer, [0.9, 0.1, 0.2, 0.3], Client(1, 1))


def test_on_one_thread_the_longest_nap_may_be_among_the_first():
    dask_basics.check_first_three([(0.9, 0), (0.1, 0), (0.2, 0)], [0.9, 0.1, 0.2, 0.3], Client(1))


RIGHT = {0: ZeroDivisionError, 3: ZeroDivisionError, 5: IndexError, 6: IndexError}


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ({}, "it is empty"),
        ([0, 3, 5, 6], "should be a dict"),
        (dict.fromkeys("abcd", IndexError), "numbers"),
        (dict.fromkeys(range(7), ValueError), "on a worker"),
        ({0: ZeroDivisionError}, "inputs that fail"),
        (RIGHT | {4: None}, "no exception"),
        (RIGHT | {6: "error"}, "'error'.*input 6"),
        (RIGHT | {6: ZeroDivisionError}, "exception for input 6"),
    ],
)
def test_no_wrong_culprits_pass(answer, hint):
    with pytest.raises(NotYet, match=hint):
        dask_basics.check_culprits(answer, list(range(7)), puzzle, Client(1, 1))


@pytest.mark.parametrize(
    "of", [lambda kind: kind, lambda kind: kind("why"), lambda kind: kind.__name__, lambda kind: repr(kind("why"))]
)
def test_the_culprits_pass_with_types_exceptions_or_names(of):
    dask_basics.check_culprits({key: of(kind) for key, kind in RIGHT.items()}, list(range(7)), puzzle, Client(1, 1))
