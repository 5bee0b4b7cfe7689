"""Each figure of docs/figures.md is what a file of benchmarks/results holds, rounded."""

import json
import re

import pytest
from built import ROOT

TEXT = (ROOT / "docs/figures.md").read_text()
README = (ROOT / "README.md").read_text()


def result(name):
    return json.loads((ROOT / f"benchmarks/results/cpu2-{name}.json").read_text())


def table(heading):
    """Return the rows of the table under a heading, each a list of cells without bold and code marks."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[re.sub(r"[*`]", "", cell).strip() for cell in row] for row in rows[2:]]


def best(rates, start):
    return max(rate for way, rate in rates.items() if way.startswith(start))


def test_classifying_photos():
    rates = result("inference")["images_per_s"]
    recipe = rates["upstream: delayed per image, model per batch, fp32"]
    ways = [recipe, best(rates, "DataLoader, fp32"), best(rates, "DataLoader, bf16"), rates["classify"], rates["bound"]]
    assert [row[1:] for row in table("Classifying photos")] == [[f"{x:.1f}", f"{x / recipe:.2f}"] for x in ways]


def test_starting_a_ddp_job():
    seconds, ratios = (result("ddp")[name] for name in ("seconds", "ratios"))
    expected = [
        [f"{seconds['torchrun'][what]:.2f}", f"{seconds['dask'][what]:.2f}", f"{ratios[what]:.3f}"]
        for what in ("step", "function runs", "first step done")
    ]
    assert [row[1:] for row in table("Starting a DDP job")] == expected


def test_what_you_are_told_when_training_fails():
    found, printed = result("faults"), table("What you are told when training fails")
    assert len(printed) == len(found["table"]) == 16
    for (kind, here, there, _), row in zip(printed, found["table"], strict=True):
        assert kind == row["kind"]
        for cell, told in ((here, row["ddp.launch"]), (there, row["torchrun"])):
            silent = told["said"].startswith("nothing")
            assert cell == "nothing" if silent else cell.startswith(f"{told['after_s']:.0f} s: "), kind


def test_reading_from_object_storage():
    found = result("storage")
    for latency, children, *figures in table("Reading from object storage"):
        case = f"{latency}, {children} children"
        rates = found["images_per_s"][case]
        expected = [rates["S3ImageFolder"], rates["ImageFolder"], found["ratios"][case]]
        assert figures == [f"{x:.1f}" for x in expected]


def test_which_launcher_when():
    rows, printed = result("launchers")["rows"], table("Which launcher when")
    assert len(printed) == len(rows)
    for (tool, *cells), row in zip(printed, rows.values(), strict=True):
        names = ("cold_s", "warm_s", "step_s", "says_s", "knows_s", "again_s")
        figures = [f"{row[name]:.2f}" if name in row else "–" for name in names]
        assert cells == [str(row["lines"]), *figures, row["same_loss"]], tool


def test_steps_over_a_slow_link():
    rows = {str(row["ranks"]): row for row in result("steps")["rows"]}
    for ranks, *figures in table("Steps over a slow link"):
        assert figures == [f"{rows[ranks]['predicted_s']:.2f}", f"{rows[ranks]['measured_s']:.2f}"]


def test_what_grows_with_photos_and_ranks():
    scale = result("scale")
    driver = {(row["way"], row["paths"]): row for row in scale["driver"]["rows"]}
    stream, whole = (driver[way, 1_000_000] for way in ("classify_stream", "classify"))
    grown = [stream[f"{who}_most"] - stream[f"{who}_before"] for who in ("client", "scheduler")]
    listing = next(row for row in scale["listing"]["rows"] if row["keys"] == 1_000_000)
    launch = {row["ranks"]: row["runs_s"] for row in scale["launch"]["rows"]}
    for said in (
        f"the client spends {stream['client_ms']:.2f} ms a batch of 32 and the scheduler {stream['scheduler_ms']:.2f}.",
        f"grows by {grown[0]:.0f} and {grown[1]:.0f} MiB",
        f"holds {whole['rows_held']:.0f} MiB of rows",
        f"a million keys in {listing['seconds']:.0f} s, with {listing['requests']:,} requests",
        f"{1e6 * listing['client_s'] / listing['keys']:.0f} µs a key",
        f"at work {launch[16]:.2f} s after a launch, two after {launch[2]:.2f}.",
    ):
        assert said in TEXT


@pytest.mark.parametrize("name", ["inference", "ddp", "storage", "launchers", "scale", "steps"])
def test_the_machine_and_the_days_are_as_said(name):
    machine = result(name)["machine"]
    versions = f"Python {machine['python']}, PyTorch {machine['torch']} and Dask {machine['dask']}"
    assert machine["cores"] == 2 and machine["date"] in ("2026-11-20", "2026-11-21") and machine["avx512_bf16"]
    assert versions in TEXT and machine["processor"] in TEXT and "20 and 21 November 2026" in TEXT


FOLDERS = ("ImageFolder", "S3ImageFolder")


def test_the_readme_sets_warm_beside_cold_and_good_beside_bad():
    rates, storage = result("inference")["images_per_s"], result("storage")["images_per_s"]
    step, rows = result("ddp")["seconds"], result("launchers")["rows"]
    dask, torchrun = rows["this on Dask"], rows["torchrun"]
    naive, loop = rates["upstream: delayed per image, model per batch, fp32"], best(rates, "DataLoader, bf16")
    from_s3 = [
        f"{min(ours):.0f} to {max(ours):.0f} photos/s | {min(theirs):.0f} to {max(theirs):.0f} with a request a photo |"
        for delay in ("0 ms", "20 ms")
        for ours, theirs in [
            [[each[way] for setting, each in storage.items() if setting.startswith(f"{delay},")] for way in FOLDERS]
        ]
    ]
    for line in (
        f"| {rates['classify']:.1f} photos/s | {naive:.1f} with a task a photo, {loop:.1f} with the best",
        f"; {rates['bound']:.1f} if the cores did nothing but",
        f"`ImageFolder` | {from_s3[0]}",
        f"takes 20 ms | {from_s3[1]}",
        f"with the start of a cluster | {dask['cold_s']:.1f} s | torchrun {torchrun['cold_s']:.1f} s |",
        f"| the same on a cluster that runs | {dask['warm_s']:.1f} s | torchrun {torchrun['cold_s']:.1f} s",
        f"a rank | {step['dask']['step']:.2f} s | torchrun {step['torchrun']['step']:.2f} s |",
        f"smaller training | {dask['step_s']:.2f} s | torchrun {torchrun['step_s']:.2f} s |",
        f"until its job goes on | {dask['again_s']:.1f} s | torchrun {torchrun['again_s']:.1f} s |",
    ):
        assert line in README, line
