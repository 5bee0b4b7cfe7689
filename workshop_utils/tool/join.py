"""Become the scheduler or a worker of a Dask cluster that torchrun, srun or a container platform starts."""

import os
import socket
import subprocess
import sys
from typing import NoReturn
from urllib.parse import urlsplit

import click
import dask
from dask.system import CPU_COUNT
from distributed.utils import get_ip

from daskrun import ClusterError, reach
from daskrun.settings import own_gpu_first, worker_settings

# What torchrun tells this process must not reach the ranks of later jobs; OMP_NUM_THREADS would keep them to one core.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS")
ANSWER_S = 30  # time limit for the scheduler, which may be starting


def become(address: str | None, port: int, torch_threads: int | None) -> NoReturn:
    """Replace this process by `dask worker` of the scheduler at `address`, or by what its rank asks for.

    Without an address, rank 0 becomes the scheduler, at its own address and `port`, and every other rank its worker.
    torch_threads: cores that one PyTorch operation of a worker may use; None for its share.
    Raises ClickException where neither an address nor a launcher's variables say what to become.
    """
    rank, environment = None, dict(os.environ)
    if address is None:
        rank, first_host = _read_launcher()
        scheme = "tls" if dask.config.get("distributed.comm.tls.ca-file", None) else "tcp"
        address = f"{scheme}://{first_host}:{port}"
        environment = {name: value for name, value in environment.items() if not name.startswith(LAUNCHERS)}
    own = _own_address(address)
    if rank == 0:
        _refuse_busy(own, port)
        command = ["distributed.cli.dask_scheduler", "--host", own, "--port", str(port)]
        command += ["--protocol", urlsplit(address).scheme]
    else:
        position, n_beside = _on_this_machine() if rank else (0, 1)
        environment |= worker_settings(torch_threads or max(1, CPU_COUNT // n_beside))
        environment |= own_gpu_first(position) if rank else {}
        command = ["distributed.cli.dask_worker", address, "--host", own, "--nthreads", "1"]
        click.echo(f"Joining {address}.", err=True)
        try:
            reach(address, ANSWER_S)
        except ClusterError as error:
            raise click.ClickException(str(error)) from error
    os.execve(sys.executable, [sys.executable, "-m", *command], environment)


def _refuse_busy(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise click.ClickException(
            f"Cannot listen at {host}, port {port}: {why}. Choose another --port, the same on each machine."
        ) from error


def _read_launcher() -> tuple[int, str]:
    """Return the rank that torchrun, Kubeflow (RANK, MASTER_ADDR) or srun (SLURM_*) gave, and the first host."""
    try:
        if "RANK" in os.environ:
            return int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
        rank = int(os.environ["SLURM_PROCID"])
        hosts = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
        return rank, subprocess.run(hosts, capture_output=True, text=True, check=True).stdout.split()[0]
    except (KeyError, ValueError, OSError, subprocess.CalledProcessError) as error:
        why = f"{error} is not set" if isinstance(error, KeyError) else error
        if not os.environ.keys() & {"RANK", "SLURM_PROCID"}:
            why = "no address is given, and no launcher has started this"
        raise click.ClickException(
            f"Nothing says what to become ({why}). Give the scheduler's address, such as "
            "tcp://HOST:8786, or start this by torchrun --no-python, by srun, or with RANK and MASTER_ADDR set."
        ) from error


def _own_address(address):
    """Return the address of this machine on the way to the scheduler."""
    place = urlsplit(address)
    try:
        socket.getaddrinfo(place.hostname or "localhost", None)  # for an unknown name, get_ip returns any address
        known = place.scheme in ("tcp", "tls") and place.port
        own = get_ip(place.hostname or "")
    except (ValueError, OSError) as error:
        raise click.ClickException(f"{address!r} cannot be reached ({error}): check host and port.") from error
    if not known:
        raise click.ClickException(f"{address!r} is not a scheduler's address: write tcp://HOST:PORT.")
    return own


def _on_this_machine() -> tuple[int, int]:
    """Return (position among the processes of this machine, how many they are), as torchrun or srun says."""
    try:
        if "RANK" in os.environ:
            return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")  # such as 4(x2),3
        return int(os.environ.get("SLURM_LOCALID", 0)), int(tasks.split("(")[0].split(",")[0])
    except ValueError as error:
        raise click.ClickException(f"The launcher's variables say no position on this machine ({error}).") from error
