"""The page of ranks in Dask's dashboard: jobs, where each rank is, a chart of one metric, and who waits for whom."""

import asyncio
import logging
import time
from datetime import datetime
from html import escape
from typing import Any

from bokeh.layouts import column, row
from bokeh.models import LayoutDOM
from bokeh.models.widgets import Button, Div, PreText, Select
from distributed import Scheduler
from distributed.dashboard.components import DashboardComponent, add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from daskrun import tables
from daskrun.chart import Chart
from daskrun.history import JobHistory
from daskrun.protocol import AttemptId, RankState
from daskrun.scheduler import history_of
from daskrun.why.looks import looks
from daskrun.why.verdict import diagnosed, explain

logger = logging.getLogger(__name__)

UPDATE_MS = 500
NEWEST = "the newest"  # in the menu of jobs
NONE = "No job yet: daskrun.launch, or the command daskrun, starts one."
LOOKS = "Looking at the ranks … It may take 10 s where one doesn't answer."


class Ranks(DashboardComponent):
    """What one viewer sees.

    Attributes:
        root: The whole page.
        pane: The ranks and the chart.
    """

    def __init__(self, scheduler: Scheduler, **_: Any) -> None:
        self._scheduler, self._history = scheduler, history_of(scheduler)
        self._drawn: tuple = ()  # what the chart shows
        self._answer: tuple[str, str, int] = ("", "", 0)  # with the job's id and attempt, as it's wrong for another one
        self._asking: asyncio.Task | None = None
        self._default = ""  # the metric that's shown until the viewer chooses another one
        self._jobs, self._ranks, self._title = _box(150), _box(300), _box()
        self._said = PreText(text="", sizing_mode="stretch_width", styles={"max-height": "15lh", "overflow": "auto"})
        self._job = Select(title="Job", options=list[Any]([NEWEST]), value=NEWEST, width=140)
        self._metric = Select(title="Metric", options=[], value="", width=180)
        self._button = Button(label="Who waits?", align="end", width=100)
        self._button.on_click(self.ask)
        self._chart = Chart()

    @property
    def root(self) -> LayoutDOM:  # type: ignore[override]
        """The page."""
        self._chart.figure.sizing_mode = "stretch_width"
        controls = row(self._job, self._metric, self._button, styles={"flex-wrap": "wrap"})
        below = self._jobs, controls, self._said, self._title, self._ranks, self._chart.figure
        return column(*below, sizing_mode="stretch_width")

    @property
    def pane(self) -> LayoutDOM:
        """The pane, which may be 200 pixels high."""
        self._chart.figure.update(sizing_mode="stretch_both", toolbar_location=None)
        self._ranks.styles = {"overflow": "auto", "max-height": "45%"}
        return column(self._title, self._chart.figure, self._ranks, sizing_mode="stretch_both")

    def update(self) -> None:  # type: ignore[override]
        """Show what's new."""
        jobs = dict(reversed(self._history.jobs.items()))
        for model in (self._job, self._metric, self._button, self._jobs, self._ranks, self._chart.figure):
            model.visible = bool(jobs)
        if not jobs:
            self._title.text = NONE
            return
        self._job.options = list[Any](
            [NEWEST, *((name, f"{job.name}, {job.launched:%H:%M:%S}") for name, job in jobs.items())]
        )
        name, job = self._shown()
        self._jobs.text = tables.of_jobs(jobs, name)
        metric = self._choose_metric(job)
        restarts = f", restarts {job.attempt} of {job.attempts - 1}" if job.attempts > 1 else ""
        text = f"<b>{escape(job.name)}</b>{restarts}: {tables.state(job)}{tables.error(job)}"
        self._title.text = f'<div class="error">{text}</div>'
        self._ranks.text = tables.of_ranks(job, metric, time.monotonic())
        self._chart.figure.visible = self._metric.visible = bool(metric)
        if self._drawn != (drawn := (name, metric, job.n_heard, job.attempt)):
            self._drawn = drawn
            self._chart.draw(job, metric)
        text, *about = self._answer
        self._said.text = text if about == [name, job.attempt] else ""
        self._said.visible = bool(self._said.text)
        self._button.disabled = self._asking is not None

    def ask(self) -> None:
        """Look who waits for whom in the shown job."""
        if self._history.jobs and self._asking is None:
            name, job = self._shown()
            self._answer = LOOKS, name, job.attempt
            self._asking = asyncio.ensure_future(self._look(name, job))

    async def _look(self, name: str, job: JobHistory) -> None:
        attempt, at = job.attempt, datetime.now()
        try:
            text = await _explained(self._scheduler, name, job)
        except Exception as error:
            logger.warning("The ranks of %s could not be looked at.", name, exc_info=True)
            text = f"The ranks could not be looked at: {error!r}."
        self._answer, self._asking = (f"{at:%H:%M:%S}  {text}", name, attempt), None

    def _shown(self) -> tuple[str, JobHistory]:
        """Return the id and the job that the viewer has chosen, or the newest one that has had workers."""
        jobs = self._history.jobs
        if self._job.value not in jobs:
            self._job.value = NEWEST
        newest = [name for name, job in jobs.items() if job.ranks] or list(jobs)
        name = newest[-1] if self._job.value == NEWEST else self._job.value
        return name, jobs[name]

    def _choose_metric(self, job: JobHistory) -> str:
        names = list(job.lines)
        self._metric.options = list[Any](names)
        if names and (self._metric.value not in names or self._metric.value == self._default):
            likely = [name for name in ("loss", *names) if name in names and name != "epoch"]
            self._metric.value = self._default = (likely or names)[0]
        return self._metric.value if names else ""


async def _explained(scheduler: Scheduler, name: str, job: JobHistory) -> str:
    """Return who waits for whom in a job."""
    ranks = dict(enumerate(job.ranks))
    at_work = {number: rank.worker for number, rank in ranks.items() if rank.is_at_work}
    if not at_work:
        return f"No rank of this job is at work. Its state: {job.state}."
    begun = [number for number in at_work if ranks[number].state is RankState.RUNNING]
    ended = [number for number, rank in ranks.items() if rank.state in (RankState.FINISHED, RankState.FAILED)]
    found, meanwhile = await looks(AttemptId(name, job.attempt), at_work, begun, scheduler)
    return diagnosed(str, explain, found, sorted([*ended, *meanwhile]))


def _box(height: int | None = None) -> Div:
    """Return a box for HTML, which scrolls beyond a height in pixels."""
    scrolls: dict[str, str] = {"overflow": "auto", "max-height": f"{height}px"} if height else {}
    settings: dict[str, Any] = {"stylesheets": [tables.STYLE], "styles": scrolls, "html_attributes": {"tabindex": "0"}}
    return Div(text="", disable_math=True, sizing_mode="stretch_width", margin=(2, 5), **settings)


def ranks_doc(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Make the page's document, for Dask's dashboard."""
    component = Ranks(scheduler)
    _fill(doc, component, component.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)


def pane_doc(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Make the pane's document."""
    component = Ranks(scheduler)
    _fill(doc, component, component.pane)


def _fill(doc: Any, component: Ranks, root: LayoutDOM) -> None:
    component.update()
    add_periodic_callback(doc, component, UPDATE_MS)
    doc.add_root(root)
    doc.title, doc.theme = "Dask: Ranks", BOKEH_THEME
