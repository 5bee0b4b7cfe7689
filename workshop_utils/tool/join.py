"""Become the scheduler or a worker of a Dask cluster that torchrun, srun, or one container after another starts."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit

import click
import dask
from dask.system import CPU_COUNT
from distributed.utils import get_ip

from workshop_utils.cluster import n_gpus, worker_settings

# What torchrun tells a process of one job must not reach the ranks of others, and not its one thread either.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS")


class Member(NamedTuple):
    """What a launcher says of a process. rank, local_rank: among all, and on its machine, which has `n_local`."""

    rank: int
    local_rank: int
    n_local: int
    first_host: str


def become(address: str | None, port: int, torch_threads: int | None) -> NoReturn:
    """Replace this process by `dask worker` of the scheduler at `address`, or by what its rank asks for.

    port: of the scheduler, where ranks decide. torch_threads: of a worker, None for its share of the cores.
    Raises ClickException where neither an address nor a launcher's variables say what to become.
    """
    member = None if address else read_launcher(os.environ)
    if member:
        scheme = "tls" if dask.config.get("distributed.comm.tls.ca-file", None) else "tcp"
        address = f"{scheme}://{member.first_host}:{port}"
    place = urlsplit(str(address))
    try:
        socket.getaddrinfo(place.hostname or "localhost", None)  # get_ip would take any address of this machine's
        own = get_ip(place.hostname or "")
        known = place.scheme in ("tcp", "tls") and place.port
    except (ValueError, OSError) as error:
        raise click.ClickException(f"{address!r} cannot be reached ({error}): check the name.") from error
    if not known:
        raise click.ClickException(f"{address!r} is not a scheduler's address: write tcp://HOST:PORT.")
    kept = {name: value for name, value in os.environ.items() if not (member and name.startswith(LAUNCHERS))}
    dask_cli = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    if member and member.rank == 0:
        command = [*dask_cli, "--host", own, "--port", str(port), "--protocol", place.scheme]
    else:
        beside, n_beside = _beside(member) if member else (0, 1)
        kept |= worker_settings(torch_threads or max(1, CPU_COUNT // n_beside)) | _own_gpu(beside)
        command = [sys.executable, "-m", "distributed.cli.dask_worker", str(address), "--host", own, "--nthreads", "1"]
        command += ["--name", str(member.rank)] if member else []
    os.execve(sys.executable, command, kept)


def read_launcher(environment: Mapping[str, str]) -> Member:
    """Return what torchrun or Kubeflow (RANK, MASTER_ADDR) or else srun (SLURM_PROCID) says of this process.

    Raises ClickException where neither does, or not all of it.
    """
    try:
        if "RANK" in environment:
            local, n_local = int(environment.get("LOCAL_RANK", 0)), int(environment.get("LOCAL_WORLD_SIZE", 1))
            return Member(int(environment["RANK"]), local, n_local, environment["MASTER_ADDR"])
        rank, local = int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"])
        n_local = int(environment["SLURM_STEP_TASKS_PER_NODE"].split("(")[0].split(",")[0])
        command = ["scontrol", "show", "hostnames", environment["SLURM_STEP_NODELIST"]]
        first = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        return Member(rank, local, n_local, first)
    except (KeyError, ValueError, OSError, subprocess.CalledProcessError) as error:
        raise click.ClickException(
            f"Nothing says what to become ({type(error).__name__}: {error}). Give the scheduler's address, such as "
            "tcp://HOST:8786, or start this by torchrun --no-python, by srun, or with RANK and MASTER_ADDR set."
        ) from error


def _beside(member):
    """Return which of how many workers of its machine this is."""
    with_scheduler = member.rank == member.local_rank  # the first machine
    return member.local_rank - with_scheduler, max(1, member.n_local - with_scheduler)


def _own_gpu(worker):
    from dask_cuda.utils import cuda_visible_devices

    return {"CUDA_VISIBLE_DEVICES": cuda_visible_devices(worker % n, range(n))} if (n := n_gpus()) > 1 else {}
