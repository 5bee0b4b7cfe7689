"""The command `daskrun`: run a script for torchrun on the workers of a Dask cluster."""

import errno
import json
import logging
import os
import signal
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import click
from click.core import ParameterSource
from distributed import CancelledError, Client
from distributed.diagnostics.plugin import WorkerPlugin

from daskrun import __version__
from daskrun.check_scheduler import reach
from daskrun.client.job import Job
from daskrun.client.limits import limits
from daskrun.dashboard import PAGE
from daskrun.errors import ClusterError, JobError, without_lines
from daskrun.local import start_workers
from daskrun.options import Command, duration, folder, in_options, ranks, stall, take_torchruns, variables
from daskrun.script import script_here
from daskrun.worker.output import Lines
from daskrun.worker.process import ENDS

ANSWER_S = 30  # time limit for a scheduler's first answer


@click.command(
    cls=Command,
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # as torchrun takes both
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    },
)
@click.option(
    "-n",
    "--nproc-per-node",
    "n_workers",
    callback=ranks,
    metavar="N",
    help="Ranks: a number, or fewest:most.  [default: as many as there are workers]",
)
@click.option("--scheduler", envvar="DASK_SCHEDULER_ADDRESS", help="Address of a cluster.  [default: local workers]")
@click.option("--scheduler-file", type=click.Path(exists=True), help="The file in which a scheduler has written it.")
@click.option("--max-restarts", default=0, help="Starts after a rank has died, or ended with an error.")
@click.option("--time-limit", callback=duration, help="How long the whole job may take, in seconds or such as '2 h'.")
@click.option(
    "--stall-after",
    default="300",
    callback=stall,
    help="Time without output after which ranks are asked where they are; 0 for never.",
)
@click.option("--wait-for-workers", default="0", callback=duration, help="How long to wait for idle workers.")
@click.option(
    "--wait-for-successors",
    default="30",
    callback=duration,
    help="How long to wait for another worker after one has died.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False),
    callback=folder,
    help="A folder in which each rank's output is added to its file.",
)
@click.option(
    "--shutdown-timeout",
    default="30",
    callback=duration,
    help="How long scripts have to end after a signal, or a failure.",
)
@click.option(
    "--start-method", type=click.Choice(["fork", "spawn"]), help="How ranks start; spawn starts new interpreters."
)
@click.option(
    "--env", "names", multiple=True, metavar="NAME[=VALUE]", help="A variable for the scripts; without VALUE, yours."
)
@click.option("--ship", is_flag=True, help="Send the script's folder to the workers.")
@click.option("--standalone", is_flag=True, help="Start local workers, whatever DASK_SCHEDULER_ADDRESS says.")
@click.option(
    "--virtual-local-rank", is_flag=True, help="LOCAL_RANK is 0 on each rank, as if it had a host of its own."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.version_option(__version__, prog_name="daskrun")
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
    names: tuple[str, ...],
    **settings: Any,
) -> None:
    """Run SCRIPT, written for torchrun, as one rank on each of several Dask workers.

    Its standard input is empty. Ctrl-C, SIGTERM and SIGHUP are passed on to it; a second Ctrl-C ends it at once.
    """
    if sys.stdout:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack a script's letters
    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = lambda message, *_: _print(f"{in_options(str(message))}\n")
    stopped_by: list[int] = []
    caught = [number for number in ENDS if signal.getsignal(number) != signal.SIG_IGN]  # as nohup ignores SIGHUP
    for number in caught:
        signal.signal(number, signal.default_int_handler)
    try:
        what = script_here(script, module, arguments, ship)
        what = replace(what, environment=variables(names))
        of_job = limits(n_workers, virtual_local_rank=virtual_local_rank, **settings)
        is_local = _is_local(standalone, scheduler, scheduler_file)
        if is_local and not module and not Path(script).is_file():
            raise JobError(f"There is no file {script} here.")
        if log_dir:
            _make(log_dir)
        client = _local(n_workers) if is_local else _joined(scheduler, scheduler_file)
        _say_where_to_look(client)
        with client:
            name = (script.rpartition(".")[2] if module else Path(script).stem).encode(errors="replace").decode()
            output = _Output(log_dir)
            with Job[None](client, what, name, of_job, show=output.show) as job:
                output.job = job

                def stop(number: int, _: object) -> None:
                    stopped_by.append(number)
                    _pass_on(job, number)

                for number in caught:
                    signal.signal(number, stop)
                for _ in job.rows(keep=False):  # which the script has printed, too
                    pass
                output.close()
    except (RuntimeError, OSError, ValueError, ImportError, CancelledError) as error:
        logging.disable()  # of connections that end now: the error comes last
        click.echo(_last_words(error, stopped_by), err=True)
        sys.exit(1)


take_torchruns(main)


def _is_local(standalone: bool, scheduler: str | None, file: str | None) -> bool:
    """Return whether to start workers; refuse an order to join others, too."""
    source = click.get_current_context().get_parameter_source("scheduler")
    if standalone and (file or source is ParameterSource.COMMANDLINE):
        raise click.UsageError("--standalone starts workers, and --scheduler joins some: give one of them.")
    if source is ParameterSource.COMMANDLINE and not scheduler:
        raise click.UsageError("--scheduler is empty: give the address of a scheduler, or leave it out.")
    return standalone or not (scheduler or file)


def _make(log_dir: Path) -> None:
    place = log_dir
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=log_dir).close()
        for place in log_dir.glob("rank[0-9]*.log"):  # of an earlier job
            if place.is_fifo():  # to open it would wait for a reader
                raise OSError(errno.EINVAL, "It is no file")
            place.open("a").close()
    except OSError as error:
        raise JobError(f"--log-dir: {place} cannot be written: {error.strerror}. Take another folder.") from error


def _local(n_workers: int | tuple[int, int] | None) -> Client:
    click.echo("Starting local workers.", err=True)
    client = start_workers(n_workers[1] if isinstance(n_workers, tuple) else n_workers, worker_preload=())
    client.register_plugin(_GroupOfItsOwn())
    return client


def _say_where_to_look(client: Client) -> None:
    if client.run_on_scheduler(lambda: "distributed.dashboard.scheduler" in sys.modules):  # else it has no dashboard
        with suppress(KeyError):  # Dask's setting of the link names a variable that is not set
            click.echo(f"Where each rank is: {client.dashboard_link.removesuffix('/status')}{PAGE}", err=True)


class _GroupOfItsOwn(WorkerPlugin):
    """Keeps a worker where the command's process group gets SIGTERM, as from timeout: its script may save."""

    def setup(self, worker: Any) -> None:
        os.setpgid(0, 0)


def _joined(address: str | None, file: str | None) -> Client:
    click.echo(f"Joining {file or address}, which has {ANSWER_S} s to answer.", err=True)
    if file:
        try:
            address = json.loads(Path(file).read_text(encoding="utf-8"))["address"]
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"{file} holds no scheduler's address: give the file that it has written.") from error
    reach(str(address), ANSWER_S)
    return Client(address)


def _last_words(error: Exception, stopped_by: list[int]) -> str:
    """Return what the command says of an error. stopped_by: the signals that were passed on before."""
    notes, said = getattr(error, "__notes__", []), str(error)
    if stopped_by:  # who stops it need not read again what the scripts have printed
        name, how = signal.Signals(stopped_by[0]).name, without_lines(error)
        notes = [] if how.endswith(f" {name}.") else notes  # of another end they say which rank's it was
        said = f"Stopped by {name}. {how}"
    return "\n".join(["", *map(in_options, [*notes, said])])


def _pass_on(job: Job, number: int, why: str = "") -> None:
    """Pass a signal on to the scripts, which may save and end, and say why; where none has begun, end the command."""
    for other in ENDS:  # which would meet scripts that are ending
        signal.signal(other, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # once more: somebody waits
    if not job.signal(number):
        raise KeyboardInterrupt
    with suppress(OSError):  # not click.echo, which may be at work in what was interrupted
        ends = "; a second Ctrl-C ends them at once" if number == signal.SIGINT else ""
        os.write(2, f"{why}{signal.Signals(number).name} was passed on to the scripts{ends}.\n".encode())


class _Output:
    """Prints what ranks print, and adds it to their files."""

    def __init__(self, log_dir: Path | None) -> None:
        self.job: Job | None = None
        self._log_dir = log_dir
        self._begun: set[tuple[int, int]] = set()  # each (rank, attempt) that has lines in its file
        self._lacks_lines = False
        self._unheard: OSError | None = None

    def show(self, rank: int, attempt: int, lines: Lines) -> None:
        """Show lines that a rank has printed."""
        for is_error, some in groupby(lines, key=itemgetter(0)):
            self._attempt("".join(f"[rank{rank}]: {line}\n" for _, line in some), is_error)
        if self._log_dir:
            try:
                self._log(self._log_dir, rank, attempt, lines)
            except OSError as error:  # the disk is full, or the folder is gone
                if not self._lacks_lines:
                    self._attempt(f"--log-dir: {self._log_dir} lacks lines from now on: {error.strerror}.\n")
                self._lacks_lines = True

    def close(self) -> None:
        """Raise the OSError of lines that could not be printed."""
        if self._unheard:
            raise self._unheard

    def _attempt(self, text: str, is_error: bool = True) -> None:
        try:
            _print(text, is_error)
        except OSError as error:  # nobody reads it any more: the scripts may save
            if not self._unheard and self.job:
                _pass_on(self.job, signal.SIGTERM, f"{error}: not all that ranks print can be written. ")
            self._unheard = error

    def _log(self, log_dir: Path, rank: int, attempt: int, lines: Lines) -> None:
        with (log_dir / f"rank{rank}.log").open("a", encoding="utf-8") as file:
            if (rank, attempt) not in self._begun:
                file.write(f"--- attempt {attempt}, {datetime.now():%Y-%m-%d %H:%M:%S} ---\n")
            file.writelines(f"{line}\n" for _, line in lines)
        self._begun.add((rank, attempt))


def _print(text: str, is_error: bool = True) -> None:
    try:
        click.echo(text, err=is_error, nl=False)
    except OSError as error:
        if error.errno != errno.EIO:  # the terminal is gone: the scripts are told by SIGHUP, and may save
            raise


if __name__ == "__main__":
    main()
