"""Whatever the workshop starts listens on loopback alone, and asks for a token where it can."""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from waiting import until

WORKSHOP = Path(sys.executable).parent / "workshop"
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PARTS = (
    *("workshop lab", "workshop room", "ipykernel", "script.py", "weed", "tensorboard"),
    *("multiprocessing.forkserver", "daskrun.child.template"),  # the workers, and the ranks' store
)
MARK = "WORKSHOP_TEST_OF_SOCKETS"  # an environment variable, by which all that this test has started is known
NOTEBOOK = """
import os, subprocess, sys, time
from pathlib import Path
import daskrun
from workshop_utils.cluster import start_cluster
from workshop_utils.object_store import local_object_store

def wait():
    time.sleep(1000)

if __name__ == "__main__":
    board = [Path(sys.executable).parent / "tensorboard", "--logdir", ".", "--port", "0"]
    with start_cluster(2) as client, local_object_store("."), subprocess.Popen(board):
        with daskrun.launch(client, wait) as job:
            while "in wait" not in job.stacks():
                time.sleep(0.2)
            Path("ready").touch()
            time.sleep(1000)
"""


def started(mark):
    """Return all processes with this mark, and their children: the S3 server gets no environment."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found |= {process, *process.children(recursive=True)}
    return found


def listening(mark):
    """Return {(program, address)} of all sockets on which marked processes listen."""
    found = set()
    for process in started(mark):
        with suppress(psutil.Error):
            program = " ".join(process.cmdline())
            for connection in process.net_connections("all"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((program, connection.laddr.ip))
    return found


def ask(address, **headers):
    """Return the status of the answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_all_sockets_of_a_running_workshop_are_on_loopback_and_the_lab_asks_for_its_token(tmp_path, told):
    shutil.copytree(NOTEBOOKS, tmp_path / "notebooks")
    (tmp_path / "script.py").write_text(NOTEBOOK)
    mark = secrets.token_hex(16)
    environment = {**os.environ, MARK: mark, "HOME": str(tmp_path), "WORKSHOP_CACHE": str(tmp_path / "cache")}
    logs = {name: tmp_path / f"{name}.log" for name in ("lab", "room", "script")}

    def said():
        return {name: log.read_text()[-2000:] for name, log in logs.items()}

    commands = {
        "lab": [WORKSHOP, "lab", "--no-browser"],
        "room": [WORKSHOP, "room"],
        "script": [sys.executable, "script.py"],
    }
    try:
        for name, command in commands.items():
            log = logs[name].open("w")
            subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        until(lambda: re.search(r"http://127\.0\.0\.1:\S+token=\w+", logs["lab"].read_text()), said)
        until(lambda: "WORKSHOP_ROOM=" in logs["room"].read_text(), said)
        until((tmp_path / "ready").exists, said)
        lab, token = re.search(r"(http://127\.0\.0\.1:\d+)/\S*token=(\w+)", logs["lab"].read_text()).groups()
        until(lambda: ask_or_none(f"{lab}/api"), said)
        assert ask(f"{lab}/api/kernels") == 403 and ask(f"{lab}/api/kernels?token=x") == 403
        kernels = urllib.request.Request(f"{lab}/api/kernels?token={token}", data=b"{}", method="POST")
        with urllib.request.urlopen(kernels, timeout=60) as answer:
            assert json.load(answer)["id"]  # a kernel listens on five ports
        until(lambda: any("ipykernel" in program for program, _ in listening(mark)), said)
        until(lambda: any("tensorboard" in program for program, _ in listening(mark)), said)
        found = listening(mark)
        for part in PARTS:
            assert any(part in program for program, _ in found), (part, found)
        assert {address for _, address in found} <= {"127.0.0.1", "::1"}, found
    finally:
        for process in started(mark):
            with suppress(psutil.Error):
                process.kill()
    told("all sockets of a running workshop", "lab, kernel, cluster, job, S3, room and TensorBoard: loopback alone")


def ask_or_none(address):
    with suppress(OSError):
        return ask(address)
    return None
