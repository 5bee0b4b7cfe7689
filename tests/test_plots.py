import shutil

import dask
import pandas as pd
import pytest
from PIL import Image

from workshop_utils import plots


def is_png(image):
    return image.data.startswith(b"\x89PNG") and len(image.data) > 500


def test_a_task_graph_is_svg_with_alt_text():
    total = dask.delayed(sum)([dask.delayed(abs)(x) for x in range(3)])
    html = plots.task_graph(total, alt='three "abs", one sum').data
    assert html.startswith('<div role="img" aria-label="three &quot;abs&quot;, one sum"><svg')
    assert html.count(">abs<") == 3 and html.count(">sum<") == 1


def test_a_graph_is_drawn_without_an_installed_dot(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    svg = plots.render_dot("digraph { a -> b }")
    assert svg.startswith("<svg") and svg.count("<g ") >= 4


@pytest.mark.skipif(not shutil.which("dot"), reason="no dot on this machine")
def test_a_graph_is_drawn_by_the_systems_dot_where_it_is():
    assert plots.render_dot("digraph { a -> b }").startswith("<svg")


@pytest.mark.parametrize("n_images", [1, 5, 7])
def test_a_gallery_takes_any_number_of_images(n_images):
    images = [Image.new("RGB", (32, 24), "tan")] * n_images
    marks = [True, False, None, True, False, None, True][:n_images]
    gallery = plots.gallery(images, ["dog"] * n_images, "some dogs", marks=marks, columns=3)
    assert is_png(gallery) and gallery._repr_mimebundle_()[1]["image/png"]["alt"] == "some dogs"


def test_accuracy_and_ladder_are_drawn_from_their_tables():
    breeds = pd.DataFrame({"breed": ["pug", "boxer"], "photos": [3, 4], "accuracy": [0.0, 1.0]})
    assert is_png(plots.accuracy_per_breed(breeds, "two breeds"))
    rungs = pd.DataFrame({"rung": ["a  slow", "b  fast"], "images_per_s": [2.0, 20.0]})
    assert is_png(plots.ladder(rungs, "two rungs"))


def test_learning_curves_are_drawn_from_the_first_row_on():
    first = {"rank": 0, "attempt": 0, "step": 1, "loss": 2.0}
    assert is_png(plots.learning_curve(pd.DataFrame([first]), "one step"))
    later = [{**first, "rank": 1}, {**first, "step": 2}, {"rank": 0, "attempt": 0, "step": 2, "val_accuracy": 0.9}]
    assert is_png(plots.learning_curve(pd.DataFrame([first, *later]), "two steps"))


def test_runs_are_compared():
    rows = pd.DataFrame({"data": ["photos"] * 4, "run_of": list("aabb"), "step": [1, 2] * 2, "loss": [2.0, 1.0] * 2})
    assert is_png(plots.compare_runs(rows, "step", "loss", "two runs"))
    table = pd.DataFrame({"data": ["photos"] * 2, "workers": [1, 2], "speedup": [1.0, 1.9]})
    assert is_png(plots.scaling(table, "one and two workers"))
    parts = pd.DataFrame({"data": ["photos"] * 4, "run_of": list("aabb"), "part": ["load", "compute"] * 2,
                          "seconds": [0.1, 1.0] * 2})  # fmt: skip
    assert is_png(plots.step_parts(parts, "parts of two runs"))


def test_small_multiples_are_drawn_while_models_are_still_training():
    first = {"model": "a", "epoch": 1, "seconds": 0.5, "loss": 3.0, "val_loss": 3.1}
    assert is_png(plots.small_multiples(pd.DataFrame([first]), "epoch", "one model, one epoch"))
    rows = [first, {**first, "epoch": 2}, *({**first, "model": name} for name in "bcde")]
    assert is_png(plots.small_multiples(pd.DataFrame(rows), "seconds", "five models"))
