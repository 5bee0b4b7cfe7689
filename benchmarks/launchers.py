"""Which tool when: one job under torchrun, Accelerate, torchft, Ray Train, Horovod on Dask, and `daskrun` twice.

    python benchmarks/launchers.py [--rounds N] [--kills N] [--only TOOL ...]

Peers: pip install -e '.[peers]', and `make horovod`. The job is in launchers/shared.py: ResNet-18 for 32 x 32 images,
two ranks of one thread each, a checkpoint after each epoch. Each tool has one script beside it, written as its own
documentation advises. A tool counts as run only if the last loss is that of one process without any tool.

Every tool runs once in each round, in a new process; in the first rounds, as many as --kills says, twice more with a
rank killed. Medians over the rounds count. In seconds:
cold    from the user's command until the first step has ended on all ranks, with the start of the tool's own cluster
warm    from the call, on a cluster that has run one job; torchrun, Accelerate and the command daskrun keep none
step    an optimiser step, with the reading of its images, on the slower rank
says    from SIGKILL of rank 1, in the second epoch, until the first line of output that speaks of it
knows   from the same until the user's call raises, or the user's command exits; `by` is what it raises
again   with one restart allowed: from the same until the ranks have done the next step, with a process in its place

Lines are those of the script that are not blank, comment, docstring, or marked as measuring. `left` counts processes
that are there 3 s after the user's own has ended, in the worst of the runs. With --only, nothing is written.
"""

import ast
import importlib.metadata
import importlib.util
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import click
import psutil
from record import write_result

FOLDER = Path(__file__).with_suffix("")
sys.path.insert(0, str(FOLDER))
from shared import EPOCHS, N_RANKS, STEPS_PER_EPOCH, final_loss, first_step, loss_alone, rows_of, step_s  # noqa: E402

TORCHRUN = ["torch.distributed.run", "--standalone", f"--nproc-per-node={N_RANKS}", "--max-restarts={restarts}"]
ACCELERATE = [
    "accelerate.commands.launch",
    "--multi_gpu",
    f"--num_processes={N_RANKS}",
    "--rdzv_backend=c10d",
    "--max_restarts={restarts}",
]
DASKRUN = ["daskrun.command", f"--nproc-per-node={N_RANKS}", "--max-restarts={restarts}"]
TOOLS = {  # name: its script, the package that it needs, how to get that, and its command where it is no library
    "torchrun": ("with_torchrun.py", "torch", "make setup", TORCHRUN),
    "Accelerate": ("with_accelerate.py", "accelerate", "pip install -e '.[peers]'", ACCELERATE),
    "torchft": ("with_torchft.py", "torchft", "pip install -e '.[peers]'", None),
    "Ray Train": ("with_ray.py", "ray", "pip install -e '.[peers]'", None),
    "Horovod on Dask": ("with_horovod.py", "horovod", "make horovod", None),
    "daskrun train.py": ("with_torchrun.py", "daskrun", "make setup", DASKRUN),
    "this on Dask": ("with_workshop.py", "workshop_utils", "make setup", None),
}
MARK = "LAUNCHERS_BENCHMARK"  # an environment variable, by which all that a tool has started is known
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or restarts fail: github.com/pytorch/pytorch/issues/167288
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then listens on loopback, on any system
    "RAY_AUTH_MODE": "token",
}
LIMIT_S = 180  # for one run
LEAVE_S = 3  # for processes to follow the user's own one
TOLERANCE = 1e-3  # of the loss, relative
SECONDS = ("cold_s", "warm_s", "step_s", "says_s", "knows_s", "again_s")
OF_DEATH = re.compile(r"SIGKILL|signal 9|exitcode: -9|died|dead|killed", re.IGNORECASE)


class NotRun(Exception):
    """A tool could not do the job; the message says why."""


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Times that each tool runs undisturbed.")
@click.option("--kills", default=3, show_default=True, help="Rounds with two more runs, in which a rank is killed.")
@click.option("--only", multiple=True, type=click.Choice(list(TOOLS)), help="Tools to run.  [default: all]")
def main(rounds, kills, only):
    names = only or TOOLS
    expected, runs, reasons = loss_alone(), {name: [] for name in names}, {}
    for number in range(rounds):
        for name in [name for name in names if name not in reasons]:
            try:
                runs[name].append(measure(name, expected, kill=number < kills))
            except NotRun as reason:
                reasons[name] = str(reason)
            click.echo(f"round {number + 1} of {rounds}: {name} {reasons.get(name, 'done')}", err=True)
    rows = {name: None if name in reasons else summary(name, runs[name]) for name in names}
    lines = table(rows, reasons)
    print("\n".join(lines))
    if only:
        return
    path = write_result(
        "launchers",
        {
            "ranks": N_RANKS,
            "steps": EPOCHS * STEPS_PER_EPOCH,
            "rounds": rounds,
            "kills": kills,
            "versions": versions(),
            "loss": expected,
            "rows": rows,
            "not_run": reasons,
            "runs": runs,
            "printed": lines,
        },
    )
    print(f"written to {path.relative_to(Path(__file__).parents[1])}")


def measure(name, expected, kill):
    """Return the figures of one round as a flat dict; `expected`: the loss that the job must reach.

    Raises NotRun where the tool is not installed, or does not do this job.
    """
    _, package, cure, command = TOOLS[name]
    if importlib.util.find_spec(package) is None:
        raise NotRun(f"{package} is not installed: {cure}")
    run = observe(name, n_jobs=1 if command else 2)
    if not all(is_close(final_loss(rows), expected) for rows in run.jobs):
        losses = [final_loss(rows) for rows in run.jobs]
        said = [line for _, line in run.output[-1:]]
        raise NotRun(f"its last loss is {losses}, not {expected:.6f}; exit code {run.code}, last words {said}")
    if threads := {row["threads"] for rows in run.jobs for row in rows if "rank" in row} - {1}:
        raise NotRun(f"its ranks compute with {threads} threads instead of 1")
    figures = {"cold_s": first_step(run.jobs[0]) - run.started, "step_s": step_s(run.jobs[-1]), "left": run.left}
    if not command:
        figures["warm_s"] = first_step(run.jobs[1]) - run.jobs[1][0]["time"]  # whose first row is the call
    return figures | (
        death(observe(name, kill=True)) | rebirth(observe(name, kill=True, restarts=1), expected) if kill else {}
    )


def death(run):
    """Return after how many seconds who runs the job reads, and knows, that a rank was killed, and by what."""
    read = [(at - run.killed, line) for at, line in run.output if at > run.killed and OF_DEATH.search(line)]
    said_s, line = read[0] if read else (None, "")
    figures = {"says_s": said_s, "line": line.replace(sys.executable, "python"), "deaths_left": run.left}
    if raised := [row for row in run.jobs[0] if "raised" in row]:
        return figures | {"knows_s": raised[0]["time"] - run.killed, "by": raised[0]["raised"]}
    if run.code is None:
        return figures | {"knows_s": None, "by": f"none in {LIMIT_S} s"}
    return figures | {"knows_s": run.ended - run.killed, "by": f"exit code {run.code}"}


def rebirth(run, expected):
    """Return whether, and when, the job went on after a rank was killed, and whether it came to the same end."""
    before = {row["pid"] for row in run.jobs[0] if row["time"] < run.killed}
    later = [row for row in run.jobs[0] if "rank" in row and row["pid"] not in before]  # survivors may keep theirs
    if 1 not in (renewed := {row["rank"] for row in later}):
        return {"again_s": None, "resumed": "no", "same_loss": "no", "restarts_left": run.left}
    epoch = later[0]["epoch"]
    n_steps = sum(row["epoch"] == epoch for row in later) / len(renewed)
    return {
        "again_s": first_step(later) - run.killed,
        "resumed": "where it was" if n_steps < STEPS_PER_EPOCH else "from checkpoint" if epoch else "from start",
        "same_loss": "yes" if is_close(final_loss(run.jobs[0]), expected) else "no",
        "restarts_left": run.left,
    }


def observe(name, n_jobs=1, kill=False, restarts=0):
    """Run a tool's script once; return what was seen: times, output, exit code, rows of each job, processes left."""
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent, str(number)) for number in range(n_jobs)]
        for folder in folders:
            folder.mkdir()
        mark = secrets.token_hex(16)
        environment = os.environ | SETTINGS | {MARK: mark, "RAY_AUTH_TOKEN": mark, "RAY_TMPDIR": parent}
        run = SimpleNamespace(started=time.time(), killed=None, output=[], code=None)
        process = subprocess.Popen(
            command_of(name, restarts, folders),
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        lines = ((time.time(), line.rstrip()) for line in process.stdout)
        listener = threading.Thread(target=run.output.extend, args=(lines,))
        listener.start()
        try:
            if kill:
                run.killed = kill_rank_1(process, folders[0])
            with suppress(subprocess.TimeoutExpired):
                run.code = process.wait(LIMIT_S)
        finally:
            run.ended = time.time()
            run.left = end_those_left(mark)
            listener.join()
        run.jobs = [rows_of(folder) for folder in folders]
    return run


def command_of(name, restarts, folders):
    script, _, _, command = TOOLS[name]
    script, folders = str(FOLDER / script), [str(folder) for folder in folders]
    if command:
        return [sys.executable, "-m", *(part.format(restarts=restarts) for part in command), script, *folders]
    return [sys.executable, script, str(restarts), *folders]


def kill_rank_1(process, folder):
    """Kill rank 1 once it has done two steps after the first checkpoint; return when. Raises NotRun otherwise."""
    give_up = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < give_up:
        for row in rows_of(folder):
            if row.get("rank") == 1 and (row["epoch"], row["step"]) == (1, 1):
                os.kill(row["pid"], signal.SIGKILL)
                return time.time()
        time.sleep(0.02)
    raise NotRun(f"rank 1 never began the second epoch; exit code {process.poll()}")


def end_those_left(mark):
    """Return the names of the processes with this mark that are still there after LEAVE_S, having ended them."""

    def is_marked(process):
        with suppress(psutil.Error):  # it has gone, or belongs to another user
            return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE

    give_up = time.monotonic() + LEAVE_S
    while (left := list(filter(is_marked, psutil.process_iter()))) and time.monotonic() < give_up:
        time.sleep(0.1)
    names = [process.name() for process in left]
    for process in left:
        process.kill()
    return names


def is_close(loss, expected):
    return loss is not None and abs(loss / expected - 1) <= TOLERANCE


def count_lines(source):
    """Return how many lines of a script its user writes: neither blank, comment, docstring, nor marked as measuring."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Module, ast.FunctionDef))]
    documented = [node.body[0] for node in nodes if ast.get_docstring(node)]
    docstrings = {number for node in documented for number in range(node.lineno, node.end_lineno + 1)}
    lines = [line.strip() for number, line in enumerate(source.splitlines(), start=1) if number not in docstrings]
    return sum(bool(line) and not line.startswith("#") and not line.endswith("# measuring") for line in lines)


def summary(name, runs):
    """Return a tool's row: its script's lines, the medians of seconds, each word that the rounds gave, most left."""
    row = {"lines": count_lines((FOLDER / TOOLS[name][0]).read_text())}
    for key in dict.fromkeys(key for run in runs for key in run if key != "line"):
        values = [run[key] for run in runs if run.get(key) is not None]
        if key.endswith("_s"):
            row[key] = statistics.median(values) if values else None
        elif key.endswith("left"):
            row["left"] = max(row.get("left", 0), *map(len, values))
        else:
            row[key] = ", ".join(dict.fromkeys(values))
    return row


def table(rows, reasons):
    """Return the lines to print: one per tool, also for those that did not run."""
    lines = [
        f"{'':16}lines"
        + "".join(f"{key.removesuffix('_s'):>7}" for key in SECONDS)
        + f"  {'by':17}{'resumed':16}same loss  left"
    ]
    for name, row in rows.items():
        if row is None:
            lines.append(f"{name:16}did not run: {reasons[name]}")
            continue
        seconds = "".join(f"{'-' if row.get(key) is None else format(row[key], '.2f'):>7}" for key in SECONDS)
        lines.append(
            f"{name:16}{row['lines']:5}{seconds}  {row.get('by', '-'):17}{row.get('resumed', '-'):16}"
            f"{row.get('same_loss', '-'):9}{row['left']:6}"
        )
    return lines


def versions():
    """Return the versions of the peers that are installed."""
    installed = filter(importlib.util.find_spec, ("accelerate", "torchft", "ray", "horovod"))
    return {name: importlib.metadata.version(name) for name in installed}


if __name__ == "__main__":
    main()
