"""No page and no notebook has a misspelt word."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = "docs", "deploy", "notebooks", "workshop_utils", "daskrun", "benchmarks", "tools"


def test_no_word_is_misspelt():
    files = ["README.md", "CONTRIBUTING.md", *FOLDERS]
    command = [sys.executable, "-m", "codespell_lib", "--config", ROOT / ".codespellrc", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
