"""Whoever waits sees a line that moves and then stays; whoever hardly waits sees nothing."""

import io
import re
import sys
import threading
import time

import pytest

import daskrun
from daskrun import log_metrics
from daskrun.client import job
from workshop_utils import progress
from workshop_utils.classify import classify
from workshop_utils.photos import list_photos
from workshop_utils.progress import bar, waiting


@pytest.fixture
def seen(capsys, monkeypatch):
    """A function that waits until the line has this text; the line appears soon, and its time is left out."""
    monkeypatch.setattr(progress, "AFTER_S", 0.1)
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)
    told = []

    def seen(text):
        while text not in re.sub(r"\d\d:\d\d", "time", "".join(told)):
            told.append(capsys.readouterr().err)
            time.sleep(0.05)
        return re.sub(r"\d\d:\d\d", "time", "".join(told)).split("\r")

    return seen


def test_a_terminal_shows_what_is_waited_for_and_how_far_it_is(seen):
    rows = []
    with waiting("a test", lambda: f"{len(rows)} rows"):
        seen("0 rows")
        rows += [1, 2]
    moments = seen("2 rows]\n")
    assert moments[1] == "a test [time, 0 rows]" and moments[-1] == "a test [time, 2 rows]\n"


def test_what_is_soon_done_shows_nothing(capsys):
    with waiting("a test"):
        list(bar(range(5)))
    assert capsys.readouterr() == ("", "")


class Full(io.StringIO):
    def write(self, text):
        raise OSError("No space left on device")


class Closed(io.StringIO):
    closed = True

    def isatty(self):
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stderr", [None, Closed(), Full()])
def test_a_program_whose_stderr_goes_nowhere_waits_all_the_same(stderr, monkeypatch):
    monkeypatch.setattr(progress, "AFTER_S", 0)
    monkeypatch.setattr(sys, "stderr", stderr)
    with waiting("a test"):
        assert list(bar(range(3))) == [0, 1, 2]


def test_an_error_ends_the_line_and_its_thread(seen):
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), waiting("a test"):
        seen("a test [time")
        raise KeyboardInterrupt
    assert seen("]\n")[-1] == "a test [time]\n" and threading.active_count() == before


def log_three_steps():
    for step in range(3):
        log_metrics(step=step)


def test_jobs_and_inference_show_how_far_they_are(capsys, monkeypatch, client, dogs):
    monkeypatch.setattr(progress, "AFTER_S", 0)
    monkeypatch.setattr(job, "SHOWN_AFTER_S", 0)
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)
    n_ranks = len(client.nthreads())
    daskrun.run(client, log_three_steps)
    said = capsys.readouterr().err
    assert f"log_three_steps on {n_ranks} ranks [" in said and f"{3 * n_ranks} rows of metrics]\n" in said
    photos = list_photos(dogs)
    classify(client, iter(photos), weights="sketches")
    assert f"classifying: {len(photos)} photos [" in capsys.readouterr().err
