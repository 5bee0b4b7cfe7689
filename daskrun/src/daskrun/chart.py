"""The chart of the page of ranks: one metric of a job, with a line for each rank of each attempt."""

from itertools import pairwise
from math import isfinite, nan
from typing import Any

from bokeh.models import BasicTicker, BasicTickFormatter, ColumnDataSource, DataRange1d, HoverTool
from bokeh.plotting import figure

from daskrun import tables
from daskrun.record import JobRecord
from daskrun.series import Lines

DASHES = "solid", "12 12", "4 6", "12 6 3 6"  # in pixels, so that equal lines of several ranks are all seen
DRAWN = {
    "lines": ("xs", "ys", "rank", "attempt", "colour", "dash", "alpha"),
    "points": ("x", "y", "colour"),
    "starts": ("x",),
    "deaths": ("x", "y", "alpha"),
    "lost": ("x", "y", "colour"),
}
IN_LEGEND = "starts", "deaths", "lost"
RED = "#b00020"


class Chart:
    """figure: what bokeh shows."""

    def __init__(self) -> None:
        # bokeh draws no glyph whose columns are missing, and would show nothing from then on.
        self._sources = {
            name: ColumnDataSource({column: [] for column in columns}, name=name) for name, columns in DRAWN.items()
        }
        self._ticker = BasicTicker()  # of what is below the chart
        self._about: tuple = ()
        self._is_small = False
        self.figure = self._new_figure()

    def be_small(self) -> None:
        """Fill a pane, which has no room for the names of the axes, and none for a legend."""
        self._is_small = True
        self.figure.sizing_mode, self.figure.toolbar_location = "stretch_both", None

    def draw(self, job: JobRecord, metric: str, by: str) -> None:
        """Show a metric of a job. by: "seconds", or the job's unit."""
        if self._about != (about := (job.name, job.since, metric, by)):  # where somebody has moved another chart to
            self._about = about
            self._values = DataRange1d()
            self.figure.x_range, self.figure.y_range = DataRange1d(), self._values
        by_step = by == job.unit
        lines = job.lines(metric, by_step)
        self._draw_lines(job, lines)
        self._draw_marks(job, lines, by_step)
        in_legend = list[Any](self._legend.items)
        for item, name in zip(in_legend, IN_LEGEND, strict=True):
            item.visible = bool(self._sources[name].data["x"])
        self._legend.visible = not self._is_small and any(item.visible for item in in_legend)
        stride = job.stride(metric)
        thinned = f" (one of every {stride} rows is drawn)" if stride > 1 else ""
        below = by if by_step else f"{by} since the launch"
        if not self._is_small:
            self.figure.yaxis.axis_label, self.figure.xaxis.axis_label = metric, f"{below}{thinned}"
        self._ticker.min_interval = 1 if by_step else 0  # there is no half step

    def _draw_lines(self, job: JobRecord, lines: Lines) -> None:
        drawn = [[y if y is not None and isfinite(y) else nan for y in ys] for *_, ys in lines]
        alone = [
            (*point, tables.colour(rank))
            for (_, rank, xs, _), ys in zip(lines, drawn, strict=True)
            for point in _alone(xs, ys)
        ]
        self._show("points", alone)
        self._show(
            "lines",
            [
                (
                    xs,
                    ys,
                    rank,
                    attempt,
                    tables.colour(rank),
                    DASHES[rank % len(DASHES)],
                    _alpha(job, attempt),
                )
                for (attempt, rank, xs, _), ys in zip(lines, drawn, strict=True)
            ],
        )
        # Else what is constant would stand between -1 and 1, and a small number on the mark of 0.
        self._values.default_span = max((abs(y) for ys in drawn for y in ys if isfinite(y)), default=0) or 2

    def _draw_marks(self, job: JobRecord, lines: Lines, by_step: bool) -> None:
        starts = [start.place(by_step, job.since) for attempt, start in job.starts.items() if attempt]
        self._show("starts", [(x,) for x in starts if x is not None])
        heights = {(attempt, rank): _filled(ys)[-1] for attempt, rank, _, ys in lines}
        deaths = [
            (death.place(by_step, job.since), heights[whose], _alpha(job, whose[0]))
            for whose, death in reversed(job.deaths.items())
            if whose in heights
        ]
        self._show("deaths", deaths)
        lost = [(*point, tables.colour(rank)) for _, rank, xs, ys in lines for point in _lost(xs, ys)]
        self._show("lost", lost)

    def _show(self, name: str, rows: list[tuple]) -> None:
        self._sources[name].data = {column: [row[n] for row in rows] for n, column in enumerate(DRAWN[name])}

    def _new_figure(self) -> figure:
        chart = figure(height=420, tools="pan,box_zoom,wheel_zoom,reset,save")
        chart.xaxis.ticker = self._ticker
        chart.xaxis.formatter = BasicTickFormatter(power_limit_high=9)  # steps beyond 100,000, too, have all digits
        chart.axis.minor_tick_line_color = None  # in a pane they would be a comb
        of = self._sources
        lines = chart.multi_line(
            "xs", "ys", source=of["lines"], line_color="colour", line_dash="dash", line_alpha="alpha", line_width=2
        )
        chart.scatter("x", "y", source=of["points"], color="colour", size=6)
        chart.vspan(x="x", source=of["starts"], line_color="#555555", line_dash="dashed", legend_label="restart")
        mark: dict[str, Any] = {"size": 14, "line_width": 3, "line_color": RED, "line_alpha": "alpha"}
        chart.scatter("x", "y", source=of["deaths"], marker="x", legend_label="death", **mark)
        mark = {"size": 9, "line_width": 2, "line_color": "colour", "fill_color": None}
        chart.scatter("x", "y", source=of["lost"], marker="diamond", legend_label="NaN or infinite", **mark)
        self._legend = chart.legend[0]
        chart.add_layout(self._legend, "above")  # where it covers no line
        self._legend.update(orientation="horizontal", padding=2, background_fill_alpha=0.7)
        chart.add_tools(HoverTool(renderers=[lines], tooltips=[("rank", "@rank"), ("restarts", "@attempt")]))
        return chart


def _alpha(job: JobRecord, attempt: int) -> float:
    return 1.0 if attempt == job.attempt else 0.45


def _alone(xs: list[float], ys: list[float]) -> list[tuple[float, float]]:
    """Return the points that no line joins to another, as beside a gap, or where the same value comes again."""
    points = list(zip(xs, ys, strict=True))
    joins = [False, *(one != other and isfinite(one[1] + other[1]) for one, other in pairwise(points)), False]
    return [point for n, point in enumerate(points) if isfinite(point[1]) and not joins[n] and not joins[n + 1]]


def _lost(xs: list[float], ys: list[float | None]) -> list[tuple[float, float]]:
    """Return where values are NaN or infinite, each at the height of the last finite one."""
    in_sight = zip(xs, ys, _filled(ys), strict=True)
    return [(x, last) for x, y, last in in_sight if y is not None and not isfinite(y)]


def _filled(ys: list[float | None]) -> list[float]:
    """Return for each value the last finite one until there, 0 if there was none."""
    found = [0.0]
    for y in ys:
        found.append(found[-1] if y is None or not isfinite(y) else y)
    return found[1:]
