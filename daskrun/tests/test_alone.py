"""daskrun needs nothing of the workshop."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "src").rglob("*.py")
)
PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import importlib, os
for module in {modules}:
    importlib.import_module(module)
import daskrun

if __name__ == "__main__":
    client = daskrun.start_local(1)
    print(daskrun.run(client, os.getenv, "RANK"))
    client.shutdown()
"""


def test_it_runs_where_the_workshop_and_what_that_needs_cannot_be_imported(tmp_path):
    hidden = {"workshop_utils", "pandas", "torchvision", "IPython", "s3fs", "PIL", "platformdirs"}
    script = tmp_path / "script.py"
    # The page and its chart are imported where Dask has a dashboard: bokeh looks whether there is pandas.
    modules = [name for name in MODULES if name not in ("daskrun.preloaded", "daskrun.page", "daskrun.chart")]
    script.write_text(PROGRAM.format(hidden=hidden, modules=modules))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=150)
    assert done.stdout == "['0']\n", done.stderr
