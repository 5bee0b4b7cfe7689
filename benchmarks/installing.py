"""Seconds, GB fetched and GB on the disk of `make setup CPU=0` and of `make setup CPU=1`, each from a new clone.

    python benchmarks/installing.py [--rounds N]

The clone has the last commit of this checkout; caches of pip and uv are empty. What is fetched is what all network
interfaces but loopback receive meanwhile, so let nothing else use the network, whose speed is part of the seconds. A
round fetches about 4 GB: hence three rounds, not five. One GB is 10⁹ bytes.
"""

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import click
import psutil
from record import write_result

ROOT = Path(__file__).parents[1]
WAYS = ("make setup CPU=0", "make setup CPU=1")


@click.command()
@click.option("--rounds", default=3, show_default=True, help="How often each way installs.")
def main(rounds):
    runs, not_run = {way: [] for way in WAYS}, {}
    for number in range(rounds):
        for way in WAYS:
            if way not in not_run:
                try:
                    runs[way].append(install(way.split()))
                except subprocess.CalledProcessError as error:
                    said = [line for line in error.stderr.splitlines() if line.strip() and not line.startswith("make:")]
                    not_run[way] = [str(error), *said][-1]
            click.echo(f"round {number + 1} of {rounds}: {way} {not_run.get(way, 'done')}", err=True)
    lines = [f"{'':18}seconds  GB fetched  GB on the disk"]
    for way in [way for way in runs if way not in not_run]:
        seconds, fetched, disk = (statistics.median(run[name] for run in runs[way]) for name in runs[way][0])
        lines.append(f"{way:18}{seconds:7.0f}{fetched:12.2f}{disk:16.2f}")
    lines += [f"{way:18}did not run: {why}" for way, why in not_run.items()]
    print("\n".join(lines))
    path = write_result("installing", {"rounds": rounds, "runs": runs, "not_run": not_run, "printed": lines})
    print(f"written to {path.relative_to(ROOT)}")


def install(command):
    """Return {seconds, fetched_gb, disk_gb} of `command` in a new clone; raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True, stderr=subprocess.PIPE, text=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make bench`
        env |= {"UV_CACHE_DIR": f"{folder}/uv", "PIP_CACHE_DIR": f"{folder}/pip"}
        before, start = received(), time.perf_counter()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        subprocess.run([*command, "--silent"], cwd=clone, check=True, env=env, text=True, **quiet)
        seconds, fetched = time.perf_counter() - start, received() - before
        disk_kib = int(subprocess.run(["du", "-sk", clone / ".venv"], capture_output=True, text=True).stdout.split()[0])
    return {"seconds": seconds, "fetched_gb": fetched / 1e9, "disk_gb": disk_kib * 1024 / 1e9}


def received():
    counters = psutil.net_io_counters(pernic=True)
    return sum(each.bytes_recv for name, each in counters.items() if not name.startswith("lo"))


if __name__ == "__main__":
    main()
