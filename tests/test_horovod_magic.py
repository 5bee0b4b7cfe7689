"""Cells of notebook 09 show their stored output where Horovod is not built, and its build says what it lacks."""

import os
import subprocess
import sys
from pathlib import Path

from workshop_utils.horovod import NOT_BUILT
from workshop_utils.progress import FINISHED


def test_where_it_is_not_built_a_cell_shows_its_stored_output(tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('built for another PyTorch')")
    code = """
import nbformat
from IPython.core.interactiveshell import InteractiveShell
from workshop_utils import horovod_magic as horovod
from workshop_utils.progress import FINISHED
cells = [c for c in nbformat.read(horovod.RENDERED, 4).cells
         if c.source.startswith("%%horovod") and c.outputs and c.outputs[0].output_type == "stream"]
chosen = max(cells, key=lambda c: len(FINISHED.findall(c.outputs[0].text)))  # where it took long
shell = InteractiveShell.instance()
horovod.load_ipython_extension(shell)
shell.run_cell(chosen.source).raise_error()
shell.run_cell("print('ordinary')").raise_error()
shell.run_cell("%%horovod\\nchanged").raise_error()
print("=====")
print(chosen.outputs[0].text, end="")
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    said, stored = done.stdout.split("ordinary\nThere is no stored output of this cell: it was changed.\n=====\n")
    first, shown = said.split("\n", 1)
    assert first == f"{NOT_BUILT}. Its cells show stored outputs."
    without_bars = FINISHED.sub("", stored)
    assert shown.startswith(without_bars) and without_bars.strip() and not FINISHED.search(shown)


BUILD = Path(__file__).parents[1] / "tools" / "build_horovod.sh"


def test_the_build_names_what_is_missing(tmp_path):
    for tool in ("bash", "realpath", "mktemp", "rm", "dirname"):
        (tmp_path / tool).symlink_to(next(p for d in os.environ["PATH"].split(":") if (p := Path(d, tool)).exists()))
    env = {"PATH": str(tmp_path)}
    done = subprocess.run(["bash", BUILD, sys.prefix], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.strip().endswith("On Debian: apt install g++ make python3-dev")
