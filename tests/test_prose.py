"""The prose has one word for each thing, and no misspelt one."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
SPELLED = ("README.md", "CONTRIBUTING.md", "docs", "deploy", "notebooks", "workshop_utils", "benchmarks", "tools")
IS_CODE = re.compile(r"```.*?```|~~~.*?~~~|`[^`\n]*`|\]\([^)\n]*\)|<[^>\n]+>", re.DOTALL)


# What a thing is called here, and what it is never called. A word that is right elsewhere is not listed.
WORDS = {
    "photos": r"pics?|snapshots?",
    "sketches": r"drawings? of dogs|doodles?",
    "breed": r"(class|breed|category|dog) labels?|labels? of (a|the|each) (photo|dog)s?",  # a label is a number: see 05
    "worker": r"slaves?|executors?",
    "step": r"iterations?",
    "transform": r"transformations?|pre-?processing",
    "batch": r"mini-?batch(es)?",
    "colour": r"colors?",
    "PyTorch": r"Pytorch|Py Torch",
    "JupyterLab": r"Jupyter ?lab|Jupyter Lab|jupyterlab",
    "WordNet": r"Wordnet|wordnet|Word Net",
}


def prose():
    """Return {where: text} of all pages and of the notebooks' markdown, without code and addresses."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/quiz.json"]
    pages += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(pages)}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "markdown":
                texts[f"{path.name}, cell {number}"] = cell.source
    return {where: IS_CODE.sub(" ", text) for where, text in texts.items()}


@pytest.fixture(scope="module")
def texts():
    return prose()


@pytest.mark.parametrize(("right", "wrong"), WORDS.items(), ids=WORDS)
def test_one_thing_has_one_name(texts, right, wrong):
    found = {where: re.findall(rf".*\b(?:{wrong})\b.*", text) for where, text in texts.items()}
    found = {where: lines for where, lines in found.items() if lines}
    assert not found, f"write {right!r}"


def test_no_word_is_misspelt():
    command = [sys.executable, "-m", "codespell_lib", "--config", ROOT / ".codespellrc", *SPELLED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
