"""The prose has one word for each thing, and no misspelt one."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
SPELLED = ("README.md", "CONTRIBUTING.md", "docs", "deploy", "notebooks", "workshop_utils", "benchmarks", "tools")
IS_CODE = re.compile(r"```.*?```|~~~.*?~~~|`[^`\n]*`|\]\([^)\n]*\)|<[^>\n]+>", re.DOTALL)


class Word(NamedTuple):
    """What a thing is called here, what it is not called, and where such a word is right after all."""

    right: str
    wrong: str
    unless: str = "$^"


WORDS = (
    Word("photos", r"pics?|snapshots?"),
    Word("sketches", r"drawings? of dogs|doodles?"),
    Word(
        "breed", r"class(es)?", r"in class|classroom|\*?\*?Dataset\*?\*? is any class|own class|class from a notebook"
    ),
    # ImageNet numbers categories, and a model's outputs are those; a breed is one of them.
    Word(
        "breed",
        r"categor(y|ies)",
        r"ImageNet|transform and|ategories belong|, probability|the model|list of categ|"
        r"WordNet|trained on|the category  \.|One of the",
    ),
    # A label is the number that a dataset gives a folder, as notebook 05 says; it is no other word for a breed.
    Word("breed", r"(class|breed|category|dog) labels?|labels? of (a|the|each) (photo|dog)s?"),
    Word("worker", r"slaves?|executors?|nodes?", r"Slurm|slurm|all nodes|login node|[Nn]ode\b.*(cluster|Kubernetes)"),
    Word("rank", r"process number|replicas?", r"Kubernetes|pods?"),
    Word("future", r"promises?", r"it promises|promises neither"),
    Word("step", r"iterations?"),
    Word("transform", r"transformations?|pre-?processing"),
    Word("batch", r"mini-?batch(es)?"),
    Word("optimiser", r"optimizers?", r"the optimizer's memory"),  # twice in 08, after the key of its state
    Word("colour", r"colors?"),
    Word("PyTorch", r"Pytorch|pytorch|Py Torch", r"dask-pytorch|pytorch-with"),
    Word("JupyterLab", r"Jupyter ?lab|Jupyter Lab|jupyterlab"),
    Word("WordNet", r"Wordnet|wordnet|Word Net"),
)


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


def misnamed(word, text):
    """Return the sentences and lines in which something else stands for `word.right`."""
    parts = re.split(r"(?<=[.?!:]) |\n", text)
    return [part for part in parts if re.search(rf"\b({word.wrong})\b", part) and not re.search(word.unless, part)]


@pytest.fixture(scope="module")
def texts():
    return prose()


@pytest.mark.parametrize("word", WORDS, ids=lambda word: f"{word.right}, not {word.wrong}")
def test_one_thing_has_one_name(texts, word):
    found = {where: parts for where, text in texts.items() if (parts := misnamed(word, text))}
    assert not found, f"write {word.right!r}, or add to `unless` where the other word is the right one"


def test_another_name_is_found_and_code_is_not_prose():
    said = IS_CODE.sub(" ", "Each class has photos. See `class Dogs` and ```\nclass\n``` and [this](class.md).")
    assert [misnamed(word, said) for word in WORDS if word.right == "breed"][0] == ["Each class has photos."]


def codespell(*paths):
    command = [sys.executable, "-m", "codespell_lib", "--config", ROOT / ".codespellrc", *paths]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def test_no_word_is_misspelt():
    assert codespell(*SPELLED) == ""


def test_a_misspelt_word_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("We recieve " + "photos.\n")
    assert "==> receive" in codespell(page)
