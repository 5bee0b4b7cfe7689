"""A real Slurm of two nodes on this machine, with a munged of its own, in a PID namespace that takes all with it."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from hosts import lasting_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "setpriv", "unshare")
ISOLATED = ("setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")
NODES, CPUS = ("n1", "n2"), 6  # of a node, as it tells Slurm: one job of four cores, and nothing keeps it to them
CONF = """
ClusterName=workshop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=20
MessageTimeout=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
NodeName=DEFAULT CPUs={cpus} RealMemory=32000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}\n"
DAEMONS = """
mount -t proc proc /proc
munged --foreground --force --num-threads=2 --socket={folder}/munge.socket --key-file={folder}/munge.key \
  --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munged.seed &
until [ -S {folder}/munge.socket ]; do sleep 0.05; done
slurmctld -D &
for node in {nodes}; do slurmd -D -N $node & done
wait
"""


def missing():
    """Return why there can be no Slurm here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if lacking := [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]:
        return f"needs {', '.join(lacking)}: see tests/clusters/install.sh"
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "needs the right to unshare namespaces"
    return None


@contextmanager
def slurm(folder, cpus=CPUS, gpus=0):
    """Run the daemons while the block does; yield the environment in which Slurm's commands find them.

    folder: an empty one, for all that they write. Jobs that are left at the end are killed, with all their processes.
    gpus: of each node. Slurm gives them to jobs, steps and tasks as CUDA_VISIBLE_DEVICES; no program finds any there.
    """
    folder, host = Path(folder), socket.gethostname().partition(".")[0]
    ports = [lasting_port() for _ in range(1 + len(NODES))]
    nodes = [NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports, strict=False)]
    conf = CONF.format(host=host, port=ports[-1], folder=folder, cpus=cpus, gpus=gpus)
    (folder / "slurm.conf").write_text(conf + "".join(nodes))
    devices = [folder / f"gpu{i}" for i in range(gpus)]
    for device in devices:
        device.symlink_to("/dev/null")  # slurmd takes nothing but device files
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", *(f"spool-{name}" for name in NODES)):
        (folder / name).mkdir()
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    script = DAEMONS.format(folder=folder, nodes=" ".join(NODES))
    command = [*ISOLATED, "sh", "-c", script]
    with open(folder / "daemons.log", "w") as log:
        daemons = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 120
        while _states(environment) != ["idle"] * len(NODES):
            assert daemons.poll() is None and time.monotonic() < give_up, _logs(folder)
            time.sleep(0.1)
        yield environment
    finally:
        daemons.kill()
        daemons.wait()


def _states(environment):
    told = subprocess.run(["sinfo", "-hN", "-o", "%t"], env=environment, capture_output=True, text=True)
    return told.stdout.split()


def _logs(folder):
    return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in folder.glob("*.log"))
