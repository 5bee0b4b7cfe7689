"""The tables of the page of ranks, as HTML in which what users have written is text, and their styles."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from math import isfinite

from daskrun.progress import Line
from daskrun.record import JobRecord

COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"  # Okabe and Ito, without yellow
SILENT = '<span class="late">, and no rank logs anything</span>'
AGO = "Since its last row, or since it began where no rank has logged any."
BAR = "The bar: its share of the {}s of the rank that is first."
STYLE = """
table {border-collapse: collapse; font: 14px Helvetica, Arial, sans-serif; width: 100%}
th, td {text-align: left; vertical-align: top; padding: 2px 5px; border-bottom: 1px solid #ddd; white-space: nowrap}
th {position: sticky; top: 0; background: #fafafa}
td:last-child {white-space: normal}
.text {min-width: 18em}
.bar {min-width: 36px}
.short {display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; overflow: hidden}
@media (min-width: 700px) {.narrow {display: none}}
.late, .failed, .dead, .does-not-wait, .does-not-answer {color: #b00020; font-weight: bold}
"""
SHADOWS = [  # until the end of what is wider, or longer, than its box is reached
    f"linear-gradient(to {away}, #fafafa 60%, transparent) {end} / {covers} no-repeat local, "
    f"linear-gradient(to {away}, #bbb, transparent) {end} / {darkens} no-repeat scroll"
    for away, end, covers, darkens in (
        ("left", "right", "3rem 100%", "1rem 100%"),
        ("top", "bottom", "100% 3rem", "100% 1rem"),
    )
]
SHADOW = f"{', '.join(SHADOWS)}, #fafafa"
# Of the answer of "Who waits?": the chart stays in sight.
SAID = f"""
pre {{white-space: pre-wrap; overflow-wrap: anywhere; max-height: 15lh; overflow: auto;
background: {SHADOWS[1]}, #fafafa}}
"""


def of_jobs(jobs: Mapping[str, JobRecord], shown: str, silent: Collection[str]) -> str:
    """Return the table of jobs. shown: the one whose ranks are shown. silent: those whose ranks are all silent."""
    names = ["job", "ranks", "restarts", "since", "state"]
    rows = (
        [
            f"<b>{escape(job.name)}</b>" if name == shown else escape(job.name),
            str(len(job.ranks) or ""),
            restarts(job),
            f"{job.launched:%H:%M:%S}",
            _state_and_error(job, name in silent),
        ]
        for name, job in jobs.items()
    )
    return _table(names, rows)


def of_ranks(job: JobRecord, lines: list[Line], metric: str) -> str:
    """Return the table of a job's ranks. metric: the one that `lines` hold, "" for none."""
    several = len({line.worker.host for line in lines}) > 1
    names = ["rank", "state", job.unit, "ago", *[metric] * bool(metric), "CPU", "memory", "worker"]
    names += ["host"] * several + ["output"] * job.has_output
    rows = []
    for number, line in enumerate(lines):
        ago = "" if line.ago_s is None else f"{line.ago_s:.1f} s"
        if ago and line.step is None and not line.printed:  # since it began
            ago = f"no row for {ago}"
        value = "" if line.value is None else f"{line.value:.4g}"
        if line.value is not None and not isfinite(line.value):
            value = f'<span class="failed">{value}</span>'
        filled = f"background: linear-gradient(90deg, #a6cee3 {line.share:.0%}, transparent {line.share:.0%})"
        name = line.worker.name or line.worker.address
        step = "" if line.step is None else f"{line.step:.15g}"
        rows.append(
            [
                f'<span style="color: {colour(number)}" aria-hidden="true">&#9632;</span> {number}',
                f'<span class="{line.state.replace(" ", "-")}">{line.state}</span>',
                f'<div class="bar" style="{filled}">{step}</div>',
                f'<span class="late">{ago}</span>' if line.is_late else ago,
                *[value] * bool(metric),
                "" if line.cpu is None else f"{line.cpu:.0%}",
                "" if line.memory_bytes is None else f"{line.memory_bytes / 2**20:.0f} MiB",
                f'<span title="{escape(line.worker.address)}">{escape(name)}</span>',
                *[escape(line.worker.host)] * several,
                *[f'<div class="text">{escape(line.printed)}</div>'] * job.has_output,
            ]
        )
    heads = [escape(name) for name in names]
    for place, about in ((2, BAR.format(job.unit)), (3, AGO)):
        heads[place] = f'<span title="{about}">{heads[place]}</span>'
    return _table(heads, rows)


def restarts(job: JobRecord) -> str:
    """Return how often a job has started again, and how often it may."""
    return f"{job.attempt} of {job.attempts - 1}"


def others(n_at_work: int, n_silent: int) -> str:
    """Return what other jobs do than the one that is shown."""
    if n_silent:
        return f'<span class="late">{"1 other job is" if n_silent == 1 else f"{n_silent} other jobs are"} silent</span>'
    return ("1 other job runs" if n_at_work == 1 else f"{n_at_work} other jobs run") if n_at_work else ""


def colour(rank: int) -> str:
    """Return the colour of a rank, in its row and in the chart."""
    return COLOURS[rank % len(COLOURS)]


def state(job: JobRecord, is_silent: bool) -> str:
    """Return a job's state. is_silent: whether all its ranks are."""
    has_lost = job.state == "failed" or job.doing != job.state  # one or more ranks
    name = f'<span class="failed">{escape(job.doing)}</span>' if has_lost else escape(job.doing)
    return f"{name}{SILENT if is_silent else ''}"


def _state_and_error(job: JobRecord, is_silent: bool) -> str:
    if not job.error:
        return state(job, is_silent)
    before = "; before: " if job.error_is_old else ": "
    return f'<div class="text">{state(job, is_silent)}{before}{escape(job.error)}</div>'


def _table(names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in HTML. All names and cells are HTML."""
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
