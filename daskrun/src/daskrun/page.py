"""The page of ranks in Dask's dashboard: jobs, where each rank is, a chart of one metric, and who waits for whom."""

import asyncio
import time
from contextlib import suppress
from datetime import datetime
from html import escape
from typing import Any, NamedTuple
from weakref import WeakSet

from bokeh.layouts import column, row
from bokeh.models import CustomJS, LayoutDOM
from bokeh.models.widgets import Button, Div, PreText, Select
from distributed import Scheduler
from distributed.dashboard.components import DashboardComponent, add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.diagnostics.plugin import SchedulerPlugin

from daskrun import tables
from daskrun.chart import Chart
from daskrun.errors import ranks_do, ranks_named
from daskrun.protocol import AttemptId
from daskrun.record import JobRecord
from daskrun.scheduler import record_of
from daskrun.why.looks import looks
from daskrun.why.verdict import diagnosed, explain

UPDATE_MS = 500
LAST_S = 5  # how long a scheduler that closes waits, at most, until all viewers have seen how its jobs have ended
MOST_BUSY = 0.05  # of a core, for all viewers together: the scheduler has other work
NEWEST = "the newest"  # in the menu of jobs
ASKS = "who-waits"  # after the page's address: it asks at once
NONE = "No job yet: daskrun.client.launch, or the command daskrun, starts one."
LOOKS = "Looking at the ranks … It may take 10 s where one does not answer."
AGAIN = "The job has started again meanwhile: ask once more."
OVER = "Since this answer, the job has ended."
CHANGED = "Since this answer, the job's state has changed."
LOST = "The cluster has ended, or cannot be reached. Below is what it said last, and nothing can be chosen any more."

_viewers: "WeakSet[Ranks]" = WeakSet()


class Answer(NamedTuple):
    """To "Who waits?". about: the job's id and attempt, as under another one it would be wrong.

    at: when that was asked. state, states: of the job and of its ranks then. waiting: ranks that wait.
    """

    text: str
    about: tuple[str, int]
    at: float
    state: str
    states: tuple[str, ...]
    waiting: frozenset[int] = frozenset()

    @classmethod
    def now(cls, text: str, name: str, job: JobRecord) -> "Answer":
        """Return an answer about a job as it is now."""
        return cls(text, (name, job.attempt), time.monotonic(), job.state, tuple(rank.state for rank in job.ranks))


class Ranks(DashboardComponent):
    """What one viewer sees. root: the whole page. pane: the chart, and the ranks below it.

    lost: says that both are old. controls: what then has no effect. shown_at: when it was last renewed;
    rest_until: when it next may be.
    """

    def __init__(self, scheduler: Scheduler, **_: Any) -> None:
        self._scheduler, self._record = scheduler, record_of(scheduler)
        self._drawn: tuple = ()  # what the chart shows
        self._answer: Answer | None = None
        self._is_pane = False
        self._default = ""  # the metric that is shown until the viewer chooses another, then ""
        self.rest_until = self.shown_at = 0.0
        _viewers.add(self)
        scheduler.add_plugin(_LastUpdate(), idempotent=True)
        self._asking: asyncio.Task[Answer] | None = None
        self._jobs, self._ranks, self._title = _table_box(150), _table_box(300), _text_box()
        self.lost = Div(text=f"<b>{LOST}</b>", visible=False, stylesheets=[tables.STYLE])
        self._said = PreText(text="", sizing_mode="stretch_width", stylesheets=[tables.SAID])
        self._job = Select(title="Job", options=list[Any]([NEWEST]), value=NEWEST, width=140)
        self._metric = Select(title="Metric", options=[], value="", width=180)
        self._by = Select(title="Against", value="step", width=90)
        self._button = Button(label="Who waits?", align="end", width=100)
        self._button.on_click(self.ask)
        self.controls = [self._job, self._metric, self._by, self._button]
        self._chart = Chart()

    @property
    def root(self) -> LayoutDOM:  # type: ignore[override]
        """The page."""
        controls = row(*self.controls, styles={"flex-wrap": "wrap"})
        self._chart.figure.sizing_mode = "stretch_width"
        below = self.lost, self._jobs, controls, self._said, self._title, self._ranks, self._chart.figure
        return column(*below, sizing_mode="stretch_width")

    @property
    def pane(self) -> LayoutDOM:
        """The pane, which may be 200 pixels high: the title says what the axes are."""
        self._is_pane = True
        self._chart.be_small()
        self._ranks.styles = {"overflow": "auto", "max-height": "45%", "background": tables.SHADOW}
        self._ranks.stylesheets = [tables.STYLE, "table {font-size: 12px} th, td {padding: 0 5px}"]
        return column(self.lost, self._title, self._chart.figure, self._ranks, sizing_mode="stretch_both")

    def update(self) -> None:  # type: ignore[override]
        """Show what is new; less often where that takes long, as with hundreds of ranks."""
        if (begin := time.monotonic()) >= self.rest_until:
            self._update(begin)
            self.shown_at = begin
            self.rest_until = begin + (time.monotonic() - begin) * len(_viewers) / MOST_BUSY

    def _update(self, now: float) -> None:
        jobs = dict(self._record.in_order())
        for model in (self._job, self._button, self._jobs, self._ranks):
            model.visible = bool(jobs)
        if not jobs:
            self._chart.figure.visible = self._metric.visible = self._by.visible = False
            self._title.text = escape(NONE)
            return
        labels: dict[str, str] = {}
        for name in self._record.jobs:  # in this order, or the numbers would change with each new job
            label = f"{jobs[name].name}, {jobs[name].launched:%H:%M:%S}"
            n_before = sum(other.startswith(label) for other in labels.values())
            labels[name] = f"{label} ({n_before + 1})" if n_before else label
        self._job.options = list[Any]([NEWEST, *((name, labels[name]) for name in jobs)])
        if self._job.value not in jobs:
            self._job.value = NEWEST
        name = self._shown_job()
        job = jobs[name]
        silent = {other for other, one in jobs.items() if one.is_silent(now)}
        self._jobs.text = tables.of_jobs(jobs, name, silent)
        self._choose_metric(job)
        self._by.options = list[Any]([("step", job.unit), "seconds"])
        self._chart.figure.visible = self._metric.visible = self._by.visible = bool(job.names)
        ranks = job.table(self._metric.value if job.names else "", now)
        at_work = [other for other, one in jobs.items() if one.ranks and not one.is_over and other != name]
        others = tables.others(len(at_work), len(silent.intersection(at_work)))
        self._title.text = self._titled(job, name in silent, others)
        self._ranks.text = tables.of_ranks(job, ranks, self._metric.value if job.names else "")
        if self._drawn != (drawn := (name, self._record.version, self._metric.value, self._by.value)):
            self._drawn = drawn
            self._chart.draw(job, self._metric.value, self._against(job))
        self._show_answer(name, job)
        self._button.disabled = self._asking is not None

    def _titled(self, job: JobRecord, is_silent: bool, others: str) -> str:
        """Return what stands above the ranks, as HTML. others: what other jobs do, "" for none."""
        restarts = f", restarts {tables.restarts(job)}" if job.attempts > 1 else ""
        title = f"<b>{escape(job.name)}</b>{restarts}: {tables.state(job, is_silent)}"
        if self._is_pane:
            axes = f"; {self._metric.value} against {self._against(job)}" if job.names else ""
            title += escape(axes)
            title += f'; <a href="ranks" target="_blank">{others}</a>' if others else ""
            title += "" if job.is_over else f'. <a href="ranks?{ASKS}" target="_blank">Who waits?</a>'
        if job.error and not job.is_finished and (job.is_over or not self._is_pane):
            before = "before: " if job.error_is_old else ""
            shown = "short" if self._is_pane else "narrow"
            title += f'<div class="{shown}" title="{escape(job.error)}">{before}{escape(job.error)}</div>'
        return title

    def _against(self, job: JobRecord) -> str:
        """Return what is below the chart: "step", "row" or "seconds"."""
        return job.unit if self._by.value == "step" else "seconds"

    def _show_answer(self, name: str, job: JobRecord) -> None:
        """Show who waits, if that was asked, and say so if the ranks have gone on since."""
        if self._asking and self._asking.done():
            self._answer, self._asking = self._asking.result(), None
        answer = self._answer
        self._said.visible = bool(answer and answer.about == (name, job.attempt))
        if answer and self._said.visible:
            self._said.text = answer.text if self._asking else f"{_since(answer, job)}{answer.text}"

    def _shown_job(self) -> str:
        """Return the id of the job that the viewer has chosen, or of the newest."""
        chosen = self._job.value  # which may be kept no longer
        return chosen if chosen in self._record.jobs else self._record.newest()

    def _choose_metric(self, job: JobRecord) -> None:
        if not (names := list(job.names)):
            return
        self._metric.options = list[Any](names)
        # What the viewer has chosen stays while there is such a metric.
        if self._metric.value == self._default or self._metric.value not in names:
            likely = [name for name in ("loss", *names) if name in names and name != "epoch"]
            self._metric.value = self._default = (likely or names)[0]
        else:
            self._default = ""

    def ask(self) -> None:
        """Look who waits for whom in the shown job."""
        if self._record.jobs and not self._asking:
            name = self._shown_job()
            job = self._record.jobs[name]
            self._said.text = LOOKS
            self._answer = Answer.now(LOOKS, name, job)
            self._asking = asyncio.ensure_future(_explained(self._scheduler, self._answer))
            self._button.disabled = self._said.visible = True


class _LastUpdate(SchedulerPlugin):
    """Has a scheduler that closes show first how its jobs have ended, where somebody looks."""

    name = "daskrun-last-update"

    async def before_close(self) -> None:
        begin = time.monotonic()
        for viewer in _viewers:
            viewer.rest_until = 0.0
        while any(viewer.shown_at <= begin for viewer in _viewers) and time.monotonic() < begin + LAST_S:
            await asyncio.sleep(0.05)
        if _viewers:
            await asyncio.sleep(0.2)  # until what they show is sent


async def _explained(scheduler: Scheduler, asked: Answer) -> Answer:
    """Return who waits for whom in a job. It only looks, and raises nothing."""
    (name, attempt), begin = asked.about, datetime.now()
    try:
        record = record_of(scheduler)
        job = record.jobs[name]
        ranks = dict(enumerate(job.ranks))
        at_work = {number: rank.worker for number, rank in ranks.items() if rank.is_at_work or rank.state == "starting"}
        if not at_work:
            return asked._replace(text=f"{_from(begin)}  No rank of this job is at work. Its state: {job.state}.")
        begun = [number for number, rank in ranks.items() if rank.is_at_work]
        ended = [number for number, rank in ranks.items() if rank.state in ("finished", "failed")]
        found, meanwhile = await looks(AttemptId(name, attempt), at_work, begun, scheduler)
        waiting = frozenset(look.rank for look in found if look.waits)
        mute = frozenset(look.rank for look in found if look.is_mute)
        record.waits(name, attempt, waiting, mute, asked.at)
        if job.attempt != attempt:
            return Answer.now(f"{_from(begin)}  {AGAIN}", name, job)
    except Exception as error:  # such as of a job that is no longer kept
        return asked._replace(text=f"The ranks could not be looked at: {error!r}.")
    text = f"{_from(begin)}  {diagnosed(str, explain, found, sorted([*ended, *meanwhile]))}"
    return asked._replace(text=text, waiting=waiting)


def _from(begin: datetime) -> str:
    """Return the time of day at which an answer was begun, and that of its end where it took long."""
    now = datetime.now()
    return f"{begin:%H:%M:%S}" + (f" to {now:%H:%M:%S}" if (now - begin).total_seconds() > 1 else "")


def _since(answer: Answer, job: JobRecord) -> str:
    """Return a line with what has happened since an answer, "" for nothing."""
    if job.state != answer.state:
        return f"{OVER if job.is_over else CHANGED}\n"
    if ranks := job.gone_on(answer.waiting, answer.at):
        return f"Since this answer, {ranks_do(ranks, 'has', 'have')} gone on.\n"
    pairs = enumerate(zip(answer.states, job.ranks, strict=False))
    others = [number for number, (state, rank) in pairs if rank.state != state]
    return f"Since this answer, the state of {ranks_named(others)} has changed.\n" if others else ""


def _text_box() -> Div:
    """Return a box for HTML."""
    return Div(text="", disable_math=True, sizing_mode="stretch_width", stylesheets=[tables.STYLE], margin=(2, 5))


def _table_box(height: int) -> Div:
    """Return a box for a table, which scrolls beyond a height in pixels."""
    box = _text_box()
    box.styles = {"overflow": "auto", "max-height": f"{height}px", "background": tables.SHADOW}
    box.html_attributes = {"tabindex": "0"}
    return box


def ranks_doc(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Make the page's document, for Dask's dashboard."""
    component = Ranks(scheduler)
    _fill(doc, component, component.root)
    if ASKS in doc.session_context.request.arguments:
        component.ask()
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)


def pane_doc(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Make the pane's document."""
    component = Ranks(scheduler)
    _fill(doc, component, component.pane)


def _fill(doc: Any, component: Ranks, root: LayoutDOM) -> None:
    component.update()
    args = {"lost": component.lost, "controls": component.controls}
    for event, is_lost in (("connection_lost", "true"), ("client_reconnected", "false")):  # as the browser sees it
        code = f"lost.visible = {is_lost}; for (const control of controls) control.disabled = {is_lost}"
        doc.js_on_event(event, CustomJS(args=args, code=code))
    with suppress(AttributeError):  # an older bokeh has no words of its own, which would lie over these
        doc.config.notify_connection_status = False
    add_periodic_callback(doc, component, UPDATE_MS)
    doc.on_session_destroyed(lambda _: _viewers.discard(component))
    doc.add_root(root)
    doc.title, doc.theme = "Dask: Ranks", BOKEH_THEME
