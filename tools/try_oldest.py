"""Run some of the tests with the lowest versions that the ranges of the base allow: `make oldest`.

They have an environment of their own in build/oldest, with the oldest Python that the package allows. Of the extras it
has s3fs alone, which tests/conftest.py imports.
"""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/oldest"
UV = Path(sys.executable).with_name("uv")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = ("pytest", "pytest-timeout", "playwright")  # at the versions that run this program
TESTS = [
    "tests/test_precision.py",
    "tests/test_cluster.py::test_leaving_a_joined_cluster_leaves_it_running",
    "tests/test_cluster.py::test_workers_leave_the_allocator_as_glibc_has_it",
    "tests/test_ddp.py::test_arguments_arrive_and_results_are_in_rank_order",
    "tests/test_ddp.py::test_a_rank_that_raises_ends_the_job_with_its_own_error",
    "tests/test_ddp.py::test_a_killed_rank_is_named",
    "tests/test_ddp.py::test_a_hang_says_where_each_rank_stands",
    "tests/test_ddp.py::test_a_job_goes_on_from_its_checkpoint_after_a_death",
    "tests/test_inference.py::test_a_row_is_what_a_plain_loop_says",
    "tests/test_results.py::test_files_arrive_in_their_places",
    "tests/test_training.py::test_two_ranks_end_with_the_weights_of_one_process",
]


def main():
    python = install()
    command = [python, "-m", "pytest", "-q", "-m", "not long and not clusters and not gpu", *(sys.argv[1:] or TESTS)]
    sys.exit(subprocess.run(command, cwd=ROOT).returncode)


def install():
    """Make a virtual environment with the lowest versions; return its Python."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    ranges, pins, venv = FOLDER / "requirements.in", FOLDER / "requirements.txt", FOLDER / "venv"
    s3fs = [text for text in PROJECT["optional-dependencies"]["lab"] if Requirement(text).name == "s3fs"]
    ranges.write_text("\n".join(PROJECT["dependencies"] + s3fs))
    pins.unlink(missing_ok=True)  # its pins would be kept
    lowest = ["--resolution=lowest-direct", f"--python-version={oldest_python()}"]
    quiet = ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url"]
    run([UV, "pip", "compile", ranges, *lowest, *quiet, "--output-file", pins])
    run([UV, "venv", "--quiet", "--clear", "--python", oldest_python(), venv])
    pip = [UV, "pip", "install", "--quiet", "--python", venv]
    run([*pip, "--requirements", pins, *(f"{tool}=={importlib.metadata.version(tool)}" for tool in TOOLS)])
    run([*pip, "--no-deps", "--editable", "."])
    return venv / "bin/python"


def oldest_python():
    (lowest,) = [one.version for one in SpecifierSet(PROJECT["requires-python"]) if one.operator == ">="]
    return lowest


def run(command):
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
