"""The chart of the page of ranks: one metric of a job, with a line for each rank of each attempt."""

from typing import Any

from bokeh.models import BasicTicker, ColumnDataSource, HoverTool
from bokeh.plotting import figure

from daskrun import tables
from daskrun.history import JobHistory, Point

DRAWN = {
    "lines": ("xs", "ys", "rank", "attempt", "color", "alpha"),
    "ends": ("x", "y", "color", "alpha"),  # a line of one point shows nothing else
    "restarts": ("x",),
    "deaths": ("x", "y", "alpha"),
}


class Chart:
    """figure: what bokeh shows."""

    def __init__(self) -> None:
        # bokeh draws no glyph whose columns are missing, and would show nothing from then on.
        self._sources = of = {
            name: ColumnDataSource({column: [] for column in columns}, name=name) for name, columns in DRAWN.items()
        }
        self.figure = chart = figure(height=420, tools="pan,box_zoom,wheel_zoom,reset,save")
        chart.xaxis.ticker = self._ticker = BasicTicker()
        lines = chart.multi_line("xs", "ys", source=of["lines"], line_color="color", line_alpha="alpha", line_width=2)
        chart.scatter("x", "y", source=of["ends"], color="color", alpha="alpha", size=6)
        chart.vspan(x="x", source=of["restarts"], line_color="#555555", line_dash="dashed")
        mark: dict[str, Any] = {"size": 14, "line_width": 3, "line_color": "#b00020", "line_alpha": "alpha"}
        chart.scatter("x", "y", source=of["deaths"], marker="x", **mark)
        chart.add_tools(HoverTool(renderers=[lines], tooltips=[("rank", "@rank"), ("restarts", "@attempt")]))

    def draw(self, job: JobHistory, metric: str, by_step: bool) -> None:
        """Show a metric of a job, by step or by seconds."""

        def x_of(point: Point) -> float:
            return point.step if by_step else point.at - job.since

        def alpha(attempt: int) -> float:
            return 1.0 if attempt == job.attempt else 0.45

        lines = {whose: line.points for whose, line in sorted(job.lines[metric].items())} if metric else {}
        self._show(
            "lines",
            [
                (
                    list(map(x_of, points)),
                    [point.value for point in points],
                    rank,
                    attempt,
                    tables.color(rank),
                    alpha(attempt),
                )
                for (attempt, rank), points in lines.items()
            ],
        )
        self._show(
            "ends",
            [
                (x_of(points[-1]), points[-1].value, tables.color(rank), alpha(attempt))
                for (attempt, rank), points in lines.items()
            ],
        )
        self._show("restarts", [(x_of(start),) for attempt, start in job.starts.items() if attempt])
        self._show(
            "deaths",
            [
                (x_of(death), lines[attempt, rank][-1].value, alpha(attempt))
                for (attempt, rank), death in job.deaths.items()
                if (attempt, rank) in lines
            ],
        )
        below = tables.unit(job) if by_step else "seconds since the launch"
        stride = max((line.stride for line in job.lines[metric].values()), default=1) if metric else 1
        thinned = f" (one of every {stride} rows is drawn)" if stride > 1 else ""
        self.figure.yaxis.axis_label, self.figure.xaxis.axis_label = metric, f"{below}{thinned}"
        self._ticker.min_interval = 1 if by_step else 0  # there's no half step

    def _show(self, name: str, rows: list[tuple]) -> None:
        self._sources[name].data = {column: [row[n] for row in rows] for n, column in enumerate(DRAWN[name])}
