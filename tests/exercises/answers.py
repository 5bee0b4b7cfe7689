"""Tests of a check: what it says to an answer, which is never a traceback."""

import inspect
import re

import pytest

from workshop_utils.exercises import NotYet


def judged(check, *table):
    """Return a test of a table of (answer, "Correct" or a word of its hint).

    check: takes an answer, and fixtures by their names.
    """

    @pytest.mark.parametrize(("answer", "word"), table)
    def test(answer, word, request, capsys):
        _, *fixtures = inspect.signature(check).parameters
        try:
            check(answer, *map(request.getfixturevalue, fixtures))
        except NotYet as hint:
            print("Not yet:", hint)
        said = capsys.readouterr().out
        assert said.startswith("Correct. " if word == "Correct" else "Not yet: "), said
        assert re.search(word, said), said

    return test
