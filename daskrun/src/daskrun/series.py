"""One line of a chart, which stays short however long a training is."""

from math import isfinite
from typing import NamedTuple

Lines = list[tuple[int, int, list[float], list[float | None]]]  # see `JobRecord.lines`


class Point(NamedTuple):
    """A value of a metric. at: when it was logged."""

    step: float
    at: float
    value: float


class Moment(NamedTuple):
    """A start or a death. step: of a start, the first that was logged then; of a death, the rank's last one."""

    step: float | None
    at: float

    def place(self, by_step: bool, since: float) -> float | None:
        """Return where it is on an axis of steps, None if none was logged, or of seconds since then."""
        return self.step if by_step else self.at - since


class Series:
    """Points in the order in which they come: the first, then one of every `stride`, and the last.

    Of those that are left out, one that is NaN or infinite takes the place of one that is not.
    """

    def __init__(self) -> None:
        self.stride = 1
        self._kept: list[Point] = []
        self._n_points = 0
        self._last: Point | None = None

    def add(self, point: Point, most: int) -> None:
        """Add a point. most: keep so many, and the last, at most."""
        self._last = point
        if self._n_points % self.stride == 0:
            self._kept.append(point)
        else:
            self._kept[-1] = _odder(self._kept[-1], point)
        self._n_points += 1
        while len(self._kept) > most:
            firsts, seconds = self._kept[::2], self._kept[1::2]
            self._kept = [*map(_odder, firsts, seconds), *firsts[len(seconds) :]]
            self.stride *= 2

    def line(self, by_step: bool, since: float) -> tuple[list[float], list[float | None]]:
        """Return (xs, ys). xs: steps, or seconds since then.

        ys: None, a gap in a chart, where steps that have risen fall back to their first half, as where the next
        training of a job begins.
        """
        xs: list[float] = []
        ys: list[float | None] = []
        begin = before = self._points[0].step
        for step, at, y in self._points:
            x = step if by_step else at - since
            if before > begin and step < (begin + before) / 2:
                xs.append(x)
                ys.append(None)
                begin = step
            before = step
            xs.append(x)
            ys.append(y)
        return xs, ys

    @property
    def _points(self) -> list[Point]:
        return [*self._kept, self._last] if self._last and self._last is not self._kept[-1] else self._kept


def _odder(one: Point, other: Point) -> Point:
    return other if isfinite(one.value) and not isfinite(other.value) else one
