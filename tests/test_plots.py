"""What a reader of a picture sees: its panels, axes and lines, its size, and the text for those who cannot see it."""

import io
import shutil

import dask
import pandas as pd
import plotnine as p9
import pytest
from PIL import Image

from workshop_utils import plots


def opened(image):
    """Return a shown PNG as a picture."""
    return Image.open(io.BytesIO(image.data))


def alt_of(image):
    return image._repr_mimebundle_()[1]["image/png"]["alt"]


def test_a_shown_plot_has_its_size_and_its_text():
    table = pd.DataFrame({"x": [1, 2], "y": [1, 2]})
    image = plots.show(p9.ggplot(table, p9.aes("x", "y")) + p9.geom_line(), "a rising line", width=5, height=2)
    assert (opened(image).format, opened(image).size, alt_of(image)) == ("PNG", (500, 200), "a rising line")


@pytest.mark.filterwarnings("error")
def test_a_line_of_one_point_warns_nobody():
    plots.show(p9.ggplot(pd.DataFrame({"x": [1], "y": [1]}), p9.aes("x", "y")) + p9.geom_line(), "a line to come")


def test_a_task_graph_is_svg_with_alt_text():
    total = dask.delayed(sum)([dask.delayed(abs)(x) for x in range(3)])
    html = plots.task_graph(total, alt='three "abs", one sum').data
    assert html.startswith('<div role="img" aria-label="three &quot;abs&quot;, one sum"><svg')
    assert html.count(">abs<") == 3 and html.count(">sum<") == 1


def test_a_graph_is_drawn_without_an_installed_dot(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    svg = plots.render_dot("digraph { a -> b }")
    assert svg.startswith("<svg") and svg.count("<g ") >= 4


@pytest.mark.parametrize(("n_images", "n_rows"), [(3, 1), (7, 3)])
def test_a_gallery_has_a_row_for_each_three_images(n_images, n_rows):
    gallery = plots.gallery([Image.new("RGB", (32, 24), "tan")] * n_images, ["dog"] * n_images, "dogs", columns=3)
    assert opened(gallery).size == (420, 172 * n_rows) and alt_of(gallery) == "dogs"


def count(picture, colour):
    """Return how many pixels of a picture have exactly this colour."""
    rgb = tuple(bytes.fromhex(colour[1:]))
    return sum(n for n, found in picture.convert("RGB").getcolors(2**24) if found == rgb)


def test_right_and_wrong_answers_have_frames_of_their_own():
    for marks, framed in (([True], [True, False]), ([False], [False, True]), (None, [False, False])):
        image = Image.new("RGB", (32, 24), "tan")
        picture = opened(plots.gallery([image], ["dog"], "a dog", marks=marks, columns=1))
        assert [count(picture, plots.COLOURS[mark]) > 100 for mark in (True, False)] == framed
        assert count(picture, "#d2b48c") > 1000  # tan: the image itself


def ladder_of(*rates):
    rungs = pd.DataFrame({"rung": [f"{letter}  rung" for letter in "abcdefg"[: len(rates)]], "images_per_s": rates})
    return rungs.assign(waiting_ms=500 / rungs.images_per_s, rest_ms=1500 / rungs.images_per_s)


def test_a_ladder_has_a_colour_for_waiting_and_the_rest_and_a_shorter_bar_for_a_faster_rung():
    equal, faster = (opened(plots.ladder(ladder_of(1, rate), "two rungs")) for rate in (1, 4))
    waiting, rest = (count(equal, colour) for colour in plots.PALETTE[1:3])
    assert rest == pytest.approx(3 * waiting, rel=0.1)  # as their milliseconds
    assert count(faster, plots.PALETTE[2]) == pytest.approx(rest * (1 + 1 / 4) / 2, rel=0.1)


def test_a_task_stream_has_a_row_per_worker_a_colour_per_kind_and_a_mark():
    events = pd.DataFrame(
        [("A", 0, 1, "ran twice"), ("B", 0, 2, "ran once"), ("B", 2, 3, "ran twice")],
        columns=["worker", "start", "stop", "kind"],
    )
    stream = plots.task_stream(events, "three tasks of two workers", order=["idle", "B", "A"], mark=(1.5, "SIGKILL"))
    colours = [*plots.PALETTE[:2], plots.COLOURS[False]]  # of the first kind, the second, the mark
    assert all(count(opened(stream), colour) > 100 for colour in colours)
