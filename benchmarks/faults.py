"""What a user is told of each fault of notebook 12, and after how long: by `daskrun.launch`, and by torchrun alone.

    python benchmarks/faults.py [--limit SECONDS]

The same training meets the same fault under both. `after_s` counts from the last step that any rank logged until the
message; what has not come within the limit counts as silence. `daskrun.launch` runs with stall_after=10.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from threading import Thread

import click
import psutil
import torch.distributed as dist
from record import write_result

import daskrun
from workshop_utils import train
from workshop_utils.cluster import start_cluster
from workshop_utils.exercises.gym.case import N_RANKS, make_clean
from workshop_utils.exercises.gym.faults import BY_KIND, Diagnosis, possible_with
from workshop_utils.exercises.gym.run import Plan, train_sketches

STALL_S = 10
MEMORY_LIMIT = "2 GiB"
NOTHING = "nothing: it ends as if all were well"
# The first line in which torchrun, or a rank of it, speaks of a failure.
SPEAKS = re.compile(r"(\w+(Error|NotMet)\b.*|.*(Signal \d+|SIG[A-Z]+|signal: \S+).*)")


def under_dask(client, plan, limit_s):
    """Return (what was told, seconds after the last step that was logged)."""
    settings = {"n_workers": N_RANKS, "backend": "gloo", "wait_for_workers": 60}
    with (
        warnings.catch_warnings(record=True) as warned,
        daskrun.launch(client, train_sketches, plan, **settings, stall_after=STALL_S, time_limit=60 + limit_s) as job,
    ):
        warnings.simplefilter("always")
        told = NOTHING
        while told == NOTHING and not job.done():
            with suppress(Exception):  # told below
                job.result(timeout=0.2)
            stalls = [warning.message for warning in warned if "No rank has logged" in str(warning.message)]
            told = stalls[0] if stalls else NOTHING
        if told == NOTHING:
            try:
                job.result()
            except Exception as error:
                told = error
        said = told if told == NOTHING else f"{type(told).__name__}: {told}".split("\n\n")[0]  # without the stacks
        return said, time.time() - job.metrics()["time"].max()


def under_torchrun(plan, limit_s):
    """Return (what was told, seconds after the last step that was logged)."""
    with tempfile.TemporaryDirectory() as folder:
        rows, lines = Path(folder, "rows"), []
        rows.touch()
        told = [plan.photos, plan.checkpoint, astuple(plan.truth), plan.memory_limit, str(rows)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={N_RANKS}"]
        process = subprocess.Popen(
            [*torchrun, __file__, "--rank-of-torchrun", json.dumps(told)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

        def listen():
            lines.extend((time.time(), line.strip()) for line in process.stdout)

        listener = Thread(target=listen)
        listener.start()
        while process.poll() is None and not (rows.read_text() and time.time() - last(rows) > limit_s):
            time.sleep(0.2)
        silent = process.poll() is None
        if silent:
            torchrun_process = psutil.Process(process.pid)
            for one in (*torchrun_process.children(recursive=True), torchrun_process):
                one.kill()
        listener.join()
        spoken = [(at, found[1]) for at, line in lines if (found := SPEAKS.search(line))]
        if spoken:
            return spoken[0][1], spoken[0][0] - last(rows)
        return (f"nothing within {limit_s} s" if silent else NOTHING), limit_s if silent else time.time() - last(rows)


def last(rows):
    return max(map(float, rows.read_text().split()))


def one_rank(told):
    photos, checkpoint, truth, memory_limit, rows = json.loads(told)
    dist.init_process_group("gloo")

    def note(**_):
        with open(rows, "a") as file:
            file.write(f"{time.time()}\n")

    train.log_metrics = note
    train_sketches(Plan(photos, checkpoint, Diagnosis(*truth), memory_limit))
    dist.destroy_process_group()


@click.command()
@click.option(
    "--limit", "limit_s", default=60, show_default=True, help="Seconds of silence after which a run is ended."
)
@click.option("--only", multiple=True, type=click.Choice(list(BY_KIND)), help="Faults.  [default: all]")
@click.option("--rank-of-torchrun", "told", hidden=True)
def main(limit_s, only, told):
    if told:
        return one_rank(told)
    client, table = start_cluster(N_RANKS, memory_limit=MEMORY_LIMIT), []
    clean = make_clean(client)
    for kind in only or possible_with(clean.memory_limit):
        fault = BY_KIND[kind]
        truth = Diagnosis(kind, fault.ranks[-1], fault.steps[0])
        row = {"kind": fault.kind, "branch": fault.branch, "look": fault.look}
        for launcher, way in (
            ("daskrun.launch", lambda plan: under_dask(client, plan, limit_s)),
            ("torchrun", lambda plan: under_torchrun(plan, limit_s)),
        ):
            said, after_s = way(clean.plan(truth))
            row[launcher] = {"said": said, "after_s": round(after_s, 1)}
            print(f"{fault.kind:24}{launcher:12}{after_s:6.1f} s  {said[:150]}", flush=True)
        table.append(row)
    client.shutdown()
    if not only:
        path = write_result("faults", {"limit_s": limit_s, "stall_after": STALL_S, "table": table})
        print(f"written to {path.relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
