"""One table: what this project promises, its figures beside those of its peers, the goals, and whether they are met.

    python benchmarks/table.py [--run]

--run first makes each benchmark of the table, one after the other, each in a process of its own; the table names one
that fails, and the others go on. (installing.py fetches about 12 GB.) The table is read from
results/<device>-<name>.json; after --run it is written there, too, as `table`. Ratios are those of each round; their
median counts, and the least and the most are in brackets.
"""

import json
import math
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
from record import RESULTS, device, versions, write_result

HERE = Path(__file__).parent
PACKAGES_OF_PEERS = [
    "dask-pytorch-ddp",
    "boto3",
    "s3fs",
    "obstore",
    "accelerate",
    "torchft",
    "ray",
    "daft",
    "horovod",
    "joblib",
]


@dataclass(frozen=True)
class Peer:
    """Whom we compare with, where a result has its figures of each round, and the ratio that is our goal."""

    name: str
    figures: Callable[[dict], list]
    goal: float | None = None


@dataclass(frozen=True)
class Task:
    """What is measured, the result that has it, and where that has our figures of each round."""

    what: str
    result: str  # results/<device>-<result>.json, which <result>.py writes
    figures: Callable[[dict], list]
    peers: list[Peer] = field(default_factory=list)
    unit: str = "s"  # with "photos/s", ratios are times as fast, and goals are at least; else as long, and at most
    goal: float | None = None  # in `unit`, where there is no peer


# --- where a result has the figures of each round: functions that return functions of a result


def contestant(start, *path, part="seconds"):
    """Find the seconds of the contestant whose name starts so; of several, of the one with the least median."""

    def find(result):
        found = [seconds for name, seconds in inside(result, part, *path).items() if name.startswith(start)]
        return min(found, key=statistics.median, default=[])

    return find


def tool(name, figure):
    """Find a figure in the runs of a tool; None for a round without it, such as one without a kill."""
    return lambda result: [run.get(figure) for run in inside(result, "runs").get(name, [])]


def restart(name):
    """Find the seconds from a kill to the next step; for ever where the job did not come to the same loss."""

    def seconds(run):
        if "restarts_left" not in run:
            return None  # a round without a kill
        return run["again_s"] if run["same_loss"] == "yes" else math.inf

    return lambda result: [seconds(run) for run in inside(result, "runs").get(name, [])]


def row_of(part, *figures, **where):
    """Find the sum of figures in the runs of that row of a part of scale which has the values in `where`."""

    def find(result):
        rows = [row for row in inside(result, part).get("rows", []) if where.items() <= row.items()]
        return [sum(run[figure] for figure in figures) for row in rows for run in row.get("runs", [row])]

    return find


def inside(result, *path):
    for name in path:
        result = result.get(name, {})
    return result


def minutes_of_cells(_):
    """Return how many minutes the cells of all notebooks run, as tools/render.py wrote into the notebooks."""
    stored = [path.read_text(encoding="utf-8") for path in (HERE.parent / "notebook_output").glob("[0-9]*.ipynb")]
    times = [match.groups() for text in stored for match in re.finditer(r"its cells run for ([\d.]+) (sec|min)", text)]
    return [sum(float(n) / (60 if unit == "sec" else 1) for n, unit in times)]


def driver(paths):
    return row_of("driver", "client_ms", "scheduler_ms", way="classify_stream", paths=paths)


# --- the table

NEAR, FAR = "0 ms, 0 children", "20 ms, 0 children"  # delay of each request to the storage, children of the DataLoader
DECIDES = 0.8  # the share of rounds that has to be on one side of a goal
TOOLS = ("torchrun", "Accelerate", "torchft", "Ray Train", "Horovod on Dask")
OURS, SCRIPT = "this on Dask", "daskrun train.py"
TABLE = [
    Task(
        "classify photos, ResNet-50",
        "inference",
        contestant("classify"),
        [
            Peer("upstream's recipe", contestant("upstream"), 4),
            Peer("best DataLoader loop", contestant("DataLoader"), 1.15),
            Peer("bound of these cores", contestant("bound"), 0.9),
        ],
        "photos/s",
    ),
    *(
        Task(
            f"classify photos in {precision}",
            "inference",
            contestant(f"classify, {precision}"),
            [
                Peer("Ray Data", contestant(f"Ray Data, {precision}, eager"), goal),
                Peer("Daft", contestant(f"Daft, {precision}, eager"), goal),
                Peer("Ray Data with OpenVINO", contestant(f"Ray Data, {precision}, openvino")),
                Peer("Daft with OpenVINO", contestant(f"Daft, {precision}, openvino")),
                Peer("bound of these cores", contestant(f"bound, {precision}"), 0.9),
            ],
            "photos/s",
        )
        for precision, goal in (("fp32", 1.25), ("bf16", 1.6))
    ),
    *(
        Task(
            f"read bytes from S3, {latency}",
            "storage",
            contestant("read_files", latency, part="reading"),
            [
                Peer("s3fs, concurrent", contestant("s3fs concurrent", latency, part="reading"), 4),
                Peer("s3fs, tuned", contestant("s3fs tuned", latency, part="reading")),
                Peer("s3fs, one by one", contestant("s3fs one by one", latency, part="reading")),
            ],
            "photos/s",
        )
        for latency in ("0 ms", "20 ms")
    ),
    *(
        Task(
            f"photos from S3 as tensors, {at.partition(',')[0]}",
            "storage",
            contestant("ImageFolder", at),
            [Peer("S3ImageFolder", contestant("S3ImageFolder", at), 20 if at == NEAR else None)],
            "photos/s",
        )
        for at in (NEAR, FAR)
    ),
    Task("list a million keys in S3", "scale", row_of("listing", "seconds", keys=10**6, way="list_photos"), goal=15),
    Task("DDP, a step of 16 images", "ddp", tool("dask", "step"), [Peer("torchrun", tool("torchrun", "step"), 1.02)]),
    Task(
        "DDP, warm launch until it runs",
        "ddp",
        tool("dask", "function runs"),
        [Peer("torchrun", tool("torchrun", "function runs"), 1 / 50)],
    ),
    Task(
        "DDP, cold start to first step", "launchers", tool(OURS, "cold_s"), [Peer(t, tool(t, "cold_s")) for t in TOOLS]
    ),
    Task(
        "DDP, from a kill to the next step",
        "launchers",
        restart(OURS),
        [Peer(t, restart(t), 1) for t in TOOLS],
    ),
    Task(
        "many models",
        "many_models",
        contestant("Dask"),
        [Peer(t, contestant(t)) for t in ("sequential", "joblib", "Ray Tune")],
    ),
    Task("driver, a batch of 10⁶ paths", "scale", driver(10**6), [Peer("a batch of 10⁴ paths", driver(10**4))], "ms"),
    *(
        Task(way + of, "installing", tool(way, figure), unit=unit)
        for way in ("make setup CPU=0", "make setup CPU=1")
        for of, figure, unit in (
            ("", "seconds", "s"),
            (", fetched", "fetched_gb", "GB"),
            (", on the disk", "disk_gb", "GB"),
        )
    ),
    Task("cells of all notebooks", "", minutes_of_cells, unit="min"),
]
RESULTS_READ = list(dict.fromkeys(task.result for task in TABLE if task.result))


# --- from results to lines


@click.command()
@click.option("--run", is_flag=True, help="Make the benchmarks first; this takes hours, and fetches 12 GB.")
def main(run):
    failed = run_all(RESULTS_READ) if run else {}
    results = {name: result for name, result in stored(device()).items() if name not in failed}
    lines = judge_all(results, failed)
    printed = [*as_text(lines), "", *sources(results)]
    print("\n".join(printed))
    if run:
        peers = versions(PACKAGES_OF_PEERS)
        path = write_result("table", {"peers": peers, "failed": failed, "rows": lines, "printed": printed})
        print(f"written to {path.relative_to(HERE.parent)}")


def run_all(names, folder=HERE):
    """Run the benchmarks one after the other; return {name: why it failed}. Ends the one that runs if it is ended."""
    failed = {}
    for name in names:
        script = folder / f"{name}.py"
        if not script.exists():
            failed[name] = f"there is no {name}.py"
            continue
        print(f"--- {name}", flush=True)
        said = deque(maxlen=100)
        process = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True)
        threading.Thread(target=pass_on, args=(process.stderr, said), daemon=True).start()
        try:
            code = process.wait()
        finally:
            process.terminate()
            process.wait()
        if code:
            time.sleep(0.2)  # for its last words
            failed[name] = reason(said) or f"exit code {code}"
    return failed


def pass_on(stream, said):
    for line in stream:
        sys.stderr.write(line)
        said.append(line.strip())


def reason(said):
    """Return the last line that names an error, else the last line.

    >>> reason(["Traceback", "ValueError: no weights", "sys:1: ResourceWarning: unclosed"])
    'ValueError: no weights'
    """
    errors = [line for line in said if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return next(reversed(errors or [line for line in said if line]), None)


def stored(of_device, folder=RESULTS):
    """Return {name: result} of a device such as cpu2."""
    paths = folder.glob(f"{of_device}-*.json")
    results = {}
    for path in paths:
        try:
            results[path.stem.removeprefix(f"{of_device}-").replace("-", "_")] = json.loads(path.read_text())
        except ValueError as error:
            again = f"take it from git (git checkout {path.name}), or measure it again"
            raise click.ClickException(f"{path} is no JSON ({error}): {again}.") from error
    return results


def sources(results):
    """Return a line for each result that the table reads: when it was measured, on what, and at which commit."""
    lines = []
    for name in [name for name in RESULTS_READ if name in results]:
        of = results[name]["machine"]
        bf16, commit = "with" if of["avx512_bf16"] else "without", of.get("commit") or "unknown"
        lines.append(f"{name}: {of['date']}, {of['processor']}, {bf16} AVX512-BF16, commit {commit[:12]}")
    return lines


def judge_all(results, failed=None):
    """Return the lines of the table, a dict for each task and peer. failed: {result: why there is none}."""
    failed = failed or {}
    lines = []
    for task in TABLE:
        result = results.get(task.result, {})
        lines += [judge(task, peer, result, failed.get(task.result)) for peer in task.peers or [None]]
    return lines


def judge(task, peer, result, failure=None):
    """Return a line: medians in the task's unit, what was reached, with its spread, the goal, and whether it is met.

    peer: None for a task without any. Reached is the ratio to the peer, or without one our own figure. failure: why
    the benchmark failed; a single contestant's reason is in the result's `not_run`.
    """
    fast, goal = task.unit == "photos/s", peer.goal if peer else task.goal
    ours, theirs = task.figures(result), peer.figures(result) if peer else []
    line = {"what": task.what, "result": task.result, "unit": task.unit, "ours": middle(ours, task.unit, result)}
    line |= {"peer": peer.name if peer else "", "theirs": middle(theirs, task.unit, result)}
    line |= {"goal": f"{'≥' if fast else '≤'} {goal:g} {'×' if peer else task.unit}" if goal else "", "met": ""}
    why = failure or why_not_run(peer.name if peer else task.what, result)
    values = [] if why else ratios(ours, theirs, fast) if peer else ours
    if not values:
        return line | {"met": f"not measured: {why}" if why else "not measured"}
    reached = statistics.median(values)
    if goal:
        share = sum(value >= goal if fast else value <= goal for value in values) / len(values)
        line["met"] = "met" if share >= DECIDES else "missed" if 1 - share >= DECIDES else "within noise"
    return line | {"reached": reached, "least": min(values), "most": max(values), "rounds": len(values)}


def why_not_run(name, result):
    """Return the reason in `not_run` of a contestant that is called so; or None. A comma begins what may be missing.

    >>> why_not_run("Ray Data", {"not_run": {"Ray Data, two actors": "no ray"}})
    'no ray'
    >>> why_not_run("make setup CPU=0", {"not_run": {"make setup CPU=1": "no network"}})
    """
    for other, why in result.get("not_run", {}).items():
        if f"{other},".startswith(f"{name},") or f"{name},".startswith(f"{other},"):
            return why
    return None


def ratios(ours, theirs, fast):
    """Return, from the seconds of each round, how many times as fast we are; or how many times as long we take.

    >>> ratios([2.0, 4.0], [8.0, 8.0], fast=True), ratios([2.0, None], [8.0, 8.0], fast=False)
    ([4.0, 2.0], [0.25])
    """
    rounds = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    rounds = [(a, b) for a, b in rounds if not a == b == math.inf]
    return [b / a if fast else a / b for a, b in rounds]


def middle(values, unit, result):
    """Return the median of what is there, in `unit`; None for nothing."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return result["photos"] / statistics.median(present) if unit == "photos/s" else statistics.median(present)


# --- from lines to text

HEAD = ("what", "ours", "peer", "peer's", "ratio", "rounds", "goal", "")


def cells(lines):
    """Return the cells of each line as text. What a task shares with the line above is left out."""
    above, rows = "", []
    for line in lines:
        what = line["what"] if line["what"] != above else ""
        ours = f"{digits(line['ours'])} {line['unit']}" if what and line["ours"] is not None else ""
        kind = "fast" if line["unit"] == "photos/s" else "long"
        ratio = ""
        if line["peer"] and "reached" in line:
            ratio = f"{two_digits(line['reached'])} × as {kind}{spread(line, two_digits)}"
        ours += "" if line["peer"] else spread(line, digits)
        rounds = str(line.get("rounds", ""))
        rows.append((what, ours, line["peer"], digits(line["theirs"]), ratio, rounds, line["goal"], line["met"]))
        above = line["what"]
    return rows


def spread(line, text_of):
    return f" ({text_of(line['least'])}–{text_of(line['most'])})" if line.get("rounds", 0) > 1 else ""


def two_digits(value):
    """Return a ratio with two digits, or more before the point.

    >>> [two_digits(value) for value in (0.00497, 0.985, 1.0, 12.4, math.inf)]
    ['0.0050', '0.98', '1.0', '12', 'never']
    """
    if math.isinf(value):
        return "never"
    return f"{value:.0f}" if value >= 9.95 else f"{value:#.2g}"


def digits(value):
    """Return a number with three digits, or more before the point; nothing for None.

    >>> [digits(value) for value in (0.00452, 0.961, 1.2, 77.7, 512.87, 3915.2, math.inf, None)]
    ['0.00452', '0.961', '1.20', '77.7', '513', '3,915', 'never', '']
    """
    if value is None:
        return ""
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def as_text(lines):
    """Return the table's lines as they are printed."""
    rows = [HEAD, *cells(lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    main()
