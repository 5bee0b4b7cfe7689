"""Dask's SSHCluster starts workers that suit PyTorch on hosts that an SSH server lets it into."""

import getpass
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import dask
import pytest
from hosts import ISOLATED, PYTHONPATH, lasting_port
from waiting import until

import daskrun
from workshop_utils.cluster import start_cluster
from workshop_utils.object_store import LOOPBACK

asyncssh = pytest.importorskip("asyncssh", reason="needs: pip install asyncssh")
from distributed import SSHCluster  # noqa: E402

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(not SSHD, reason="needs: apt install openssh-server"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give the server a namespace to end with"),
]
CONFIG = """
Port {port}
ListenAddress {host}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""
# SSHCluster takes Dask's settings of this process to each host. To `export` what `workshop worker-env` prints before
# Jupyter starts does the same as this. Only None takes a variable away: each host merges this with settings of its own.
FOR_PYTORCH = {
    "distributed.worker.daemon": False,
    "distributed.nanny.pre-spawn-environ": {"MALLOC_TRIM_THRESHOLD_": None, "OMP_NUM_THREADS": os.cpu_count()},
}


@pytest.fixture(scope="module")
def login(tmp_path_factory):
    """Run an SSH server with keys of its own; yield the options of asyncssh that lead in."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        (folder / name).touch(0o600)  # or it is not taken
        key.write_private_key(str(folder / name))
        key.write_public_key(str(folder / f"{name}.pub"))
    port = lasting_port()
    (folder / "config").write_text(CONFIG.format(folder=folder, port=port, host=LOOPBACK))
    (folder / "known_hosts").write_text(f"[{LOOPBACK}]:{port} {(folder / 'host.pub').read_text()}")
    Path("/run/sshd").mkdir(exist_ok=True)  # without it, the server of Debian does not start
    isolated = [word for word in ISOLATED if word not in ("--net", "--uts")]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen([*isolated, SSHD, "-D", "-e", "-f", str(folder / "config")], stderr=log)
    try:
        until(lambda: "Server listening" in (folder / "log").read_text(), (folder / "log").read_text)
        yield {
            "port": port,
            "username": getpass.getuser(),
            "client_keys": [str(folder / "user")],
            "known_hosts": str(folder / "known_hosts"),
            "config": None,
            "agent_path": None,
        }
    finally:
        server.kill()  # and all that it has started
        server.wait()


@pytest.fixture(scope="module")
def client(login):
    # Any other variable is set by a word before Python's.
    python = f"env PYTHONPATH={PYTHONPATH} SAYS=hello {sys.executable}"
    options = {
        "connect_options": login,
        "remote_python": python,
        "worker_options": {"nthreads": 1, "host": LOOPBACK},
        "scheduler_options": {"host": LOOPBACK, "port": 0, "dashboard": False},
    }
    with (
        dask.config.set(FOR_PYTORCH),
        SSHCluster([LOOPBACK] * 3, **options) as cluster,  # a scheduler and two workers
        start_cluster(address=cluster.scheduler_address) as client,
    ):
        client.wait_for_workers(2, timeout=240)
        yield client


def test_the_environment_arrives_at_workers(client):
    def about():
        from multiprocessing import current_process

        return current_process().daemon, *map(os.environ.get, ("MALLOC_TRIM_THRESHOLD_", "SAYS", "SSH_CONNECTION"))

    told = list(client.run(about).values())
    assert len(told) == 2 and all(one[:3] == (False, None, "hello") and LOOPBACK in one[3] for one in told)
    with warnings.catch_warnings(action="error"):  # of workers that do not suit PyTorch
        start_cluster(address=client.scheduler.address).close()


def test_ranks_meet(client, sum_up):
    assert daskrun.run(client, sum_up, time_limit=240) == [3.0, 3.0]


def test_a_server_whose_key_is_unknown_is_not_trusted(login, tmp_path):
    (tmp_path / "known_hosts").touch()
    options = {"connect_options": login | {"known_hosts": str(tmp_path / "known_hosts")}}
    with pytest.raises(Exception, match="Host key is not trusted"):
        SSHCluster([LOOPBACK] * 2, **options)
