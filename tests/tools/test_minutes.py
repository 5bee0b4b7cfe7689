"""The minutes in a notebook come from its measured cells and from a rule for the rest."""

import nbformat
from minutes import LINES, WORDS, write_minutes
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

SOLUTION = """# our solution
if unanswered(a):
    b = 0

    @ours
""" + "\n".join(f"    step_{n}()" for n in range(8))


def lesson(path, *cells):
    notebook = new_notebook(cells=list(cells))
    nbformat.write(notebook, path)
    return notebook


def texts(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def test_a_section_has_the_minutes_of_its_cells_words_and_exercises(tmp_path):
    path = tmp_path / "01-try.ipynb"
    notebook = lesson(
        path,
        new_markdown_cell("# Try\n\n**Time:** soon."),
        new_markdown_cell("## 1 · Read\n\n" + "word " * 4 * WORDS),
        new_code_cell("import os\nfrom time import sleep\n\n" + "1\n" * 2 * LINES),
        new_markdown_cell("## 2 · Do\n\nTask ![" + "seen " * 900 + "](a.svg) <details>" + "hint " * 900 + "</details>"),
        new_code_cell("a = None\nb = 0", metadata={"tags": ["exercise"]}),
        new_code_cell(SOLUTION, metadata={"tags": ["solution", "hide-input"]}),
        new_markdown_cell("## Going further\n\n" + "word " * 9000),
    )
    write_minutes(path, notebook, [60.0, 120.0, 0.0])
    for written in (notebook, nbformat.read(path, 4)):
        title, read, do, further = texts(written)
        assert title.endswith("**Time:** 15 minutes in class; its cells run for 3.0 minutes.")
        assert read.startswith("## 1 · Read\n\n*7 minutes*\n\nword word")
        assert do.startswith("## 2 · Do\n\n*8 minutes*\n\nTask")
        assert further.startswith("## Going further\n\n*69 minutes*")


def test_a_second_measurement_replaces_the_first(tmp_path):
    path = tmp_path / "01-try.ipynb"
    notebook = lesson(path, new_markdown_cell("# Try\n\n**Time:** soon.\n\n## 1 · Alone"), new_code_cell("1"))
    write_minutes(path, notebook, [600.0])
    write_minutes(path, notebook, [60.0])
    assert texts(notebook) == texts(nbformat.read(path, 4))
    assert texts(notebook)[0].endswith("its cells run for 1.0 minutes.\n\n## 1 · Alone\n\n*1 minute*")
