"""Writes the figures of README.md and docs/figures.md from benchmarks/results: what stands between their markers.

    python benchmarks/figures.py

A part begins with `<!-- figures: NAME -->` and ends with `<!-- end of figures -->`. NAME is a function below; it takes
{name: result} and returns Markdown. The words around the parts are written by hand: read them again after a new run.
"""

import re
import statistics
from pathlib import Path

import click
from table import NEAR, OURS, SCRIPT, cells, contestant, judge_all, ratios, stored

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/figures.md", "daskrun/README.md")
DEVICE, GPU = "cpu2", "h100-80gb-hbm3"
HYPHEN = "\u2011"  # at which no line ends
STOPPED = re.compile(r"(\d+) of (\d+) cells were stopped; each ran afterwards")
PART = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


@click.command()
def main():
    results = stored(DEVICE)
    for page in (ROOT / name for name in PAGES):
        text = page.read_text(encoding="utf-8")
        new = filled(text, results)
        page.write_text(new, encoding="utf-8")
        click.echo(f"{page.relative_to(ROOT)}: {'as it was' if new == text else 'rewritten'}")


def filled(text, results):
    """Return a page with each part written from `results`."""
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]](results)}\n\n{part[3]}", text)


def machines(results):
    """Say which results were measured on what, with which versions, and when."""
    groups = {}
    for name in MEASURED:
        of = results[name]["machine"]
        where = f"{on(of)}, {'with' if of['avx512_bf16'] else 'without'} AVX512-BF16"
        where += f", under Python {of['python']}, PyTorch {of['torch']} and Dask {of['dask']}"
        groups.setdefault(where, {}).setdefault(of["date"], []).append(f"`{name}`")
    lines = []
    for where, days in groups.items():
        days = {date.replace("-", HYPHEN): names for date, names in sorted(days.items())}
        when = "; ".join(f"{', '.join(names)} on {date}" for date, names in days.items())
        lines.append(f"- {where}: {when}")
    beside = {f"{name} {version}" for of in results.values() for name, version in peers_of(of).items() if version}
    lines.append(f"- Measured beside ours: {', '.join(sorted(beside, key=str.lower))}")
    return "\n".join(lines)


def peers_of(result):
    """Return {name: version} of what a benchmark compares with, under either of its names."""
    return result.get("versions", result.get("peers", {}))


def on(machine):
    return f"{machine['cores']} cores of {machine['processor']}"


GOALS = {  # the heading of each result's goals
    "inference": "Goals of classifying",
    "storage": "Goals of storage",
    "ddp": "Goals of DDP",
    "launchers": "Goals of DDP",
    "many_models": "Many models beside their peers",
    "scale": "Goals of what grows",
    "installing": "What an installation takes",
}


def goals(results):
    """Return `workshop bench --table` of what was measured, in parts; a peer's line says why it was not."""
    lines = [line for line in judge_all(results) if line["result"] in results and (line["ours"] or line["peer"])]
    head = ("what", "ours", "peer", "peer's", "ratio", "rounds", "goal", "reached")
    tables, reasons = {}, {}
    for line, (*row, goal, reached) in zip(lines, cells(lines), strict=True):
        reached, _, reason = reached.partition(": ")
        if reason:
            reasons.setdefault(reason, row[2] or row[0])  # the first that has it names it
        rows = tables.setdefault(GOALS[line["result"]], [])
        rows.append((*row, goal.replace(" ", "\u00a0"), reached))  # a goal stays on one line
    shown = [f"### {of}\n\n{without_empty_columns(head, rows, right=(1, 3, 4, 5, 6))}" for of, rows in tables.items()]
    return "\n\n".join(shown + [f"Not measured, {name}: {reason}" for reason, name in reasons.items()])


def classifying(results):
    found = results["inference"]
    recipe = contestant("upstream")(found)
    names = {
        "upstream, fp32": "upstream's recipe in fp32: a task per photo, the model loaded per batch",
        "DataLoader, fp32": "`DataLoader` loop in fp32",
        "DataLoader, bf16": "`DataLoader` loop in bf16",
        "bound, fp32": "bound in fp32, if the cores did nothing but decode and forward passes",
        "bound, bf16": "bound in bf16",
    }
    measured = {}
    for way, seconds in found["seconds"].items():
        name = names.get(way, way.replace("openvino", "OpenVINO"))
        measured[f"**{name}**" if way.startswith("classify") else name] = seconds
    most = max(rate(found, seconds) for seconds in measured.values())
    rows = []
    for way, seconds in measured.items():
        figures = [f"{rate(found, seconds):.1f}", f"{times(seconds, recipe):.2f}"]
        figures = [f"**{figure}**" if "*" in way else figure for figure in figures]
        rows.append([way, *figures, bar(rate(found, seconds) / most)])
    weights = "ImageNet weights" if found["real_weights"] else "random weights, which cost the same time"
    about = f"{found['photos']} JPEGs of 500×375, ResNet-50 with {weights}; medians of {found['rounds']} rounds, "
    about += f"on {on(found['machine'])}."
    return f"{about}\n\n{markdown(('way', 'photos/s', '× upstream, by round', ''), rows, right=(1, 2))}"


def starting(results):
    found = results["ddp"]
    rows = []
    for what, name in (
        (f"a step of {found['batch_size']} images a rank", "step"),
        ("from the launch until the function runs", "function runs"),
        ("until the first step is done", "first step done"),
    ):
        here, there = ([run[name] for run in found["runs"][tool]] for tool in ("dask", "torchrun"))
        ratio = statistics.median(ratios(here, there, fast=False))
        rows.append([what, f"{statistics.median(there):.2f}", f"{statistics.median(here):.2f}", f"{ratio:.3f}"])
    about = f"{found['ranks']} ranks, ResNet-18, medians of {len(found['runs']['dask'])} rounds, in seconds, "
    about += f"on {on(found['machine'])}."
    return f"{about}\n\n{markdown(('what', 'torchrun', '`daskrun.launch`', 'ratio'), rows)}"


TOLD = {  # what a user reads of a fault, in short
    "collective on one rank": "which rank calls which collective, and in which line",
    "collectives swapped": "the same",
    "uneven batches": "the same",
    "stalled read": "who waits, who has not called, and in which line that is",
    "GIL held": "which process does not answer, and in which line it is",
    "process stopped": "which process is stopped, and how it goes on",
    "memory leak": "which rank died, with its memory and its limit",
    "reader killed": "the DataLoader's error, and the rank",
}
SHOWN = {  # what shows a fault of which nobody is told
    "slow": "`load_s`, `compute_s` and `comm_s` of each rank",
    "weights drift": "weights of each rank, or `check_every`",
    "same images": "checksums of each rank's images",
    "bad resume": "the length of the moments, next to a clean run's",
    "bad gradient": "gradients of each rank, before the all-reduce",
}


def told(results):
    found, rows = results["faults"], []
    for row in found["table"]:
        kind = row["kind"]
        answers = [
            "nothing" if one["said"].startswith("nothing") else f"{one['after_s']:.0f} s: {TOLD[kind]}"
            for one in (row["daskrun.launch"], row["torchrun"])
        ]
        shows = "the message" if answers[0] != "nothing" else SHOWN.get(kind) or SHOWN[row["branch"]]
        rows.append([kind, *answers, shows])
    about = (
        f"One run each, on {on(found['machine'])}; "
        f'under `daskrun.launch` with `stall_after={found["stall_after"]}`. "nothing" under torchrun '
        f"means for {found['limit_s']} seconds, or until the job had ended as if all were well."
    )
    head = ("fault", "under `daskrun.launch`", "under torchrun", "what shows it")
    return f"{about}\n\n{markdown(head, rows, right=())}"


def broken(results):
    """Return what tests/faults found; the stop button of all notebooks is one row."""
    rows, stops = [], []
    for fault, row in results["robustness"].items():
        if stopped := STOPPED.fullmatch(row["outcome"]):
            stops.append((*map(int, stopped.groups()), row["date"]))
        else:
            rows.append([fault, row["outcome"], row["date"]])
    if stops:
        n_stopped, n_cells = (sum(stop[place] for stop in stops) for place in (0, 1))
        outcome = f"{n_stopped} of {n_cells} cells were still at work, and were stopped; each ran afterwards"
        what = f"the stop button, pressed in each cell of {len(stops)} notebooks"
        rows.append([what, outcome, max(stop[2] for stop in stops)])
    return markdown(("what was done", "what came of it", "last run"), rows, right=())


def reading(results):
    found, rows = results["storage"], []
    names = list(next(iter(found["seconds"].values())))
    for condition, seconds in found["seconds"].items():
        ratio = times(contestant("ImageFolder", condition)(found), seconds["S3ImageFolder"])
        where = condition.replace(" 0 children", " no children")
        rows.append([where, *(f"{rate(found, seconds[name]):.1f}" for name in names), f"{ratio:.1f}"])
    about = (
        f"{found['photos']} photos, medians of {found['rounds']} rounds, in photos per second, on "
        f"{on(found['machine'])}. The ratio is that of `ImageFolder` to `S3ImageFolder`."
    )
    head = ("latency, children", *(name if " " in name else f"`{name}`" for name in names))
    return f"{about}\n\n{markdown((*head, 'ratio'), rows)}"


def launching(results):
    found, rows = results["launchers"], []
    for tool, row in found["rows"].items():
        name = {
            OURS: "`daskrun.launch`, a function on Dask's workers",
            SCRIPT: f"`{SCRIPT}`, on workers of its own",
        }.get(tool, tool)
        if row is None:
            rows.append([name, f"not run: {found['not_run'][tool]}", *[""] * 7])
            continue
        figures = (row.get(name) for name in ("cold_s", "warm_s", "step_s", "says_s", "knows_s", "again_s"))
        shown = ["–" if figure is None else f"{figure:.2f}" for figure in figures]
        rows.append([name, str(row["lines"]), *shown, row.get("same_loss", "–")])
    about = f"Seconds on {on(found['machine'])}; medians of {found['rounds']} rounds, "
    about += f"and of {runs(found['kills'])} each with a killed rank."
    head = "tool|lines of yours|first step, cold|warm|a step|killed, no restart: a line says so|the call ends"
    head += "|with a restart: goes on|from the checkpoint, to the same loss"
    return f"{about}\n\n{markdown(head.split('|'), rows, right=range(1, 8))}"


def growing(results):
    found = results["scale"]
    driver = {(row["way"], row["paths"]): row for row in found["driver"]["rows"]}
    stream, whole = (driver[way, 10**6] for way in ("classify_stream", "classify"))
    grown = [stream[f"{who}_most"] - stream[f"{who}_before"] for who in ("client", "scheduler")]
    listing = next(row for row in found["listing"]["rows"] if row["keys"] == 10**6)
    launch = {row["ranks"]: row["runs_s"] for row in found["launch"]["rows"]}
    rounds = ", ".join(f"{found[part]['rounds']} of {part}" for part in ("driver", "listing", "launch"))
    return "\n".join(
        [
            f"Medians on {on(found['machine'])}; rounds: {rounds}.",
            "",
            f"- For a million paths, the client spends {stream['client_ms']:.2f} ms a batch of 32 and the scheduler "
            f"{stream['scheduler_ms']:.2f}.",
            f"- Their memory grows by {grown[0]:.0f} and {grown[1]:.0f} MiB meanwhile. `classify` itself holds "
            f"{whole['rows_held']:.0f} MiB of rows.",
            f"- A store that answers each request after {listing['delay_ms']} ms lists a million keys in "
            f"{listing['seconds']:.0f} s. A processor works for "
            f"{1e6 * listing['client_s'] / listing['keys']:.0f} µs a key.",
            f"- Sixteen ranks on two cores are at work {launch[16]:.2f} s after a launch, two after {launch[2]:.2f}.",
        ]
    )


def stepping(results):
    rows = [row for row in results["steps"]["rows"] if row["ranks"] > 2]
    shown = [[str(row["ranks"]), f"{row['predicted_s']:.2f}", f"{row['measured_s']:.2f}"] for row in rows]
    table = markdown(("ranks", "predicted", "measured"), shown, right=range(3))
    return f"On {on(results['steps']['machine'])}.\n\n{table}"


def deciding(results):
    """Return what speaks for `daskrun`, and against it, on its README's first screen."""
    rows = results["launchers"]["rows"]
    function, script, there = rows[OURS], rows[SCRIPT], rows["torchrun"]
    lines = [
        "**Take it** for many jobs from a notebook or a program, on workers that run already: the next job was at its "
        f"first training step {function['warm_s']:.1f} s after the call, and trained again {function['again_s']:.1f} s "
        f"after a rank was killed. torchrun, which starts Python each time, took {there['cold_s']:.1f} s and "
        f"{there['again_s']:.1f} s.",
        "**Leave it** for one long training from a shell: `daskrun train.py` took "
        f"{script['cold_s']:.1f} s to the first step, and {script['again_s']:.1f} s after a kill. Leave it, too, where "
        "hosts join while a job trains. On several GPUs it has not run yet ([what it is not](#what-it-is-not)).",
    ]
    measured = "[Measured](../docs/figures.md#which-launcher-and-when) with two ranks on two cores."
    return "\n".join([*(f"- {line}" for line in lines), "", measured])


def how_fast(results):
    """Return the README's part: the table in short, and where it was measured."""
    first, *others = (on(results[name]["machine"]) for name in ("inference", "storage", "launchers"))
    where = f"{first} (first row) and {' and '.join(dict.fromkeys(others))} (others)" if {first} != {*others} else first
    return f"Measured on {where}; more in [figures](docs/figures.md).\n\n{in_short(results)}"


def in_short(results):
    """Return a table of four rows, and what a GPU did."""
    photos, s3, launchers = (results[name] for name in ("inference", "storage", "launchers"))
    ours, naive, loop = (f"{rate(photos, contestant(start)(photos)):.1f}" for start in ("classify", "up", "DataLoader"))
    rates, beside = photos["images_per_s"], ""
    for peer in ("Ray Data", "Daft"):  # with PyTorch's own kernels, as they come
        if eager := [each for way, each in rates.items() if way.startswith(peer) and way.endswith("eager")]:
            beside += f", {max(eager):.1f} with {peer}"
    here, there = launchers["rows"][OURS], launchers["rows"]["torchrun"]
    rows = [
        [
            "ResNet-50 over photos, with `classify` of notebook 04",
            f"{ours} photos/s",
            f"{naive} with one task per photo, {loop} with the best `DataLoader` loop{beside}",
        ],
        ["a batch from an S3 server on the same machine, with `ImageFolder`", *from_s3(s3, NEAR)],
        [
            "from `daskrun.launch` of two ranks on a running cluster to the first training step",
            *pair(here["warm_s"], there["cold_s"], 1),
        ],
        [
            "from the kill of a rank until `daskrun.launch` goes on",
            *pair(here["again_s"], there["again_s"], 1),
        ],
    ]
    script = launchers["rows"][SCRIPT]
    rows[2][2] += f"; `daskrun train.py` {script['cold_s']:.1f} s"
    rows[3][2] += f"; `daskrun train.py` {script['again_s']:.1f} s"
    rows[2][1] += f"; {here['cold_s']:.1f} s with the start of a cluster"
    gpu = stored(GPU)["inference"]
    loop = rate(gpu, contestant("DataLoader")(gpu))
    share = rate(gpu, contestant("classify")(gpu)) / loop
    on_gpu = f"On one H100, an earlier `classify` reached {share:.2f} of the rate of the best `DataLoader` loop."
    return f"{markdown(('what', 'here', 'compared with'), rows, right=(1,))}\n\n{on_gpu}"


def from_s3(found, condition):
    """Return two cells: our photos/s and theirs, from the least to the most of the DataLoader's children."""
    conditions = [each for each in found["seconds"] if each.startswith(condition.partition(",")[0] + ",")]
    ours = [rate(found, contestant("ImageFolder", each)(found)) for each in conditions]
    others = {"`S3ImageFolder`": "S3ImageFolder", "s3fs, tuned": "s3fs tuned"}
    theirs = {name: [rate(found, found["seconds"][each][key]) for each in conditions] for name, key in others.items()}
    return [
        f"{min(ours):.0f} to {max(ours):.0f} photos/s",
        ", ".join(f"{min(rates):.0f} to {max(rates):.0f} with {name}" for name, rates in theirs.items()),
    ]


def pair(here, torchrun, n_digits):
    return [f"{here:.{n_digits}f} s", f"torchrun {torchrun:.{n_digits}f} s"]


def rate(result, seconds):
    return result["photos"] / statistics.median(seconds)


def times(ours, theirs):
    """Return how many times as fast we are: the median over the rounds."""
    return statistics.median(ratios(ours, theirs, fast=True))


def runs(n):
    return "one run" if n == 1 else f"{n} runs"


def bar(share):
    """Return a bar of text, 24 letters long for a share of 1, which is drawn wherever Markdown is."""
    eighths = round(share * 24 * 8)
    return "█" * (eighths // 8) + "▏▎▍▌▋▊▉"[eighths % 8 - 1] * bool(eighths % 8)


def markdown(head, rows, right=None):
    """Return a table. right: the columns aligned to the right; all but the first if not given."""
    right = range(1, len(head)) if right is None else right
    rule = ["---:" if number in right else "---" for number in range(len(head))]
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def without_empty_columns(head, rows, right):
    kept = [column for column in range(len(head)) if any(row[column] for row in rows)]
    head, *rows = ([row[column] for column in kept] for row in (head, *rows))
    return markdown(head, rows, right=[kept.index(column) for column in right if column in kept])


PARTS = {
    part.__name__: part
    for part in (
        machines,
        goals,
        classifying,
        starting,
        told,
        broken,
        reading,
        launching,
        growing,
        stepping,
        deciding,
        how_fast,
        in_short,
    )
}
MEASURED = ("inference", "installing", "ddp", "storage", "launchers", "many_models", "faults", "scale", "steps")

if __name__ == "__main__":
    main()
