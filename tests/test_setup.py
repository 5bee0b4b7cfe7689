"""What `make setup` installs: ranges that have pins, wheels that suit the machine, a package whose parts stay apart."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LAUNCHER = tomllib.loads((ROOT / "daskrun/pyproject.toml").read_text())["project"]
PINS = {path.name: path.read_text() for path in (ROOT / "requirements.txt", ROOT / "requirements-test.txt")}
EXTRAS = PROJECT["optional-dependencies"]
WITH_PINS = {  # each file with the ranges that it has to answer; benchmarks alone need `peers`
    "requirements.txt": [*PROJECT["dependencies"], *EXTRAS["lab"]],
    "requirements-test.txt": [text for name in EXTRAS if name not in ("lab", "peers") for text in EXTRAS[name]],
}
UV = Path(sys.executable).with_name("uv")
OF_THE_WORKSHOP = "from workshop_utils import classify, cluster, results, train\n"
AN_ENGINEERS_PROGRAM = f"""
import daskrun
from workshop_utils import horovod
{OF_THE_WORKSHOP}
def train():
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_rank(), total.item()

if __name__ == "__main__":
    with cluster.start_cluster(2) as client:
        print(daskrun.run(client, train))
"""


def pins(*files):
    lines = re.findall(r"^(\S+==[^\\\n]+)", "".join(PINS[name] for name in files), flags=re.MULTILINE)
    return [Requirement(line.strip()) for line in lines]


@pytest.mark.parametrize("file", PINS)
def test_every_range_has_a_pin_inside_it(file):
    for requirement in map(Requirement, WITH_PINS[file]):
        # The lab has a part of what the tests need.
        found = [pin for pin in pins(*dict.fromkeys(["requirements.txt", file])) if pin.name == requirement.name]
        versions = [next(iter(pin.specifier)).version for pin in found]
        assert versions, f"{requirement.name} has no pin: run `make pins`"
        assert all(requirement.specifier.contains(version) for version in versions), requirement


@pytest.mark.parametrize("file", PINS)
def test_each_pin_has_hashes_and_nothing_names_an_index(file):
    entries = re.split(r"\n(?=\S)", PINS[file].strip())
    assert len(entries) > 50 and all(re.search(r"==\S.* \\\n +--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert not re.search(r"://|--(extra-)?index|--find-links| @ ", PINS[file])


@pytest.fixture
def venv(tmp_path):
    """An environment on a machine without a GPU, whose `uv` notes what it is asked for and does what `uv.does` says."""
    folder, called, constraints = tmp_path / "venv", tmp_path / "called", tmp_path / "constraints"
    (folder / "bin").mkdir(parents=True)

    def does(for_cpus):
        keep = f'while [ $# -gt 1 ]; do [ "$1" != --constraints ] || cp "$2" {constraints}; shift; done'
        is_for_cpus = f'case "$*" in *"--torch-backend cpu"*) {keep}; {for_cpus} ;; esac'
        write_script(folder / "bin/uv", f'echo "$@" >>{called}\nwords="$*"\n{is_for_cpus}')

    write_script(tmp_path / "nvidia-smi", "echo No devices were found; exit 6")
    return SimpleNamespace(folder=folder, does=does, called=called, constraints=constraints)


def write_script(path, lines):
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def install(venv, *wheels):
    """Run tools/install.sh; return its CompletedProcess and what uv was asked to install at the end: cpu or pins."""
    env = {**os.environ, "PATH": f"{venv.folder.parent}:{os.environ['PATH']}"}
    command = [ROOT / "tools/install.sh", venv.folder, *wheels]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    real = [call for call in venv.called.read_text().splitlines() if "--dry-run" not in call]
    return done, ["cpu" if "--torch-backend cpu" in call else "pins" for call in real]


NO_ANSWER = 'echo "  cause: connection refused" >&2; exit 2'
BREAKS_OFF = 'case "$words" in *--dry-run*) exit 0 ;; *) echo "  cause: reset by peer" >&2; exit 2 ;; esac'


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pins are taken without a question")
@pytest.mark.parametrize(
    ("index", "gpu", "wheels", "installed", "said"),  # gpu: its driver, and compute capability
    [
        ("exit 0", None, [], ["cpu"], ""),
        (NO_ANSWER, None, [], ["pins"], "(connection refused)"),
        (BREAKS_OFF, None, [], ["cpu"], "reset by peer\nThe packages were not installed"),
        (NO_ANSWER, None, ["keep"], ["pins"], "(connection refused)"),
        ("exit 0", "580.65.06", [], ["pins"], ""),
        ("exit 0", "580.65.06 12.0", [], ["pins"], "from PyPI"),
        ("exit 0", "580.65.06 7.0", [], ["cpu"], "7.5 or higher, and this machine's has 7.0"),
        ("exit 0", "550.54.15", [], ["cpu"], "or newer, and this machine has 550.54.15"),
        (NO_ANSWER, "550.54.15", [], ["pins"], "It cannot use this machine's GPU"),
        ("exit 0", "[N/A]", [], ["pins"], ""),
        ("exit 0", None, ["0"], ["pins"], ""),
        ("exit 0", "580.65.06", ["1"], ["cpu"], ""),
        (NO_ANSWER, None, ["1"], ["cpu"], "CPU=0 takes it from PyPI"),
    ],
)
def test_a_machine_gets_the_wheels_that_suit_it_and_the_pins_where_those_cannot_be_had(
    venv, index, gpu, wheels, installed, said
):
    venv.does(index)
    if gpu:
        driver, _, capability = gpu.partition(" ")
        answers = f"-L) echo 'GPU 0: NVIDIA (UUID: GPU-1)' ;; *compute_cap*) echo {capability} ;; *) echo '{driver}' ;;"
        answer = f"case $1 in {answers} esac"
        write_script(venv.folder.parent / "nvidia-smi", answer)
    if wheels == ["keep"]:
        (venv.folder / ".cpu").touch()
    done, found = install(venv, *wheels)
    assert found == installed and said in done.stdout + done.stderr
    assert done.returncode == (installed == ["cpu"] and index != "exit 0"), done.stderr
    if done.returncode == 0:
        assert (venv.folder / ".cpu").exists() == (installed[-1] == "cpu")
    if installed[-1] == "pins":
        asked = venv.called.read_text().splitlines()[-1]
        assert "--require-hashes" in asked
        assert ("--reinstall-package torch " in asked) == (wheels == ["keep"]), "both kinds have the same version"


@pytest.mark.parametrize("wheels", ["0", "1"])
def test_an_installation_that_fails_ends_with_what_to_do(venv, wheels):
    write_script(venv.folder / "bin/uv", f"echo >>{venv.called}; echo No space left on device >&2; exit 2")
    done, _ = install(venv, wheels)
    assert done.returncode == 1 and "No space left on device\nThe packages were not installed" in done.stderr


@pytest.mark.parametrize("wheels", [[], ["0"], ["1"], ["keep"]])
def test_a_mac_takes_the_pins_whatever_is_asked_for(venv, wheels):
    venv.does("exit 0")
    write_script(venv.folder.parent / "uname", "echo Darwin")
    done, found = install(venv, *wheels)
    assert found == ["pins"] and "GB" not in done.stdout, done.stderr


def test_wheels_for_cpus_need_no_hash_and_all_others_do(venv):
    venv.does("exit 0")
    install(venv, "1")
    blocks = re.split(r"\n(?=\S)", venv.constraints.read_text().strip())
    assert len(blocks) == len(pins("requirements.txt"))
    assert all(("--hash=" in block) != block.startswith("torch") for block in blocks)


def make(*words, **env):
    """Run make as from a shell: a make that runs this hands down settings of its own."""
    own = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS")) and name != "CPU"}
    return subprocess.run(["make", *words], cwd=ROOT, env={**own, **env}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("had", "given", "wheels"),
    [
        ([], [], ""),
        ([".cpu", ".ready"], [], "keep"),
        ([".cpu", ".installing"], [], ""),
        ([".cpu", ".ready"], ["CPU=0"], "0"),
        ([".ready"], [], "0"),
        ([".ready"], ["CPU=1"], "1"),
    ],
)
def test_make_remembers_which_wheels_an_environment_has(tmp_path, had, given, wheels):
    for name in had:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))  # older than the pins
    said = make("-n", *given, "setup", f"VENV={tmp_path}", CPU="x86_64").stdout  # openSUSE sets CPU to the processor
    assert f"tools/install.sh {tmp_path} {wheels}\n" in said
    other = bool(given) and ".ready" in had
    assert (f"make clean setup {given[0] if given else ''}" in said) == other


def test_another_choice_of_wheels_is_refused(tmp_path):
    said = make("-n", "setup", "CPU=yes", f"VENV={tmp_path}")
    assert said.returncode and "CPU=0" in said.stderr


@pytest.mark.weekly
@pytest.mark.parametrize("platform", ["x86_64-manylinux_2_28", "aarch64-apple-darwin", "x86_64-pc-windows-msvc"])
@pytest.mark.parametrize("python", ["3.11", "3.14"])
def test_the_pins_resolve_elsewhere(platform, python, tmp_path):
    command = [UV, "pip", "install", "--dry-run", "--target", tmp_path, "--only-binary", ":all:"]
    command += ["--python-platform", platform, "--python-version", python]
    command += [word for name in PINS for word in ("-r", ROOT / name)]
    env = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest macOS that PyTorch has wheels for
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert result.returncode == 0, result.stderr
    assert ("+ dask-cuda==" in result.stderr) == ("linux" in platform)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of both packages, as setuptools would leave its files in a checkout."""
    folder = tmp_path_factory.mktemp("sources")
    shutil.copytree(ROOT / "workshop_utils", folder / "workshop_utils")
    shutil.copytree(ROOT / "daskrun", folder / "daskrun")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.parametrize("package", [".", "daskrun"])
def test_a_wheel_has_all_of_its_packages_and_asks_no_index_for_daskrun(package, sources, tmp_path):
    command = [UV, "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", tmp_path]
    subprocess.run([*command, "--python", sys.executable, sources / package], check=True)
    (metadata,) = map(PathDistribution, tmp_path.glob("*.dist-info"))
    needs = [Requirement(text) for text in metadata.requires]
    assert "daskrun" not in {requirement.name for requirement in needs}
    assert list(metadata._path.glob("licenses/LICENSE"))
    folder = ROOT / ("workshop_utils" if package == "." else "daskrun/src/daskrun")
    tracked = {path.relative_to(folder) for path in folder.rglob("*") if path.suffix not in ("", ".pyc", ".so")}
    assert tracked <= {path.relative_to(tmp_path / folder.name) for path in (tmp_path / folder.name).rglob("*")}


OWNS = {"daskrun": ("daskrun", "bin/daskrun"), "workshop-dask-pytorch": ("workshop_utils", "bin/workshop")}


@pytest.mark.parametrize("order", [(".", "daskrun"), ("daskrun", ".")])
def test_each_distribution_owns_its_package_and_command_and_can_be_uninstalled_alone(sources, tmp_path, order):
    clone, there = tmp_path / "clone", tmp_path / "there"
    shutil.copytree(sources, clone)
    (clone / "build/lib/daskrun").mkdir(parents=True)  # as an older checkout's `pip install .` left it
    (clone / "build/lib/daskrun/__init__.py").touch()
    options = ["--quiet", "--target", there, "--python", sys.executable]
    for removed, (package, command) in OWNS.items():
        for folder in order:
            install = [UV, "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", *options]
            subprocess.run([*install, clone / folder], check=True)
        assert all((there / name).exists() for names in OWNS.values() for name in names)
        files = {d.name: set(d.files) for d in map(PathDistribution, there.glob("*.dist-info"))}
        assert files.keys() == OWNS.keys() and not set.intersection(*files.values())
        subprocess.run([UV, "pip", "uninstall", *options, removed], check=True)
        assert not (there / package).exists() and not (there / command).exists()
        (kept,) = map(PathDistribution, there.glob("*.dist-info"))
        assert not [file for file in kept.files if not kept.locate_file(file).exists()]


def test_the_workshop_without_its_launcher_names_what_it_lacks(tmp_path):
    shutil.copytree(ROOT / "workshop_utils", tmp_path / "workshop_utils")
    (tmp_path / "daskrun").mkdir()  # as beside it in a clone
    command = [sys.executable, "-IS", "-c", f"import sys; sys.path.append({str(tmp_path)!r}); import workshop_utils"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr and "pip install ./daskrun" in done.stderr


def test_what_the_launcher_needs_the_workshop_needs_too():
    ours = {Requirement(text).name: str(Requirement(text).specifier) for text in PROJECT["dependencies"]}
    theirs = {Requirement(text).name: str(Requirement(text).specifier) for text in LAUNCHER["dependencies"]}
    assert theirs.items() <= ours.items()


@pytest.fixture(scope="module")
def base(tmp_path_factory, sources):
    """The `bin` of a new environment that has daskrun, and nothing else."""
    folder = tmp_path_factory.mktemp("base")
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder / "venv"], check=True)
    install_package(folder / "venv", sources / "daskrun")
    yield folder / "venv/bin"
    shutil.rmtree(folder / "venv")  # pytest would keep its 5 GB


def install_package(environment, package):
    command = [UV, "pip", "install", "--quiet", "--python", environment]
    subprocess.run([*command, "--constraints", ROOT / "requirements.txt", package], check=True)


def run(base, tmp_path, program):
    (tmp_path / "program.py").write_text(program)
    command = [base / "python", tmp_path / "program.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)


@pytest.mark.weekly
def test_daskrun_launches_alone_and_then_the_base_of_the_workshop_without_the_lab(base, sources, tmp_path):
    alone = AN_ENGINEERS_PROGRAM.replace(OF_THE_WORKSHOP, "").replace("cluster.start_cluster", "daskrun.start_local")
    done = run(base, tmp_path, alone)
    assert done.stdout == "[(0, 2.0), (1, 2.0)]\n", done.stdout + done.stderr
    install_package(base.parent, sources)
    for name in ("jupyterlab", "bokeh", "dask_cuda", "s3fs", "tensorboard", "plotnine", "IPython"):
        assert subprocess.run([base / "python", "-c", f"import {name}"], capture_output=True).returncode, name
    done = run(base, tmp_path, AN_ENGINEERS_PROGRAM)
    assert done.stdout == "[(0, 2.0), (1, 2.0)]\n", done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_image_has_every_file_that_a_notebook_opens():
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "deploy/kubernetes/Dockerfile").read_text(), flags=re.MULTILINE)
    copied = [source.rstrip("/") for line in copied for source in line.split()]
    opened = re.compile(r"\.\./((?:img|docs|benchmarks|workshop_utils)[\w./-]*)")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for name in opened.findall(path.read_text(encoding="utf-8")):
            name = name.rstrip("./")
            assert any(name == source or name.startswith(f"{source}/") for source in copied), (path.name, name)
