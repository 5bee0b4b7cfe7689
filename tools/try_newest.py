"""Run the lessons with the newest versions that the ranges allow, candidates of PyTorch included: `make newest`.

What differs is written to build/newest/report.md, with the versions that changed; exit code 1 if a lesson drifts.
Candidates come from wherever uv looks for packages: its variable UV_EXTRA_INDEX_URL adds a place.
"""

import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/newest"
UV = [Path(sys.executable).with_name("uv"), "pip"]
CANDIDATES = "torch>=2.11rc0\ntorchvision>=0.26rc0\n"  # a range that names a candidate is what lets uv take one
LONGEST_REPORT = 60_000  # characters; an issue has at most 65,536


def install():
    """Make a virtual environment with the newest versions; return its Python."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "candidates.in").write_text(CANDIDATES)
    newest, python = FOLDER / "requirements.txt", FOLDER / "venv/bin/python"
    newest.unlink(missing_ok=True)  # its pins would be kept
    extras = ["--extra=lab", "--extra=test", "--extra=clusters"]
    sources = ["pyproject.toml", FOLDER / "candidates.in", *extras]
    quiet = ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url"]
    run([*UV, "compile", *sources, *quiet, "--output-file", newest])
    run([UV[0], "venv", "--quiet", "--clear", "--python", sys.executable, FOLDER / "venv"])
    run([*UV, "install", "--quiet", "--compile-bytecode", "--python", python, "--requirements", newest])
    run([*UV, "install", "--quiet", "--python", python, "--no-deps", "--editable", "."])
    return python


def run(command):
    subprocess.run(command, cwd=ROOT, check=True)


def versions(pins):
    """Return {package: version} of a requirements file's text, as far as its lines are for this Python and system."""
    lines = re.findall(r"^([\w.-]+(?:\[.*?\])?==[^\\\n]+)", pins, flags=re.MULTILINE)
    here = [pin for pin in map(Requirement, lines) if not pin.marker or pin.marker.evaluate()]
    return {pin.name: next(iter(pin.specifier)).version for pin in here}


def report(pinned, newest, said):
    """Return the report as Markdown: which versions changed, and what the comparison said of each lesson.

    pinned, newest: the texts of two requirements files. said: what tests/notebooks/compare.py printed.
    """
    before, after = versions(pinned), versions(newest)
    changed = [
        f"| {name} | {before[name]} | {after[name]} |" for name in after if before.get(name, after[name]) != after[name]
    ]
    table = (
        ["| package | pinned | newest |", "|---|---|---|", *sorted(changed)]
        if changed
        else ["No pin has a newer version."]
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    cut = "…\n" if len(plain) > LONGEST_REPORT else ""
    return "\n".join(
        [
            "## Versions",
            "",
            *table,
            "",
            "## What the lessons printed",
            "",
            "```text",
            cut + plain[-LONGEST_REPORT:],
            "```",
            "",
        ]
    )


def main():
    python = install()
    command = [python, "tests/notebooks/compare.py", "--each-on-one-core"]
    compared = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    pinned = "".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-test.txt"))
    newest = (FOLDER / "requirements.txt").read_text()
    (FOLDER / "report.md").write_text(report(pinned, newest, compared.stdout))
    print(compared.stdout)
    print(f"The report is {(FOLDER / 'report.md').relative_to(ROOT)}.")
    sys.exit(compared.returncode)


if __name__ == "__main__":
    main()
