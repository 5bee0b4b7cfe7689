"""What GitHub and Codespaces are told to run exists here, needs no secret, and uses the same pins."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
from try_newest import LONGEST_REPORT, report, versions  # noqa: E402

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
INSTALL = ROOT / "tools/install.sh"
PINNED = "torch==2.15.0 \\\n    --hash=sha256:aa\nnumpy==2.4 ; python_version < '4' \\\n    --hash=sha256:bb\n"
PINNED += "numpy==1.0 ; python_version < '3' \\\n    --hash=sha256:cc\n"


def steps(path):
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_make_needs_no_secret_and_may_write_only_what_it_must(path):
    called = [word for step in steps(path) for word in re.findall(r"\bmake (\S+)", step.get("run", ""))]
    assert called and set(called) <= TARGETS
    assert "secrets." not in path.read_text()
    assert yaml.safe_load(path.read_text())["permissions"]["contents"] == "read"


def test_the_weekly_workflow_opens_an_issue_with_the_report_that_make_newest_writes():
    (issue,) = [step for step in steps(ROOT / ".github/workflows/newest.yml") if "gh issue" in step.get("run", "")]
    assert "--body-file build/newest/report.md" in issue["run"] and issue["if"].startswith("failure()")


def test_a_report_names_what_changed_and_what_the_lessons_printed():
    newest = PINNED.replace("2.15.0", "2.16.0rc1")
    text = report(PINNED, newest, "\x1b[91m04-parallel-inference, on one core: differs after 9 s\x1b[0m")
    assert "| torch | 2.15.0 | 2.16.0rc1 |" in text and "numpy" not in text
    assert "\n04-parallel-inference, on one core: differs after 9 s\n" in text
    assert "No pin has a newer version." in report(PINNED, PINNED, "")
    assert len(report(PINNED, newest, "x" * 100_000)) < LONGEST_REPORT + 1_000


def test_versions_are_read_from_pins_with_and_without_hashes():
    assert versions(PINNED) == {"torch": "2.15.0", "numpy": "2.4"}
    assert versions("dask[complete]==2026.7.1\n") == {"dask": "2026.7.1"}


def test_codespaces_installs_the_pins():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert container["updateContentCommand"] == "make setup"
    assert container["remoteEnv"]["PATH"].startswith("${containerWorkspaceFolder}/.venv/bin:")
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).exists()
    assert "requirements.txt" in INSTALL.read_text()
    assert os.access(INSTALL, os.X_OK)
    assert "python:3.11" in (ROOT / ".devcontainer/Dockerfile").read_text()


DOCKERFILE = (ROOT / "deploy/kubernetes/Dockerfile").read_text()


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A folder with what the Dockerfile copies into /workshop."""
    folder = tmp_path_factory.mktemp("workshop")
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, flags=re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder / target)
            else:
                shutil.copy(ROOT / source, folder / target)
    return folder


def test_the_image_has_every_file_that_a_notebook_opens(image):
    named = {
        (path.name, name)
        for path in (ROOT / "notebooks").glob("*.ipynb")
        for name in re.findall(
            r"\.\./((?:img|docs|benchmarks|workshop_utils)[\w./-]*)", path.read_text(encoding="utf-8")
        )
    }
    assert ("quiz.ipynb", "docs/quiz.json") in named
    assert [name for name in sorted(named) if not (image / name[1].rstrip(".")).exists()] == []


def test_the_images_jupyterlab_shows_the_figures_of_the_notebooks(image):
    command = json.loads(re.search(r"^CMD (.*)$", DOCKERFILE, flags=re.MULTILINE)[1])
    for helm in ("cpu", "gpu"):
        values = yaml.safe_load((ROOT / f"deploy/kubernetes/helm-{helm}.yaml").read_text())
        assert values["jupyter"]["command"] == command
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.replace("0.0.0.0", "127.0.0.1").replace("=/workshop", f"={image}") for word in command[1:]]
    words += ["--allow-root", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=secret"]
    server = subprocess.Popen([Path(sys.executable).with_name("jupyter"), *words], cwd=image, stderr=subprocess.DEVNULL)
    try:
        for address in ("files/img/cluster.svg", "files/docs/quiz.json", "lab/tree/notebooks"):
            assert answer(f"http://127.0.0.1:{port}/{address}?token=secret", server) == 200, address
    finally:
        server.kill()
        server.wait()


def answer(address, server):
    """Return the status that a server answers with, once it has started."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=60) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            time.sleep(0.1)
    raise AssertionError("JupyterLab did not start")


def test_the_citation_has_the_version_and_the_licence_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
