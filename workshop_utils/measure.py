"""Time functions in a lesson: a printed line for each, and one chart of all of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import IPython.display
    import pandas as pd

ENOUGH_S = 5.0  # after so many seconds no further round begins
SAME = 1.05  # a ratio below this is "about as fast"
T = TypeVar("T")  # what the function returns


@dataclass(frozen=True)
class Row:
    """One measurement: the fastest of its rounds."""

    name: str
    seconds: float
    n_items: int | None  # handled in one round
    labels: dict[str, Any] = field(default_factory=dict)

    @property
    def items_per_s(self) -> float:
        """Items per second; seconds stand below the line, so more is faster."""
        return (self.n_items or 1) / self.seconds


class Measurements:
    """Time functions: call it with a name and a function, then draw the chart.

    >>> measure = Measurements(unit="words")
    >>> measure("sorted", sorted, ["b", "a"], n_items=2)  # doctest: +ELLIPSIS
    sorted ... words/s
    ['a', 'b']
    """

    def __init__(self, n_items: int | None = None, unit: str = "images") -> None:
        """Begin without rows.

        Args:
            n_items: Items that each function handles, for a rate in items per second; None for seconds.
            unit: What an item is.
        """
        self.rows: dict[str, Row] = {}  #: name → its latest measurement
        self._n_items, self._unit = n_items, unit

    def __call__(
        self,
        name: str,
        function: Callable[..., T],
        *args: Any,
        rounds: int = 3,
        n_items: int | None = None,
        than: str | None = None,
        **labels: Any,
    ) -> T:
        """Call ``function(*args)`` up to three times, print how long the fastest call took, and return its result.

        Args:
            name: Of the row; measuring again replaces it.
            rounds: Calls at most; after 5 s no further one begins.
            n_items: Items that this function handles.
            than: The row to compare with; by default, the first one, but none if there are labels.
            labels: Further columns of the row, for `chart`.
        """
        n_items, fastest_s, spent_s = n_items or self._n_items, float("inf"), 0.0
        for _ in range(rounds):
            start = time.perf_counter()
            answer = function(*args)
            took_s = time.perf_counter() - start
            spent_s += took_s
            if took_s < fastest_s:
                fastest_s, result = took_s, answer
            if spent_s >= ENOUGH_S:
                break
        self.rows[name] = row = Row(name, fastest_s, n_items, labels)
        print(f"{name:<24} {self._amount(row)}{self._comparison(row, than)}")
        return result

    def seconds(self, name: str) -> float:
        """Return how long the fastest round of a row took."""
        return self.rows[name].seconds

    def table(self) -> "pd.DataFrame":
        """Return the rows as a DataFrame with the columns name, seconds, n_items and their labels."""
        import pandas as pd

        rows = [{"name": row.name, "seconds": row.seconds, "n_items": row.n_items, **row.labels} for row in self._all()]
        return pd.DataFrame(rows)

    def chart(self, title: str, *, x: str | None = None, color: str | None = None) -> "IPython.display.Image":
        """Return one chart of all rows: a bar for each, or lines over a label.

        Args:
            x: The label along the x axis, which holds numbers above 0; both axes are then logarithmic, and y is in ms.
            color: The label that says which points make a line.
        """
        import plotnine as p9

        from workshop_utils import plots

        rows = self.table()
        if x:
            rows["ms"] = 1000 * rows.seconds
            plot = (
                p9.ggplot(rows, p9.aes(x, "ms", color=color, shape=color))
                + p9.geom_line(size=1)
                + p9.geom_point(size=3)
                + p9.scale_x_log10(breaks=sorted(set(rows[x])), labels=_as_text)
                + p9.scale_y_log10(labels=_as_text)
                + p9.scale_color_manual(plots.PALETTE)
                + p9.labs(title=title, x=x.replace("_", " "), y="milliseconds", color="", shape="")
                + plots.theme()
                + p9.theme(panel_grid_minor=p9.element_blank())
            )
            points = [f"{row.name} {self._amount(row, short=True)}" for row in self._all()]
            return plots.show(plot, f"{title}: lines of milliseconds over {x}, {', '.join(points)}.", height=3.5)
        is_rate = all(row.n_items for row in self._all())
        rows["value"] = [row.items_per_s if is_rate else row.seconds for row in self._all()]
        rows["label"] = [f" {self._amount(row, short=True)}" for row in self._all()]
        plot = (
            p9.ggplot(rows, p9.aes("name", "value"))
            + p9.geom_col(width=0.7, fill=plots.PALETTE[0])
            + p9.geom_text(p9.aes(label="label"), ha="left", size=11)
            + p9.scale_x_discrete(limits=list(rows.name)[::-1])
            + p9.scale_y_continuous(limits=(0, 1.45 * rows.value.max()))
            + p9.coord_flip()
            + p9.labs(title=title, x="", y=f"{self._unit} per second" if is_rate else "seconds")
            + plots.theme()
            + p9.theme(panel_grid_major_y=p9.element_blank())
        )
        bars = [f"{row.name} {self._amount(row, short=True)}" for row in self._all()]
        return plots.show(plot, f"{title}: bars, {', '.join(bars)}.", height=1.0 + 0.4 * len(rows))

    def _all(self) -> list[Row]:
        return list(self.rows.values())

    def _amount(self, row: Row, short: bool = False) -> str:
        took = f"{row.seconds:.2f} s" if row.seconds >= 0.1 else f"{1000 * row.seconds:.1f} ms"
        if not row.n_items:
            return took if short else f"{took:>8}"
        rate = f"{row.items_per_s:,.0f} {self._unit}/s"
        return rate if short else f"{took:>8}   {rate:>{len(self._unit) + 7}}"

    def _comparison(self, row: Row, than: str | None) -> str:
        other = self.rows[than] if than else self._all()[0]
        if other is row or (row.labels and not than):
            return ""
        per_item = bool(row.n_items and other.n_items)
        ratio = row.items_per_s / other.items_per_s if per_item else other.seconds / row.seconds
        times, word = (ratio, "faster than") if ratio >= 1 else (1 / ratio, "slower than")
        compared = f"{times:.1f}× {word}" if times >= SAME else "about as fast as"
        return f'   {compared} "{other.name}"'


def _as_text(breaks: Sequence[float] | Sequence[str]) -> list[str]:
    return [f"{value / 1e6:g}M" if value >= 1e6 else f"{value:,.10g}" for value in map(float, breaks)]
