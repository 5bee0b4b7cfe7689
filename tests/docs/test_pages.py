"""The README's lines of Python run, and the reference has the options of the command `daskrun`."""

import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from daskrun.command import main

ROOT = Path(__file__).parents[2]


def test_the_readmes_lines_of_python_run(tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M)
    (tmp_path / "script.py").write_text(code)
    subprocess.run([sys.executable, tmp_path / "script.py"], check=True, timeout=200)


def test_the_reference_has_the_options_of_the_command():
    said = CliRunner().invoke(main, ["--help"], prog_name="daskrun", terminal_width=72).output
    assert said in (ROOT / "docs/reference/daskrun.md").read_text(encoding="utf-8")
