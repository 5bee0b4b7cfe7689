"""The chart of the page of ranks: one metric of a job, with a line for each rank of each attempt."""

from typing import Any

from bokeh.models import BasicTicker, ColumnDataSource, HoverTool
from bokeh.plotting import figure

from daskrun import tables
from daskrun.history import JobHistory

PALE = 0.45
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
        chart.xaxis.ticker = BasicTicker(min_interval=1)  # there's no half step
        lines = chart.multi_line("xs", "ys", source=of["lines"], line_color="color", line_alpha="alpha", line_width=2)
        chart.scatter("x", "y", source=of["ends"], color="color", alpha="alpha", size=6)
        chart.vspan(x="x", source=of["restarts"], line_color="#555555", line_dash="dashed")
        mark: dict[str, Any] = {"size": 14, "line_width": 3, "line_color": "#b00020", "line_alpha": "alpha"}
        chart.scatter("x", "y", source=of["deaths"], marker="x", **mark)
        chart.add_tools(HoverTool(renderers=[lines], tooltips=[("rank", "@rank"), ("restarts", "@attempt")]))

    def draw(self, job: JobHistory, metric: str) -> None:
        """Show a metric of a job, "" for none."""

        alpha = {job.attempt: 1.0}  # else pale
        of_metric = job.lines[metric] if metric else {}
        lines, ends, stride = [], [], 1
        for (attempt, rank), line in sorted(of_metric.items()):
            steps, values = zip(*line.points, strict=True)
            look = tables.color(rank), alpha.get(attempt, PALE)
            lines.append((steps, values, rank, attempt, *look))
            ends.append((steps[-1], values[-1], *look))
            stride = max(stride, line.stride)
        self._show("lines", lines)
        self._show("ends", ends)
        self._show("restarts", [(step,) for attempt, step in job.starts.items() if attempt])
        self._show(
            "deaths",
            [
                (step, of_metric[whose].points[-1].value, alpha.get(whose[0], PALE))
                for whose, step in job.deaths.items()
                if whose in of_metric
            ],
        )
        thinned = f" (one of every {stride} rows is drawn)" if stride > 1 else ""
        self.figure.yaxis.axis_label, self.figure.xaxis.axis_label = metric, f"{tables.unit(job)}{thinned}"

    def _show(self, name: str, rows: list[tuple]) -> None:
        self._sources[name].data = {column: [row[n] for row in rows] for n, column in enumerate(DRAWN[name])}
