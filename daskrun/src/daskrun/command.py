"""The command `daskrun`: run a script for torchrun on the workers of a Dask cluster."""

import logging
import re
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import click
from distributed import CancelledError, Client

from daskrun.cluster import Cluster
from daskrun.errors import ClusterError
from daskrun.job import Job
from daskrun.launch import launch
from daskrun.local import start_local
from daskrun.script import run_script, script_here, terminate

LINES = "\n\n"  # between an error and what a script had printed
ANSWER_S = 5  # time limit for a worker that is told of SIGTERM
TORCHRUNS = {  # options of torchrun that mean nothing here, and their values that ask for nothing
    "--nnodes": ("1", "1:1"),
    "--node-rank": ("0",),
    **dict.fromkeys(["--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"], ()),
    **dict.fromkeys(["--master-addr", "--master-port", "--local-addr"], ()),
}
# Settings of `launch` in an error, and not in the name of a file.
SETTINGS = re.compile(
    r"(?<![\w./])(n_workers|max_restarts|stall_after|wait_for_workers|wait_for_successors)(?![\w/]|\.\w)"
)


def _ranks(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Return a number of ranks, a pair (fewest, most) of "2:8", or None for all workers."""
    if value in (None, "auto", "cpu", "gpu"):
        return None
    try:
        fewest, *most = map(int, value.split(":", 1))
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of ranks nor two, such as 2:8.") from None
    return (fewest, *most) if most else fewest


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # as torchrun takes both
        "help_option_names": ["-h", "--help"],
    }
)
@click.option(
    "-n",
    "--nproc-per-node",
    "n_workers",
    callback=_ranks,
    metavar="N",
    help="Ranks: a number, or fewest:most.  [default: as many as there are workers]",
)
@click.option("--scheduler", envvar="DASK_SCHEDULER_ADDRESS", help="Address of a cluster.  [default: local workers]")
@click.option("--scheduler-file", type=click.Path(exists=True), help="The file in which a scheduler has written it.")
@click.option("--max-restarts", default=0, help="Starts after the death of a rank. An exception is never retried.")
@click.option("--timeout", type=float, help="Seconds that the whole job may take.")
@click.option("--stall-after", type=float, help="Seconds without output after which ranks are asked where they stand.")
@click.option("--wait-for-workers", default=0.0, help="Seconds to wait for idle workers.")
@click.option("--wait-for-successors", default=30.0, help="Seconds to wait for another worker after a death.")
@click.option(
    "--log-dir", type=click.Path(path_type=Path), help="A folder in which each rank's output is added to its file."
)
@click.option("--ship", is_flag=True, help="Send the script's folder to the workers.")
@click.option("--standalone", is_flag=True, help="Start local workers, whatever DASK_SCHEDULER_ADDRESS says.")
@click.option(
    "--virtual-local-rank", is_flag=True, help="LOCAL_RANK is 0 on each rank, as if it had a host of its own."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.version_option(package_name="daskrun")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(
    scheduler: str | None,
    scheduler_file: str | None,
    log_dir: Path | None,
    ship: bool,
    standalone: bool,
    module: bool,
    virtual_local_rank: bool,
    script: str,
    arguments: tuple[str, ...],
    n_workers: int | tuple[int, int] | None,
    **settings: Any,
) -> None:
    """Run SCRIPT, written for torchrun, as one rank on each of several Dask workers."""
    if sys.stdout:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack a script's letters
    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = lambda message, *_: click.echo(message, err=True)
    try:
        what = script_here(script, module, arguments, ship)._replace(virtual_local_rank=virtual_local_rank)
        if log_dir:
            log_dir.mkdir(parents=True, exist_ok=True)
        is_local = standalone or not (scheduler or scheduler_file)
        client = _local(n_workers) if is_local else _joined(scheduler, scheduler_file)
        with client:
            settings |= {"backend": None, "n_workers": n_workers}
            function: Any = partial(run_script, what)
            name = script.rpartition(".")[2] if module else Path(script).stem
            function.__name__ = name.encode(errors="replace").decode()  # the job's name
            with launch(client, function, **settings) as job:
                signal.signal(signal.SIGTERM, lambda *_: _terminate(client, job))
                _show(job, log_dir)
    except (RuntimeError, OSError, ValueError, ImportError, CancelledError) as error:
        logging.disable()  # of connections that end now: the error comes last
        click.echo("\n".join(["", *map(_in_options, [*getattr(error, "__notes__", []), str(error)])]), err=True)
        sys.exit(1)


def _refuse(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value not in (None, *TORCHRUNS[param.opts[0]]):
        raise click.BadParameter(
            "torchrun needs it. Here each Dask worker is a rank, on whatever host it is: -n says how many, and the "
            "scheduler (--scheduler) tells them where they meet."
        )


for option in TORCHRUNS:
    click.option(option, hidden=True, expose_value=False, callback=_refuse)(main)


def _local(n_workers: int | tuple[int, int] | None) -> Client:
    click.echo("Starting local workers.", err=True)
    return start_local(n_workers[1] if isinstance(n_workers, tuple) else n_workers)


def _joined(address: str | None, file: str | None) -> Client:
    click.echo(f"Joining {file or address}.", err=True)
    try:
        return Client(address, scheduler_file=file)
    except Exception as error:  # of many kinds, such as an AssertionError for a file without an address
        raise ClusterError(f"No Dask scheduler answers at {file or address}: {error!r}. Start one, or wait.") from error


def _in_options(error: str) -> str:
    """Return an error with the names of options for settings of `launch`, above what a script has printed."""
    ours, lines, printed = error.partition(LINES)
    ours = ours.replace("give launch ", "give ")
    named = SETTINGS.sub(lambda setting: f"--{setting[0].replace('_', '-')}", ours)
    return named.replace("--n-workers", "--nproc-per-node") + lines + printed


def _terminate(client: Client, job: Job) -> None:
    """Pass SIGTERM on to the scripts, which may save and end; where none has begun, end the command."""
    job.stop_restarting()
    told = client.sync(Cluster(client, job.name).ask_workers, job.workers, terminate, answer_s=ANSWER_S)
    if not sum(told.values()):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would meet scripts that are ending


def _show(job: Job, log_dir: Path | None) -> None:
    """Print what ranks print, and which deaths the job survives, until it ends; then raise what it raised."""
    n_told = 0
    try:
        for row in job.rows():
            n_told = _tell(job, n_told)
            name = f"rank{row['rank']}"
            click.echo(f"[{name}]: {row['line']}")
            if log_dir:
                with (log_dir / f"{name}.log").open("a", encoding="utf-8") as file:
                    print(row["line"], file=file)
    finally:
        _tell(job, n_told)


def _tell(job: Job, n_told: int) -> int:
    """Print the deaths that the job has survived since so many; return how many there are."""
    for death in job.failures[n_told:]:
        click.echo(f"{str(death).partition(LINES)[0]} Starting again.", err=True)
    return len(job.failures)


if __name__ == "__main__":
    main()
