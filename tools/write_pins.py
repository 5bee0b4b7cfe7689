"""Write the pins of pyproject.toml's ranges: `make pins`.

requirements.txt holds what `make lab` installs; requirements-test.txt holds what the tests and the book add to it.
uv keeps every pin that is in them and still fits.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAB, TEST = ROOT / "requirements.txt", ROOT / "requirements-test.txt"
EXTRAS = ("test", "book", "clusters", "frameworks")  # `peers` is for benchmarks alone, and has no pins


def main():
    compile_pins(LAB, "--extra=lab")
    compile_pins(TEST, "--extra=lab", *(f"--extra={extra}" for extra in EXTRAS), f"--constraints={LAB.name}")
    # Compare whole entries: a test may need a package where the lab does not, such as on a newer Python.
    in_lab = set(entries(LAB.read_text()))
    added = [entry for entry in entries(TEST.read_text()) if entry not in in_lab]
    TEST.write_text("\n".join(added) + "\n")


def entries(pins):
    """Return the entries of a requirements file's text: each a pin with its marker and its hashes."""
    return re.split(r"\n(?=\S)", pins.strip())


def compile_pins(path, *options):
    uv = [Path(sys.executable).with_name("uv"), "pip", "compile", "pyproject.toml", f"--output-file={path.name}"]
    versions = ["--universal", "--python-version=3.11", "--generate-hashes"]
    bare = ["--no-header", "--no-emit-index-url", "--no-annotate", "--quiet"]
    subprocess.run([*uv, *versions, *bare, *options], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
