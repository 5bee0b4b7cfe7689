"""What grows with the number of photos, of keys and of ranks, and what does not.

    python benchmarks/scale.py [--rounds N] [driver] [listing] [launch]

driver: `classify` and `classify_stream` over generated paths, on two workers whose reading, decoding and model do
nothing, so that what is left is the driver's. Client and scheduler are processes of their own; their memory is
the most that they had, in MiB. The seconds include the workers' share of the same cores, the milliseconds
that a processor worked for client and scheduler do not.
listing: photos (keys) in an object store, found by `list_photos`, by the same without obstore, and by one call of
fsspec, which takes one folder after the other; in a real server, and in one that makes up its listing.
launch: seconds from `daskrun.launch` on warm workers until its function runs on all ranks, and until it has results.
Each round takes every figure of driver and listing once; launch takes its rounds one number of ranks after the other.
Medians of the rounds count. Without a name, all three are measured; else the others' figures stay in the file.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import click
import torch
from distributed import Client, LocalCluster
from distributed.utils import nbytes
from generated_bucket import LOOPBACK, ROOT, generated_bucket
from record import result_path, write_result

import daskrun
from workshop_utils import classify
from workshop_utils.cluster import start_cluster
from workshop_utils.dogs.breeds import BREEDS
from workshop_utils.object_store import BUCKET, local_object_store
from workshop_utils.photos import list_photos
from workshop_utils.predicting import classifier
from workshop_utils.predicting.loaded_model import LoadedModel
from workshop_utils.reading.latency import hold_back_requests
from workshop_utils.reading.s3 import list_folder
from workshop_utils.storage import open_address

BATCH_SIZE = 32
N_PATHS = (10**4, 10**5, 10**6)
DRIVES = ("classify_stream", "classify")
LISTINGS = ("fs.find", "list_photos", "list_photos, s3fs alone")
N_RANKS = (2, 4, 8, 16)
FOLDERS = [breed.folder for breed in BREEDS]
N_REAL = 8 * len(FOLDERS)
STORES = [
    ("seaweedfs", N_REAL, 0, LISTINGS),
    ("seaweedfs", N_REAL, 20, LISTINGS),
    ("generated", 10**5, 20, LISTINGS),
    ("generated", 10**6, 20, LISTINGS[1:]),
]  # keys, ms a request, ways


@click.command()
@click.option("--rounds", default=5, show_default=True, help="How often each figure is taken.")
@click.option("--one", nargs=2, hidden=True)
@click.argument("parts", nargs=-1, type=click.Choice(["driver", "listing", "launch"]))
def main(rounds, one, parts):
    if one:
        way, about = one
        return print(json.dumps((one_drive if way in DRIVES else one_listing)(way, about)))
    path = result_path("scale")
    result = json.loads(path.read_text()) if path.exists() else {}
    result.pop("machine", None)
    for part in parts or MEASURED:
        rows = MEASURED[part](rounds)
        printed = table(rows)
        print("\n".join([part, *printed]), flush=True)
        result[part] = {"rounds": rounds, "rows": rows, "printed": printed}
        write_result("scale", result)
    print(f"written to {path.relative_to(Path(__file__).parents[1])}")


def drive_all(rounds, n_paths=N_PATHS):
    plans = [({"way": way, "paths": n}, partial(drive_in_new_processes, way, n)) for n, way in product(n_paths, DRIVES)]
    return in_turn(rounds, plans)


def drive_in_new_processes(way, n_paths):
    # The scheduler is in this process, the client is not.
    with LocalCluster(n_workers=2, threads_per_worker=1, host=LOOPBACK, dashboard_address=f"{LOOPBACK}:0") as cluster:
        return in_new_process(way, f"{cluster.scheduler_address} {n_paths}")


def list_all(rounds, stores=STORES):
    plans = []
    for store, n_keys, delay_ms, ways in stores:
        for way in ways:
            about = {"store": store, "keys": n_keys, "delay_ms": delay_ms, "way": way}
            plans.append((about, partial(list_store, **about)))
    return in_turn(rounds, plans)


def list_store(store, keys, delay_ms, way):
    with (real_bucket if store == "seaweedfs" else made_up_bucket)(keys, delay_ms / 1000) as endpoint:
        return in_new_process(way, endpoint)


def launch_all(rounds, n_ranks=N_RANKS):
    rows = []
    for n in n_ranks:  # one cluster for all rounds: its start is not measured
        client = start_cluster(n)
        one_launch(client)  # from a notebook's second job on, workers are warm
        rows += in_turn(rounds, [({"ranks": n}, partial(one_launch, client))])
        client.shutdown()
    return rows


def in_turn(rounds, plans):
    """Return a row for each of `plans`: what it is about, the medians, and in `runs` the figures of each round.

    plans: (what the row is about, a function that returns its figures). Each round calls all functions in turn.
    """
    runs = [[] for _ in plans]
    for _ in range(rounds):
        for (_, measure), found in zip(plans, runs, strict=True):
            found.append(measure())
    return [
        about | {name: statistics.median(run[name] for run in found) for name in found[0]} | {"runs": found}
        for (about, _), found in zip(plans, runs, strict=True)
    ]


def in_new_process(way, about):
    command = [sys.executable, __file__, "--one", way, str(about)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


# --- driver


def one_drive(way, about):
    """Return the figures of one run in this process, which is the client."""
    address, n_paths, graphs = *about.split(), []
    n_paths, stem = int(n_paths), f"s3://{BUCKET}/dogs/{FOLDERS[0]}/{FOLDERS[0].partition('-')[0]}"
    paths = (f"{stem}_{number:07}.jpg" for number in range(n_paths))
    with Client(address) as client:
        client.run(do_nothing)
        run_one(client, iter(["a.jpg"] * 100), way)  # imports, outside the clock
        weigh_graphs(client, graphs)
        before, there = work_and_memory(restart=True), client.run_on_scheduler(work_and_memory, restart=True)
        start = time.perf_counter()
        n_rows, held_mib = run_one(client, paths, way)
        seconds = time.perf_counter() - start
        after, there_after = work_and_memory(), client.run_on_scheduler(work_and_memory)
    assert n_rows == n_paths, (n_rows, n_paths)
    n_batches = n_paths / BATCH_SIZE
    return {
        "seconds": seconds,
        "ms_a_batch": 1000 * seconds / n_batches,
        "client_ms": 1000 * (after[0] - before[0]) / n_batches,
        "scheduler_ms": 1000 * (there_after[0] - there[0]) / n_batches,
        "client_before": before[1],
        "client_most": after[1],
        "rows_held": held_mib,
        "scheduler_before": there[1],
        "scheduler_most": there_after[1],
        "tasks": len(graphs),
        "graph_bytes": statistics.mean(graphs),
    }


def run_one(client, paths, way):
    """Return how many rows there were, and the MiB of all that were held at the end."""
    if way == "classify":
        frame = classify.classify(client, paths, batch_size=BATCH_SIZE, weights="sketches")
        return len(frame), frame.memory_usage(deep=True).sum() / 2**20
    return sum(map(len, classify.classify_stream(client, paths, batch_size=BATCH_SIZE, weights="sketches"))), 0


def do_nothing():
    """Have `Classifier`s of this process read, decode and compute nothing."""
    categories = [f"category {number}" for number in range(1000)]
    loaded = LoadedModel(torch.nn.Linear(1, 1), None, categories, truths={}, checksum=0, on_gpu=False)
    classifier.loaded_model = lambda *_: loaded
    classifier.read_files = lambda paths, _: paths
    classifier.load_photos = lambda contents, *_, **__: (torch.zeros(len(contents), 1), [None] * len(contents))
    classifier._forward = lambda _, images: [(0.5, 151)] * len(images)


def weigh_graphs(client, sizes):
    """Note in `sizes` the bytes of each graph that the client sends."""
    send = client._send_to_scheduler

    def weighed(message):
        if message["op"] == "update-graph":
            sizes.append(sum(map(nbytes, message["expr_ser"].frames)))
        send(message)

    client._send_to_scheduler = weighed


def work_and_memory(restart=False):
    """Return the seconds that a processor worked for this process, and the most MiB that it had, since a restart."""
    import time
    from pathlib import Path

    if restart:
        Path("/proc/self/clear_refs").write_text("5")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return time.process_time(), int(status["VmHWM"].split()[0]) / 1024


# --- listing


@contextmanager
def real_bucket(n_keys, delay_s):
    with tempfile.TemporaryDirectory() as parent:
        for folder, number in product(FOLDERS, range(n_keys // len(FOLDERS))):
            photo = Path(parent, ROOT, folder, f"{number}.jpg")
            photo.parent.mkdir(parents=True, exist_ok=True)
            photo.write_bytes(b"none")
        with (
            local_object_store(Path(parent, ROOT)) as options,
            hold_back_requests(options["client_kwargs"]["endpoint_url"], delay_s) as endpoint,
        ):
            yield endpoint


def made_up_bucket(n_keys, delay_s):
    return generated_bucket(FOLDERS, n_keys, delay_s)


def one_listing(way, endpoint):
    url, options = f"s3://{BUCKET}/{ROOT}".rstrip("/"), {"anon": True, "client_kwargs": {"endpoint_url": endpoint}}
    if way.endswith("s3fs alone"):
        sys.modules["obstore"] = None
    fs, root = open_address(url, options)
    fs.connect()
    list_folder(fs, root)  # imports and connects, outside the clock
    work, before = work_and_memory(restart=True)
    start = time.perf_counter()
    paths = sorted(fs.find(root, maxdepth=2)) if way == "fs.find" else list_photos(url, storage_options=options)
    seconds = time.perf_counter() - start
    worked, most = work_and_memory()
    return {
        "found": len(paths),
        "seconds": seconds,
        "client_s": worked - work,
        "client_before": before,
        "client_most": most,
    }


# --- launch


def one_launch(client):
    start = time.time()
    runs_at = max(daskrun.run(client, time.time))
    return {"runs_s": runs_at - start, "results_s": time.time() - start}


# --- table


def table(rows):
    """Return the lines to print of rows that have the same names, without `runs`; numbers to three digits."""
    rows = [{name: value for name, value in row.items() if name != "runs"} for row in rows]

    def short(value):
        if isinstance(value, str):
            return value
        return f"{value:.{0 if value >= 100 or value == int(value) else 3}f}"

    cells = [list(rows[0]), *[[short(value) for value in row.values()] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


MEASURED = {"driver": drive_all, "listing": list_all, "launch": launch_all}

if __name__ == "__main__":
    main()
