"""What the slides say was measured, read from benchmarks/results and from the stored outputs of notebooks."""

import json
import re
import statistics
from pathlib import Path

from figures import times
from table import DECIDES, contestant, ratios
from torch.distributed.constants import default_pg_timeout

ROOT = Path(__file__).parents[2]
WIDEST = 66  # characters in a line of code on a slide


def result(name):
    return json.loads((ROOT / f"benchmarks/results/cpu2-{name}.json").read_text(encoding="utf-8"))


def printed(notebook, pattern):
    """Return what the groups of `pattern` match in the outputs of a notebook such as "07", for each match a tuple.

    Raises ValueError where nothing matches, as the notebook has changed.
    """
    path = next((ROOT / "notebook_output").glob(f"{notebook}-*.ipynb"))
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    text = "\n".join("".join(output.get("text", "")) for output in outputs)
    if not (found := [match.groups() for match in re.finditer(pattern, text, re.MULTILINE)]):
        raise ValueError(f"{path.name} prints nothing like {pattern!r}: change docs/slides/measured.py.")
    return found


def bar(share, colour=""):
    return f'<span class="bar {colour}" style="width: {share:.1%}"></span>'


def table(*rows):
    """Return rows of cells as a Markdown table; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in [rows[0], rule, *rows[1:]])


def waits():
    """Return how long the two kinds of work take that the second slide names."""
    decode_ms, eager_ms, _ = result("inference")["core_ms"]["fp32"]
    photo_ms = decode_ms + eager_ms
    job = result("ddp")
    step_s = job["seconds"]["dask"]["step"]
    return {
        "photo_ms": f"{photo_ms:.0f} ms",
        "photos_h": f"{photo_ms * 1e6 / 3.6e6:.0f} hours",
        "step_photos": job["ranks"] * job["batch_size"],
        "step_s": f"{step_s:.1f} s",
        "steps_h": f"{step_s * 1e4 / 3600:.0f} hours",
    }


def ladder():
    """Return a table of notebook 04's ladder, in images a second."""
    rungs = printed("04", r"^(a plain loop|\([a-e]\) .+?) +[\d.]+ m?s +([\d,]+) images/s")
    fastest = max(float(rate) for _, rate in rungs)
    rows = [(name, f"{rate}", bar(float(rate) / fastest)) for name, rate in rungs]
    return {"ladder": table(("", "images/s", ""), *rows)}


def times_best_loop(inference):
    """Return how many times as fast as the best loop in one process `classify` is."""
    return times(contestant("classify")(inference), contestant("DataLoader")(inference))


def pays():
    """Return notebook 02's table: how long a task is, and what two workers gain or lose with it."""
    found = printed("02", r"^tasks, ([\d.]+ ms) .* ([\d.]+)× (slower|faster) than")
    rows = [(length, f"{times} × {how}") for length, times, how in found]
    return {"pays": table(("a task takes", "beside a loop, the workers are"), *rows)}


def together():
    """Return what notebook 06 measured: two steps on one core, on two and on two ranks, and what a death costs."""
    seconds = dict(printed("06", r"^(plain, all cores|plain, one core|all ranks) +([\d.]+) s"))
    rows = [
        ("two ranks, a core each", f"{seconds['all ranks']} s"),
        ("plain PyTorch, one core", f"{seconds['plain, one core']} s"),
        ("plain PyTorch, both cores", f"{seconds['plain, all cores']} s"),
    ]
    *_, (redo_s, lost_s) = printed("06", r"^simple estimate +([\d.]+) s\nmeasured +([\d.]+) s")
    [(equal,)] = printed("06", r"^(\d+ of \d+) tensors are equal")
    return {
        "one_core": f"{seconds['plain, one core']} s",
        "two_steps": table(("two steps", ""), *rows),
        "redo_s": f"{float(redo_s):.1f} s",
        "lost_s": f"{float(lost_s):.1f} s",
        "equal": equal,
    }


def launchers():
    """Return a table of all launchers, in seconds, and how a step compares with torchrun's in both benchmarks."""
    found = result("launchers")
    rows = found["rows"]
    small = ([run["step_s"] for run in found["runs"][tool]] for tool in ("this on Dask", "torchrun"))
    large = ([run["step"] for run in result("ddp")["runs"][tool]] for tool in ("dask", "torchrun"))
    shown = []
    for tool, row in rows.items():
        name = {"this on Dask": "**`daskrun.launch`**", "daskrun train.py": "**`daskrun train.py`**"}.get(tool, tool)
        warm = f"{row['warm_s']:.1f}" if "warm_s" in row else "–"
        shown.append((name, f"{row['cold_s']:.1f}", warm, f"{row['again_s']:.1f}", f"{row['step_s']:.2f}"))
    head = ("", "cold", "warm", "after&nbsp;a&nbsp;kill", "a&nbsp;step")
    return {
        "launchers": table(head, *shown),
        "small_step": compared(ratios(*small, fast=False)),
        "large_step": compared(ratios(*large, fast=False)),
    }


def compared(ratios):
    """Say how much longer or shorter we take, if so many rounds agree on which of the two as decide on a goal."""
    longer, ratio = statistics.mean(ratio > 1 for ratio in ratios), statistics.median(ratios)
    if 1 - DECIDES < longer < DECIDES:
        return "as long, within noise"
    return f"{abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'shorter'}".replace("%", " %")


def faults():
    """Return of how many faults a message tells, and what notebook 12's `explain` says."""
    found = result("faults")
    cases = found["table"]
    told = {
        tool: sum(not case[tool]["said"].startswith("nothing") for case in cases)
        for tool in ("daskrun.launch", "torchrun")
    }
    [(explained,), *_] = printed("12", r"^(The ranks' collective \d+ .*)$")
    return {
        "n_told": told["daskrun.launch"],
        "n_told_torchrun": told["torchrun"],
        "n_faults": len(cases),
        "explained": f"```text\n{wrapped(explained)}\n```",
        "silence_min": round(default_pg_timeout.total_seconds() / 60),
    }


def wrapped(text):
    lines = re.sub(r": rank|; rank", lambda mark: f"{mark[0][0]}\n  rank", text).splitlines()
    return "\n".join(line if len(line) <= WIDEST else line.replace(", at ", ",\n    at ") for line in lines)


def gains():
    """Return a table: two workers of a core each against one process with both cores, in times as fast."""
    models = result("many-models")
    speeds = printed(
        "07", r"^(all layers|head alone) +[\d.]+ +([\d.]+) +([\d.]+) +[\d.]+$"
    )  # 1 × 1, 1 × 2, 2 × 1, 4 × 1
    trained = {name: float(ranks) / float(threads) for name, threads, ranks in speeds}
    shown = {
        "many models, one a worker": times(contestant("Dask")(models), contestant("sequential")(models)),
        "classifying photos": times_best_loop(result("inference")),
        "training a ResNet-18's head": trained["head alone"],
        "training all its layers": trained["all layers"],
    }
    most = 1.04 * max(1, *shown.values())
    one = f'<span class="one" style="left: {1 / most:.0%}"></span>'
    fastest_first = sorted(shown.items(), key=lambda item: -item[1])
    rows = [
        (name, f"{times:.2f} ×", f"{bar(times / most, '' if times > 1 else 'slower')}{one}")
        for name, times in fastest_first
    ]
    return {"gains": table(("", "times as fast", ""), *rows)}


def numbers():
    """Return everything that the slides print as measured, under the names that index.md uses."""
    parts = (waits, pays, ladder, together, launchers, faults, gains)
    return {name: value for part in parts for name, value in part().items()}
