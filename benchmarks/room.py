"""How many attendees share a machine: N seats side by side, each a client, a scheduler and one worker of its own.

    python benchmarks/room.py [--seats N ...] [--page]

Each seat is kept on its share of the cores, as a container or `taskset` would keep it; so this needs Linux. When all
are ready, they run two cells of the lessons at the same moment: `classify` over the 960 sketches (notebook 04), and
nine training steps of 32 images (notebook 06). Memory is the proportional share (PSS) of a seat's processes after that.
JupyterLab's server is measured apart, before a notebook is open. The figures go into the page for instructors, too;
--page does only that.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import psutil
from record import RESULTS, result_path, write_result

PAGE = Path(__file__).parents[1] / "docs/instructor/room.md"
BEGIN, END = "<!-- filled by benchmarks/room.py: begin -->\n", "<!-- end -->\n"
CELLS = {"classify": "classify 960 sketches, s", "train": "nine training steps, s"}


@click.command()
@click.option("--seats", multiple=True, type=int, default=(1, 2, 4, 8), show_default=True)
@click.option("--page", "page_only", is_flag=True, help="Rewrite the page from the figures that are there.")
@click.option("--seat", hidden=True)
def main(seats, page_only, seat):
    if seat:
        return sit(list(map(int, seat.split(","))))
    if not page_only:
        rows = [side_by_side(n) for n in seats]
        path = write_result("room", {"seats": rows, "server_mib": server_mib()})
        print(f"written to {path.relative_to(RESULTS.parents[1])}")
    fill(PAGE, newest())


def sit(cores):
    """Be one seat: get ready, run the cells when a line arrives, print their seconds, and leave at the next line."""
    os.sched_setaffinity(0, cores)  # before anything counts the cores
    import daskrun
    from workshop_utils.classify import classify
    from workshop_utils.cluster import start_cluster
    from workshop_utils.photos import HELD_OUT, find_data, list_photos

    with start_cluster(1) as client, client.cluster:
        sketches, dusk = find_data(), find_data(32, HELD_OUT, light="dusk")
        paths = list_photos(sketches.url)
        classify(client, paths[:32], weights=sketches.weights)  # imports and loads, outside the clock
        daskrun.run(client, one_epoch, dusk)
        print("ready", flush=True)
        sys.stdin.readline()
        clock = [time.perf_counter()]
        classify(client, paths, weights=sketches.weights)
        clock.append(time.perf_counter())
        daskrun.run(client, one_epoch, dusk)
        clock.append(time.perf_counter())
        print(json.dumps(dict(zip(CELLS, (clock[1] - clock[0], clock[2] - clock[1]), strict=True))), flush=True)
        sys.stdin.readline()


def one_epoch(source):
    from workshop_utils.train import prepare, train

    model, train_set, _ = prepare(source)
    train(model, train_set, batch_size=32)


def side_by_side(n):
    """Return {seats, seconds of each cell: median and slowest seat, MiB a seat} of n seats at the same moment."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // n)
    shares = [[cores[(i * each + j) % len(cores)] for j in range(each)] for i in range(n)]
    here = Path(__file__)
    running = [
        subprocess.Popen(
            [sys.executable, here, "--seat", ",".join(map(str, share))],
            cwd=here.parent,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for share in shares
    ]
    try:
        for seat in running:
            assert seat.stdout.readline() == "ready\n", "a seat did not start; its error is above"
        for seat in running:
            print(file=seat.stdin, flush=True)
        took = [json.loads(seat.stdout.readline()) for seat in running]
        mib = [pss_mib(seat.pid) for seat in running]
    finally:
        for seat in running:
            seat.communicate()  # closes its stdin, which ends it
    seconds = {
        cell: {"median": statistics.median(one[cell] for one in took), "slowest": max(one[cell] for one in took)}
        for cell in CELLS
    }
    print(f"{n} seats: {seconds}, {statistics.median(mib):.0f} MiB each", flush=True)
    return {
        "seats": n,
        "cores_each": each if n <= len(cores) else len(cores) / n,
        "seconds": seconds,
        "mib": statistics.median(mib),
    }


def pss_mib(pid):
    seat = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in [seat, *seat.children(recursive=True)]) / 2**20


def server_mib():
    """Return the memory of a JupyterLab server that nobody has opened yet, in MiB."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
        env = {**os.environ, "HOME": home}
        server = subprocess.Popen(command, cwd=home, env=env, stderr=subprocess.PIPE, text=True)
        try:
            for line in server.stderr:
                if "token=" in line:
                    return pss_mib(server.pid)
        finally:
            server.terminate()
            server.communicate()


def newest():
    """Return the figures of this machine or of any other, as a dict, or None where nobody has measured."""
    paths = [path for path in (result_path("room"), *sorted(RESULTS.glob("*-room.json"))) if path.exists()]
    return json.loads(paths[0].read_text(encoding="utf-8")) if paths else None


def fill(page, figures):
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(before + BEGIN + block(figures) + END + after, encoding="utf-8")


def block(figures):
    """Return the part of the page that has numbers, as Markdown; without figures, a sentence that says so."""
    if not figures:
        return "\n*Not measured yet: on a quiet machine, run `workshop bench room`, and this becomes a table.*\n\n"
    alone, machine = figures["seats"][0]["seconds"], figures["machine"]
    lines = [
        "",
        f"Measured on {machine['processor']} with {machine['cores']} cores, {machine['date']}:",
        "",
        "| seats at the same moment | " + " | ".join(CELLS.values()) + " | times as long as alone | MiB a seat |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in figures["seats"]:
        seconds = [row["seconds"][cell]["median"] for cell in CELLS]
        lines.append(
            f"| {row['seats']} | {seconds[0]:.1f} | {seconds[1]:.1f} | {slowdown(row, alone):.1f} | {row['mib']:.0f} |"
        )
    lines += ["", f"JupyterLab's server takes {figures['server_mib']:.0f} MiB more."]
    return "\n".join([*lines, "", ""])


def slowdown(row, alone):
    return max(row["seconds"][cell]["median"] / alone[cell]["median"] for cell in CELLS)


if __name__ == "__main__":
    main()
