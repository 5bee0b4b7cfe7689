"""Ranks as processes beside torchrun: the first step, epochs with loader processes, a step, and a death.

    python benchmarks/rank_processes.py [rounds]

In each round the same training, on two ranks, runs under torchrun, under `daskrun` with workers of its own, under
`daskrun` on a running cluster, and as a function of `daskrun.launch` on that cluster, in an order that changes. Then
rank 1 kills itself, under torchrun and under `daskrun`. At the end, a function that does nothing is launched, and cells
run on ranks that stay. Writes results/<device>-rank-processes.json.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from record import write_result

import daskrun

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).with_name("launchers") / "trains_with_loaders.py"
KILL_AT, LAUNCHES, CELLS, TIMEOUT_S = 20, 20, 50, 60


def lines(command, **variables):
    """Return (when the command began, the JSON lines that its ranks printed)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    begin = time.time()
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    said = [line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line]
    return begin, [json.loads(line) for line in said]


def trained(command):
    begin, (figures,) = lines(command)
    return figures | {"first_step_s": figures["first"] - begin}


def recovered(command):
    """Return the seconds from the kill to the next step; None where the job did not go on."""
    try:
        # Without the second one, torchrun doesn't always restart: PyTorch issue 167288.
        _, said = lines(command, KILL_AT=str(KILL_AT), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    except subprocess.TimeoutExpired:
        return None
    killed = [one["killed"] for one in said if "killed" in one]
    again = [one["first"] for one in said if one.get("attempt") == "1"]
    return again[0] - killed[0] if killed and again else None


def launched(client):
    import trains_with_loaders

    begin = time.time()
    figures = daskrun.run(client, trains_with_loaders.train)[0]
    return figures | {"first_step_s": figures["first"] - begin}


def nothing():
    pass


def cells(client):
    """Return the seconds of each cell on two ranks, by what it does."""
    sources = {"that prints nothing": "x = 1", "with a value": "x", "with an all_reduce": "dist.all_reduce(ones)"}
    seconds = {what: [] for what in sources}
    with daskrun.interactive(client) as ranks, redirect_stdout(StringIO()):
        ranks.run("import torch, torch.distributed as dist; ones = torch.ones(1)")
        for _ in range(CELLS):
            for what, source in sources.items():
                begin = time.perf_counter()
                ranks.run(source)
                seconds[what].append(time.perf_counter() - begin)
    return seconds


def main(rounds):
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", 2]
    ours = [BIN / "daskrun", "-n", 2]
    sys.path.insert(0, str(SCRIPT.parent))  # also of the workers, which are started below
    found = {"torchrun": [], "daskrun": [], "daskrun, running cluster": [], "launch": []}
    deaths, launches = {"torchrun": [], "daskrun": []}, []
    with daskrun.start_local(2) as client:
        on_cluster = [*ours, "--scheduler", client.scheduler.address]
        ways = {
            "torchrun": lambda: trained([*torchrun, SCRIPT]),
            "daskrun": lambda: trained([*ours, SCRIPT]),
            "daskrun, running cluster": lambda: trained([*on_cluster, SCRIPT]),
            "launch": lambda: launched(client),
        }
        for way in ways.values():
            way()  # reads files into memory
        for number in range(rounds):
            order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for way in order:
                found[way].append(ways[way]())
            deaths["torchrun"].append(recovered([*torchrun, "--max-restarts", 1, SCRIPT]))
            deaths["daskrun"].append(recovered([*ours, "--max-restarts", 1, SCRIPT]))
        for _ in range(LAUNCHES):
            begin = time.perf_counter()
            daskrun.run(client, nothing)
            launches.append(time.perf_counter() - begin)
        trips = cells(client)
        client.shutdown()

    def median(way, figure):
        return statistics.median(figure(one) for one in found[way])

    figures = {
        "first step, s": lambda one: one["first_step_s"],
        "epoch, s": lambda one: statistics.median(one["epochs_s"]),
        "loader's start, s": lambda one: statistics.median(one["loader_starts_s"]),
        "step, ms": lambda one: one["step_ms"],
    }
    for name, figure in figures.items():
        base = median("torchrun", figure)
        for way in found:
            print(f"{name:18} {way:26} {median(way, figure):8.3f}  {median(way, figure) / base:5.2f} x torchrun")
    for way, seconds in deaths.items():
        there = [one for one in seconds if one is not None]
        middle = f"{statistics.median(there):.2f} s" if there else "-"
        print(f"kill -9 to the next step, {way}: {middle}, recovered {len(there)} of {rounds}")
    print(f"a warm launch: {statistics.median(launches):.2f} s")
    for what, seconds in trips.items():
        print(f"a cell {what}: {statistics.median(seconds) * 1e3:.0f} ms")
    losses = {round(one["loss"], 6) for of in found.values() for one in of}
    print("the losses are the same:", len(losses) == 1)
    print(
        write_result(
            "rank-processes",
            {"rounds": rounds, "runs": found, "deaths_s": deaths, "launches_s": launches, "cells_s": trips},
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
