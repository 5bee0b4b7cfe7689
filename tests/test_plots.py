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
    image = plots.show(p9.ggplot(table, p9.aes("x", "y")) + p9.geom_line(), "a rising line", height=2)
    assert (opened(image).format, opened(image).size) == ("PNG", (1300, 400))  # two pixels for each of the page
    assert image._repr_mimebundle_()[1]["image/png"] == {"width": 650, "alt": "a rising line"}


def test_a_task_graph_is_svg_with_alt_text():
    total = dask.delayed(sum)([dask.delayed(abs)(x) for x in range(3)])
    html = plots.task_graph(total, alt='three "abs", one sum').data
    assert html.startswith('<div role="img" aria-label="three &quot;abs&quot;, one sum"><svg')
    assert html.count(">abs<") == 3 and html.count(">sum<") == 1


def test_a_graph_is_drawn_without_an_installed_dot(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    svg = plots.render_dot("digraph { a -> b }")
    assert svg.startswith("<svg") and svg.count("<g ") >= 4


def test_a_gallery_needs_an_image():
    with pytest.raises(ValueError, match="images is empty"):
        plots.gallery([], [], "nothing")


def rgb(colour):
    return tuple(bytes.fromhex(colour[1:]))


def count(picture, colour):
    """Return how many pixels of a picture have exactly this colour."""
    return sum(n for n, found in picture.convert("RGB").getcolors(2**24) if found == rgb(colour))


def test_right_and_wrong_answers_have_frames_of_their_own():
    for marks, framed in (([True], [True, False]), ([False], [False, True]), (None, [False, False])):
        image = Image.new("RGB", (32, 24), "tan")
        picture = opened(plots.gallery([image], ["dog"], "a dog", marks=marks, columns=1))
        assert [count(picture, plots.COLOURS[mark]) > 100 for mark in (True, False)] == framed
        assert count(picture, "#d2b48c") > 1000  # tan: the image itself


def test_a_task_stream_says_how_many_tasks_each_worker_ran():
    parts = [{"action": "compute", "start": 10.0, "stop": 11.0}, {"action": "transfer", "start": 9.0, "stop": 10.0}]
    stream = [{"worker": worker, "key": "x", "startstops": parts} for worker in ("tcp://a", "tcp://b", "tcp://a")]
    image = plots.task_stream(stream, "A kill", mark=(10.5, "SIGKILL"))
    assert "worker 0: 2 tasks, worker 1: 1 tasks" in alt_of(image) and count(opened(image), plots.PALETTE[0]) > 1000


def test_the_five_likeliest_stand_beside_the_picture():
    image = plots.top_five(Image.new("RGB", (32, 32), "tan"), ["pug", "boxer"], [0.9, 0.1], truth="pug")
    assert "pug 90%, boxer 10%" in alt_of(image) and count(opened(image), "#d2b48c") > 1000
