"""The code of the cheat sheet runs, from top to bottom, as in a notebook."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/cheat-sheet.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_code_runs_from_top_to_bottom():
    names = {"__name__": "__main__"}  # functions go by value to the workers
    try:
        for block in BLOCKS:
            exec(block, names)
        assert names["future"].result() == 1024 and names["plan"].compute() == 6
        assert set(names["job"].metrics().columns) >= {"rank", "epoch", "loss"}
    finally:
        names["client"].shutdown()
