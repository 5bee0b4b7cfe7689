"""Notebook 04: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import pandas as pd
import pytest

from workshop_utils.exercises import (
    NotYet,
    parallel_inference,
)

SEEN = pd.DataFrame({"breed": ["pug", "pug", "boxer", "pug"], "prediction": ["boxer", "boxer", "pug", "pug"]}).assign(
    correct=pd.array([False, False, False, True], dtype="boolean")
)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ("pug", "should be a tuple"),
        (["pug", "boxer"], "should be a tuple"),
        (("boxer", "pug"), "1 time.*another is commoner"),
        (("pug", "pug"), "never happened"),
        (("cat", "dog"), "never happened"),
    ],
)
def test_no_wrong_confusion_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        parallel_inference.check_confusion(answer, SEEN)


def test_the_commonest_confusion_passes():
    parallel_inference.check_confusion(("pug", "boxer"), SEEN)


CHECKED = pd.DataFrame({"path": ["f/a.jpg", "f/empty.jpg", "f/letter.jpg"], "error": [None, "empty", "no image"]})


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        (CHECKED, "all the rows"),
        (CHECKED[:1], "error.notna"),
        (CHECKED[1:2], "other bad files"),
        (CHECKED[["error"]][1:], "all the columns"),
        (["f/empty.jpg"], "should be a DataFrame"),
    ],
)
def test_no_wrong_choice_of_bad_files_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        parallel_inference.check_bad_files(answer, list(CHECKED.path))


def test_the_bad_files_pass():
    parallel_inference.check_bad_files(CHECKED[1:], list(CHECKED.path))
