"""The tables of the page of ranks, as HTML in which what users have written is text, and their styles."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from daskrun.history import JobHistory, Rank
from daskrun.protocol import JobState

COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"  # Okabe and Ito, without yellow
STYLE = """
table {border-collapse: collapse; font: 14px Helvetica, Arial, sans-serif; width: 100%}
th, td {text-align: left; vertical-align: top; padding: 2px 5px; border-bottom: 1px solid #ddd; white-space: nowrap}
th {position: sticky; top: 0; background: #fafafa}
td:last-child {white-space: normal; min-width: 18em}
.error {display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; overflow: hidden}
.late, .failed, .dead {color: #b00020; font-weight: bold}
"""


def of_jobs(jobs: Mapping[str, JobHistory], shown: str) -> str:
    """Return the table of jobs. shown: the id of the one whose ranks are shown."""
    rows = (
        [
            f"<b>{escape(job.name)}</b>" if name == shown else escape(job.name),
            str(len(job.ranks) or ""),
            f"{job.attempt} of {job.attempts - 1}",
            f"{job.launched:%H:%M:%S}",
            f"{state(job)}{error(job)}",
        ]
        for name, job in jobs.items()
    )
    return _table(["job", "ranks", "restarts", "since", "state"], rows)


def of_ranks(job: JobHistory, metric: str, now: float) -> str:
    """Return the table of a job's ranks. metric: the one whose last values are shown, "" for none."""
    several = len({rank.worker.host for rank in job.ranks}) > 1
    names = ["rank", "state", unit(job), "last heard", *[escape(metric)] * bool(metric), "CPU", "memory", "worker"]
    rows = (
        [
            f'<span style="color: {color(number)}" aria-hidden="true">&#9632;</span> {number}',
            f'<span class="{rank.state}">{rank.state}</span>',
            f"{rank.step:.15g}" if rank.n_rows else "",
            _ago(rank, now),
            *[f"{rank.values[metric]:.4g}" if metric in rank.values else ""] * bool(metric),
            f"{rank.cpu:.0%}" if rank.cpu is not None and rank.is_at_work else "",
            f"{rank.memory_bytes / 2**20:.0f} MiB" if rank.memory_bytes is not None and rank.is_at_work else "",
            f'<span title="{escape(rank.worker.address)}">{escape(rank.worker.name or rank.worker.address)}</span>',
            *[escape(rank.worker.host)] * several,
            escape(rank.last_line),
        ]
        for number, rank in enumerate(job.ranks)
    )
    return _table([*names, *["host"] * several, "output"], rows)


def unit(job: JobHistory) -> str:
    """Return what its ranks' steps are: "step", or "row" where none is logged and rows are counted."""
    return "step" if any(rank.logs_steps for rank in job.ranks) else "row"


def state(job: JobHistory) -> str:
    """Return a job's state."""
    is_bad = job.state is JobState.FAILED or any(rank.state in ("dead", "failed") for rank in job.ranks)
    text = f"{job.state} by {job.signal}" if job.state is JobState.STOPPED else str(job.state)
    return f'<span class="failed">{text}</span>' if is_bad else text


def error(job: JobHistory) -> str:
    """Return what stands behind a job's state, "" for nothing."""
    when = ": " if job.state is JobState.FAILED else "; earlier: "
    return f"{when}{escape(job.error)}" if job.error else ""


def color(rank: int) -> str:
    """Return the color of a rank, in its row and in the chart."""
    return COLORS[rank % len(COLORS)]


def _ago(rank: Rank, now: float) -> str:
    if (silent_s := rank.silent_s(now)) is None:
        return ""
    return f'<span class="late">{silent_s:.1f} s</span>' if rank.is_late(now) else f"{silent_s:.1f} s"


def _table(names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in HTML. All names and cells are HTML."""
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
