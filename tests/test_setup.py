"""One source of pins, held together; the package's modules stay apart."""

import ast
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement

from workshop_utils.tool.check import run_checks

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workshop_utils"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {path.name: path.read_text() for path in (ROOT / "requirements.txt", ROOT / "requirements-test.txt")}
EXTRAS = PROJECT["optional-dependencies"]
WITH_PINS = {  # each file with the ranges that it has to answer; benchmarks alone need `peers`
    "requirements.txt": PROJECT["dependencies"] + EXTRAS["lab"],
    "requirements-test.txt": [text for name in EXTRAS if name not in ("lab", "peers") for text in EXTRAS[name]],
}
UV = Path(sys.executable).with_name("uv")
AN_ENGINEERS_PROGRAM = """
from workshop_utils import cluster, ddp, horovod, inference, results, training

def train():
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_rank(), total.item()

if __name__ == "__main__":
    with cluster.start_cluster(2) as client:
        print(ddp.run(client, train))
"""
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())


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
def test_every_pin_has_hashes_and_no_address(file):
    blocks = re.split(r"\n(?=\S)", PINS[file].strip())
    assert len(blocks) == len(pins(file))
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in PINS[file] and "index" not in PINS[file]


def test_an_attendee_installs_nothing_that_only_tests_need():
    lab, tests = ({pin.name for pin in pins(name)} for name in PINS)
    assert lab >= {"jupyterlab", "torch", "dask-jobqueue"} and tests >= {"pytest", "sphinx", "lightning", "asyncssh"}
    assert not lab & {"pytest", "sphinx", "lightning", "asyncssh"}


def test_both_files_pin_a_package_alike():
    lab, tests = pins("requirements.txt"), pins("requirements-test.txt")
    for pin in tests:
        versions = [other.specifier for other in lab if other.name == pin.name]
        assert not versions or pin.specifier in versions, pin.name


def test_this_environment_has_the_pinned_versions():
    for pin in pins(*PINS):
        if pin.marker is None or pin.marker.evaluate():
            assert importlib.metadata.version(pin.name) == next(iter(pin.specifier)).version


@pytest.mark.parametrize(("build", "lacks_cuda"), [("+cpu", False), ("", True)])
def test_pytorch_for_cpus_is_checked_without_the_packages_of_cuda(build, lacks_cuda, monkeypatch, tmp_path):
    pins = tmp_path / "requirements.txt"
    pins.write_text("torch==2.15.0\nnvidia-nccl==2.29\ntriton==3.8\n")
    installed = [SimpleNamespace(name="torch", version=f"2.15.0{build}")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    _, (name, ok, text) = islice(run_checks(pins), 2)
    assert name == "packages" and ok != lacks_cuda, text


@pytest.fixture
def wheel_for_cpus(tmp_path):
    """A wheel that is named as PyTorch's for CPUs; no pin has its hash."""
    (pinned,) = [next(iter(pin.specifier)).version for pin in pins("requirements.txt") if pin.name == "torch"]
    release = f"torch-{pinned}+cpu"
    path = tmp_path / f"{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        about = {
            "METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {pinned}+cpu\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }
        for name, text in about.items():
            wheel.writestr(f"{release}.dist-info/{name}", text)
    return path


@pytest.fixture
def venv(tmp_path):
    """A virtual environment without a GPU, whose `uv` notes what it is asked for and does what `uv.does` says."""
    folder, called = tmp_path / "venv", tmp_path / "called"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    called.touch()

    def does(for_cpus=f'exec {UV} "$@"', pins="exit 0"):
        write_script(
            folder / "bin/uv",
            f'echo "$@" >>{called}\ncase "$*" in *"--torch-backend cpu"*) {for_cpus} ;; *) {pins} ;; esac',
        )

    write_script(tmp_path / "nvidia-smi", "echo No devices were found; exit 6")
    does()
    return SimpleNamespace(folder=folder, does=does, called=lambda: called.read_text().splitlines())


def write_script(path, lines):
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def install(venv, *wheels, **env):
    """Run tools/install.sh; return its CompletedProcess and what uv was asked to install at the end: cpu or pins."""
    env = {"PATH": f"{venv.folder.parent}:{os.environ['PATH']}", "UV_CACHE_DIR": str(venv.folder / "cache"), **env}
    command = [ROOT / "tools/install.sh", venv.folder, *wheels]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
    real = [call for call in venv.called() if "--dry-run" not in call]
    return done, ["cpu" if "--torch-backend cpu" in call else "pins" for call in real]


def make(*words, folder=ROOT, **env):
    """Run make as from a shell: `make unit`, which may run this, hands down settings of its own."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS")) and name != "CPU"
    }
    return subprocess.run(["make", *words], cwd=folder, env={**own, **env}, capture_output=True, text=True)


def for_cpus(venv):
    return (venv.folder / ".cpu").exists()


def test_pytorch_for_cpus_installs_although_its_hashes_are_not_those_of_the_pins(wheel_for_cpus, venv, tmp_path):
    site = tmp_path / "site"
    found = f"{UV} pip install --quiet --no-deps --no-index --find-links {wheel_for_cpus.parent} --target {site}"
    # In place of the index that the script asks, which the tests may not reach.
    venv.does(
        f'while [ $# -gt 0 ]; do [ "$1" = --constraints ] && exec {found} --constraints "$2" torch; shift; done; exit 9'
    )
    assert install(venv, "1")[0].returncode == 0 and for_cpus(venv)
    assert [path.name for path in site.glob("torch-*")] == [
        wheel_for_cpus.name.replace("-py3-none-any.whl", ".dist-info")
    ]


@pytest.fixture(params=["does not resolve", "refuses", "never answers"])
def proxy(request):
    """The address of a proxy through which no index answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "never answers":
            server.listen()
        host = "no-such-host.invalid" if request.param == "does not resolve" else "127.0.0.1"
        yield f"http://{host}:{server.getsockname()[1]}"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pins are taken without a question")
def test_without_the_index_of_wheels_for_cpus_one_line_says_so_and_the_pins_are_installed(venv, proxy):
    venv.does(f'HTTPS_PROXY={proxy} ALL_PROXY={proxy} NO_PROXY= no_proxy= exec {UV} "$@"')
    begin = time.monotonic()
    done, installed = install(venv)
    assert (done.returncode, installed, for_cpus(venv)) == (0, ["pins"], False), done.stderr
    assert "--require-hashes" in venv.called()[-1] and "-r requirements.txt" in venv.called()[-1]
    assert time.monotonic() - begin < 30
    (line,) = [line for line in done.stdout.splitlines() if "cannot be had" in line]
    assert re.search(r"lookup|refused|timed out|no answer", line) and done.stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pins are taken without a question")
def test_an_index_that_trickles_is_given_up(venv):
    venv.does('case "$*" in *--dry-run*) exec sleep 300 ;; esac')
    done, installed = install(venv)
    assert (done.returncode, installed) == (0, ["pins"]) and "no answer within" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pins are taken without a question")
def test_an_index_that_answers_and_then_fails_leads_to_the_pins(venv):
    venv.does('case "$*" in *--dry-run*) exit 0 ;; *) echo "  cause: reset by peer" >&2; exit 2 ;; esac')
    done, installed = install(venv)
    assert (done.returncode, installed, for_cpus(venv)) == (0, ["cpu", "pins"], False)
    assert "(reset by peer)" in done.stdout and done.stderr == ""
    assert "--reinstall-package torch " in venv.called()[-1], "some of its wheels may be there already"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pins are taken without a question")
def test_an_index_that_answers_gives_the_wheels_for_cpus(venv):
    venv.does("exit 0")
    assert install(venv)[1] == ["cpu"] and for_cpus(venv)


def test_with_a_gpu_the_pins_are_installed_and_no_index_is_asked(venv, tmp_path):
    write_script(tmp_path / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'")
    assert install(venv)[1] == ["pins"] and len(venv.called()) == 1 and not for_cpus(venv)


def test_both_kinds_of_wheels_can_be_forced(venv, tmp_path):
    venv.does("exit 0")
    assert install(venv, "0")[1] == ["pins"] and len(venv.called()) == 1
    write_script(tmp_path / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'")
    assert install(venv, "1")[1] == ["pins", "cpu"] and for_cpus(venv)
    assert install(venv, "0")[1][-1] == "pins" and not for_cpus(venv)


def test_forced_wheels_for_cpus_that_cannot_be_had_are_an_error_with_its_cure(venv):
    venv.does("echo no route >&2; exit 2")
    done, installed = install(venv, "1")
    assert done.returncode == 1 and installed == ["cpu"]
    assert "no route" in done.stderr and "Without CPU=1" in done.stderr


@pytest.mark.parametrize(
    ("had", "given", "wheels"),
    [
        ([], [], ""),
        ([], ["CPU=1"], "1"),
        ([], ["CPU=0"], "0"),
        ([".cpu"], [], "keep"),
        ([".cpu", ".ready"], [], "keep"),
        ([".cpu", ".ready"], ["CPU=0"], "0"),
        ([".ready"], [], "0"),
        ([".ready"], ["CPU=1"], "1"),
        ([".ready"], ["clean"], ""),
    ],
)
def test_make_remembers_which_wheels_an_environment_has(tmp_path, had, given, wheels):
    for name in had:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))  # older than the pins
    said = make("-n", *given, "setup", f"VENV={tmp_path}").stdout
    assert f"tools/install.sh {tmp_path} {wheels}\n" in said
    other = bool(given) and ".ready" in had and given != ["clean"]
    assert (f"make clean setup {given[0] if given else ''}" in said) == other


@pytest.mark.parametrize(("given", "code"), [("CPU=yes", 2), ("CPU=", 2), ("CPU=1", 0)])
def test_another_choice_of_wheels_is_refused(tmp_path, given, code):
    said = make("-n", "setup", given, f"VENV={tmp_path}")
    assert said.returncode == code and ("CPU=0" in said.stderr) == bool(code)


def test_a_processors_name_in_the_environment_is_no_choice(tmp_path):  # openSUSE sets it
    assert f"tools/install.sh {tmp_path} \n" in make("-n", "setup", f"VENV={tmp_path}", CPU="x86_64").stdout


def test_horovod_is_built_on_all_cores_also_by_make():
    script = (ROOT / "tools/build_horovod.sh").read_text()
    assert script.index("unset MAKEFLAGS") < script.index('pip" wheel')


def test_make_test_prints_the_minutes_of_its_parts_also_of_a_failed_one(tmp_path):
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    makefile = (ROOT / "Makefile").read_text()
    shutil.copy(ROOT / "Makefile", tmp_path)
    own = "setup-test horovod unit:\n\t@echo did $@\n"
    rules = re.sub(r"^(unit|setup-test|horovod):.*\n((\t.*)?\n)*", "", makefile, flags=re.MULTILINE)
    (tmp_path / "Makefile").write_text(rules + own)
    for name in ("ruff", "mypy", "python"):
        write_script(tmp_path / name, "exit 0")
    write_script(tmp_path / "mypy", "exit 3")
    done = make("test", f"VENV={tmp_path}", f"BIN={tmp_path}", folder=tmp_path)
    assert done.returncode and re.findall(r"^ +[\d.]+ min  (.*)$", done.stdout, re.MULTILINE) == [
        "set-up",
        "Horovod",
        "style",
        "style",
        "types",
        "in all",
    ]


def test_conda_takes_python_and_graphviz_from_conda_and_the_rest_from_the_pins():
    conda = [entry for entry in ENVIRONMENT["dependencies"] if isinstance(entry, str)]
    pip = next(entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict))
    assert conda == [f"python {PROJECT['requires-python']}", "graphviz", "pip"]
    assert pip[0] == "-r requirements.txt"
    assert not any("==" in entry for entry in pip)


# CI runs them on Linux with Python 3.11 and 3.13.
@pytest.mark.parametrize(
    ("platform", "python"),
    [
        ("x86_64-manylinux_2_28", "3.12"),
        ("x86_64-manylinux_2_28", "3.14"),
        ("aarch64-apple-darwin", "3.11"),
        ("aarch64-apple-darwin", "3.14"),
        ("x86_64-pc-windows-msvc", "3.11"),
        ("x86_64-pc-windows-msvc", "3.14"),
    ],
)
def test_the_pins_resolve_elsewhere(platform, python, tmp_path):
    command = [str(UV), "pip", "install", "--dry-run", "--target", str(tmp_path), "--python-platform", platform]
    command += [
        "--python-version",
        python,
        "--only-binary",
        ":all:",
        *(word for name in PINS for word in ("-r", str(ROOT / name))),
    ]
    env = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest macOS that PyTorch has wheels for
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert result.returncode == 0, result.stderr
    assert ("+ dask-cuda==" in result.stderr) == ("linux" in platform)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The `bin` of a new environment that has the package without an extra, and nothing else."""
    folder = tmp_path_factory.mktemp("base")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / PACKAGE.name)  # setuptools would leave its files in a checkout
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder / "venv"], check=True)
    install = [UV, "pip", "install", "--quiet", "--python", folder / "venv"]
    subprocess.run([*install, "--constraints", ROOT / "requirements.txt", source], check=True)
    yield folder / "venv/bin"
    shutil.rmtree(folder / "venv")  # pytest would keep its 5 GB


@pytest.mark.long
def test_the_base_launches_without_the_lab(base, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(AN_ENGINEERS_PROGRAM)
    for name in ("jupyterlab", "bokeh", "dask_cuda", "s3fs", "tensorboard", "plotnine", "IPython"):
        assert subprocess.run([base / "python", "-c", f"import {name}"], capture_output=True).returncode, name
    done = subprocess.run([base / "python", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[(0, 2.0), (1, 2.0)]\n", done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_the_command_needs_the_workshops_folder_and_says_so_in_a_line(base, tmp_path):
    done = subprocess.run([base / "workshop", "lab"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "notebooks" in done.stderr


@pytest.mark.parametrize("chooses", ["tools/try_oldest.py", "tests/machines/test_bare_debian.py"])
def test_tests_that_run_elsewhere_are_there(chooses):
    chosen = re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / chooses).read_text())
    assert (
        chosen and [f"{path}::{name}" for path, name in chosen if f"def {name}(" not in (ROOT / path).read_text()] == []
    )


def test_no_module_imports_upwards_or_in_a_circle():
    imports = {module_name(path): imported_modules(path) for path in PACKAGE.rglob("*.py")}
    imports = {name: {need for need in needs if need != name} for name, needs in imports.items()}
    order = []
    while imports:
        free = [name for name, needs in imports.items() if not needs & imports.keys()]
        assert free, f"a circle among {sorted(imports)}"
        order += free
        for name in free:
            del imports[name]
    assert order.index("dogs.breeds") < order.index("data") < order.index("inference") < order.index("tool.cli")


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def imported_modules(path):
    """The modules of the package that this file names in an import, wherever in it."""
    known, tree = {module_name(path) for path in PACKAGE.rglob("*.py")}, ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write the import in full"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    inside = {name.removeprefix("workshop_utils").lstrip(".") for name in names if name.startswith("workshop_utils")}
    return (inside & known) - {""}
