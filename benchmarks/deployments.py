"""What the scripts of benchmarks/deployments print: clusters over SSH, and of Slurm, each real and on this machine.

    python benchmarks/deployments.py

As root, with sshd and Slurm installed (tests/clusters/install.sh). A sshd listens on two loopback addresses and takes a
key made for it; Slurm has two nodes, as in tests/clusters. The scripts run as a user would run them. Notebook 10 shows
what was printed here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from record import write_result

HERE = Path(__file__).with_suffix("")
sys.path.insert(0, str(HERE.parents[1] / "tests/clusters"))
from slurm import slurm  # noqa: E402

HOSTS, SSH_PORT = ("127.0.0.2", "127.0.0.3"), 2222
SSHD = """
Port {port}
{listen}
HostKey {home}/host_key
AuthorizedKeysFile {home}/.ssh/key.pub
StrictModes no
SetEnv PYTHONPATH={python_path}
"""
CONFIG = """
Host *
  Port {port}
  IdentityFile {home}/.ssh/key
"""
WITHIN_S = 200


@contextmanager
def sshd(home):
    """Serve SSH on loopback; `home` becomes a home folder whose .ssh has the key and knows the hosts."""
    (home / ".ssh").mkdir(mode=0o700)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists
    for key in (home / "host_key", home / ".ssh/key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    names = ("localhost", "127.0.0.1", *HOSTS)
    host_key = Path(f"{home}/host_key.pub").read_text()
    (home / ".ssh/known_hosts").write_text("".join(f"[{name}]:{SSH_PORT} {host_key}" for name in names))
    (home / ".ssh/config").write_text(CONFIG.format(port=SSH_PORT, home=home))
    listen = "\n".join(f"ListenAddress {address}" for address in names[1:])
    python_path = os.environ.get("PYTHONPATH", "")
    (home / "sshd_config").write_text(SSHD.format(port=SSH_PORT, listen=listen, home=home, python_path=python_path))
    with open(home / "sshd.log", "w") as log:
        server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", home / "sshd_config"], stderr=log)
    try:
        time.sleep(1)
        yield os.environ | {"HOME": str(home)}
    finally:
        server.terminate()
        server.wait()


def printed(command, folder, environment):
    """Return what a command prints in a folder, as lines, without those of Dask's log."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WITHIN_S)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
    return [line.rstrip() for line in done.stdout.splitlines() if line.strip() and " - INFO - " not in line]


def main():
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the scripts call `workshop`, the batch script python
    lines = {}
    with tempfile.TemporaryDirectory() as folder, sshd(Path(folder)) as environment:
        lines["over_ssh.py"] = printed([sys.executable, "over_ssh.py", *HOSTS], HERE, environment)
    with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as folder, slurm(folder) as environment:
        shutil.copytree(HERE, here, dirs_exist_ok=True)  # Slurm writes its logs beside the scripts
        environment |= {"PATH": f"{path}:{environment['PATH']}"}
        lines["slurm_cluster.py"] = printed([sys.executable, "slurm_cluster.py"], here, environment)
        batch = ["sbatch", "--wait", "--output=job.log", "slurm_runner.sbatch"]
        lines["slurm_runner.sbatch"] = printed(batch, here, environment)
        lines["slurm_runner.py"] = printed(["cat", "job.log"], here, environment)
    for name, said in lines.items():
        print(f"\n{name}", *said, sep="\n")
    print("\n", write_result("deployments", {"printed": lines}))


if __name__ == "__main__":
    main()
