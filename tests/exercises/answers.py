"""Tests of a check: a wrong answer gets its hint and never a traceback, and a right one passes."""

import inspect

import pytest

from workshop_utils.exercises import NotYet


def wrong(check, *cases):
    """Return a test of these (answer, hint). check: takes an answer, and fixtures by their names."""

    @pytest.mark.parametrize(("answer", "hint"), cases)
    def test(answer, hint, request):
        with pytest.raises(NotYet, match=hint):
            call(check, answer, request)

    return test


def right(check, *answers, says=""):
    """Return a test of these answers. says: how the check goes on after "Correct."."""

    @pytest.mark.parametrize("answer", answers)
    def test(answer, request, capsys):
        call(check, answer, request)
        assert capsys.readouterr().out.startswith(f"Correct. {says}")

    return test


def call(check, answer, request):
    _, *fixtures = inspect.signature(check).parameters
    check(answer, *map(request.getfixturevalue, fixtures))
