"""Whoever waits sees a line that moves and then stays; whoever hardly waits sees nothing."""

import sys
import threading
import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from render import render

from workshop_utils import ddp
from workshop_utils.data import list_photos
from workshop_utils.inference import classify
from workshop_utils.progress import bar, waiting
from workshop_utils.results import log_metrics


def slow():
    for step in range(3):
        log_metrics(step=step)
        time.sleep(1)


def test_a_terminal_shows_what_is_waited_for_and_how_far_it_is(capsys):
    rows = []
    with waiting("a test", lambda: f"{len(rows)} rows"):
        time.sleep(2.2)
        rows += [1, 2]
        time.sleep(1)
    said = capsys.readouterr()
    moments = said.err.strip().split("\r")
    assert (moments[0], moments[-1], said.out) == ("a test [00:02, 0 rows]", "a test [00:03, 2 rows]", "")


def test_what_is_soon_done_shows_nothing(capsys):
    with waiting("a test"):
        list(bar(range(5)))
    assert capsys.readouterr() == ("", "")


def test_a_program_without_a_screen_waits_all_the_same(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with waiting("a test"):
        assert list(bar(range(3))) == [0, 1, 2]


def test_an_error_ends_the_line_and_its_thread(capsys):
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), waiting("a test"):
        time.sleep(2.2)
        raise KeyboardInterrupt
    assert capsys.readouterr().err.endswith("a test [00:02]\n") and threading.active_count() == before


def test_jobs_and_inference_show_how_far_they_are(capsys, client, dogs):
    ddp.run(client, slow)
    assert f"slow on {len(client.nthreads())} ranks [00:0" in (said := capsys.readouterr().err)
    assert f"{3 * len(client.nthreads())} rows of metrics]\n" in said

    photos = list_photos(dogs)

    def paths():
        for photo in photos:
            time.sleep(2.5 / len(photos))
            yield photo

    classify(client, paths(), weights="sketches")
    assert f"classifying: {len(photos)} photos [00:0" in capsys.readouterr().err


def test_a_stored_notebook_has_the_finished_line_alone(tmp_path):
    source = "from workshop_utils.progress import waiting\nimport time\nwith waiting('a test'):\n    time.sleep(2.2)"
    path = tmp_path / "notebooks" / "01-try.ipynb"
    path.parent.mkdir()
    nbformat.write(new_notebook(cells=[new_code_cell(source)]), path)
    assert render(path, tmp_path / "out").error is None
    (output,) = nbformat.read(tmp_path / "out" / path.name, 4).cells[0].outputs
    assert (output.name, output.text) == ("stdout", "a test [00:02]\n")
