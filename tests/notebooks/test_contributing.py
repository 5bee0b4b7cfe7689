"""A notebook written as CONTRIBUTING.md says passes the project's checks, and is refused without what it asks for."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest
from compare import NBVAL
from lessons import ROOT

COPIED = ("workshop_utils", "tools", "tests/notebooks", "pyproject.toml", "Makefile")
TITLE = """# 12 · Small

**After this notebook you can**

- add.

**Necessary:** numbers. **Helpful:** fingers. **Time:** one minute."""
IMPORTS = "from workshop_utils.exercises import ours, reconcile, small, unanswered"
READ_ON = "**Read on:** [one](https://docs.dask.org), [two](https://docs.pytorch.org)."
CHECKS = '''"""Checks of notebook 12 · Small."""

from workshop_utils.exercises import exercise, expect, passed


@exercise
def check_sum(answer: int | None, right: int) -> None:
    expect(answer is not None, "the answer is still None.")
    expect(answer == right, f"{answer!r} is not the sum.")
    passed("So it is.")
'''


HINTS = "\n\n".join(
    f"<details><summary>Hint {name}</summary>\n\nAdd them.\n\n</details>"
    for name in ("1: a nudge", "2: the API", "3: the code")
)


def an_exercise(name, terms):
    solution = {"tags": ["solution", "hide-input"], "jupyter": {"source_hidden": True}}
    return [
        nbformat.v4.new_markdown_cell(f"### Exercise\n\nAdd {terms}.\n\n{HINTS}"),
        nbformat.v4.new_code_cell(f"{name} = None  # your code here", metadata={"tags": ["exercise"]}),
        nbformat.v4.new_code_cell(f"if unanswered({name}):\n    {name} = ours({terms})", metadata=solution),
        nbformat.v4.new_code_cell(f"small.check_sum({name}, {terms})", metadata={"tags": ["check"]}),
    ]


def a_guess(name):
    return [
        nbformat.v4.new_code_cell(f"{name} = None  # your guess, in seconds", metadata={"tags": ["guess"]}),
        nbformat.v4.new_code_cell(f"reconcile({name}, 2.0, 3.0, 's')"),
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with one notebook, written and rendered as CONTRIBUTING.md says."""
    project = tmp_path_factory.mktemp("project") / "workshop"
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, project / name)
    cells = [
        nbformat.v4.new_markdown_cell(TITLE),
        nbformat.v4.new_code_cell("n = 3", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(f"{IMPORTS}\n\nprint(f'{{n}} numbers in 0.1 s')"),
        *a_guess("one"),
        *a_guess("two"),
        *a_guess("three"),
        *an_exercise("first", "1 + 2"),
        *an_exercise("second", "3 + 4"),
        nbformat.v4.new_markdown_cell("## Key points\n\n- A sum is a number.\n\n" + READ_ON),
    ]
    (project / "workshop_utils/exercises/small.py").write_text(CHECKS)
    (project / "notebooks").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), project / "notebooks/12-small.ipynb")
    run(project, "tools/render.py", "12")
    return project


def run(project, *arguments, code=0):
    env = {**os.environ, "PYTHONPATH": str(project)}
    result = subprocess.run([sys.executable, *arguments], cwd=project, env=env, capture_output=True, text=True)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def check(project, **expected):
    return run(project, "-m", "pytest", "-p", "no:cacheprovider", "tests/notebooks/test_notebooks.py", **expected)


def test_such_a_notebook_passes_every_check(project):
    assert " passed" in check(project) and (project / "notebook_output/12-small.ipynb").exists()


def test_nbval_compares_it_with_stubs_and_solutions(project):
    run(project, "-c", "import sys; sys.path.append('tests/notebooks'); import copies; copies.copy_all()")
    assert "16 passed" in run(project, "-m", "pytest", *NBVAL, ".nbval/12-small.ipynb")
