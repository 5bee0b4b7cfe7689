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
from typing import Any

import click
from distributed import CancelledError, Client

from daskrun import __version__
from daskrun.check_scheduler import reach
from daskrun.client.job import Job
from daskrun.client.limits import Limits
from daskrun.dashboard import PAGE
from daskrun.errors import ClusterError, JobError, ScriptFailed
from daskrun.local import start_for_scripts
from daskrun.options import Command, ranks, take_torchruns, variables
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
@click.option(
    "--workers",
    metavar="NAMES",
    help="Addresses, names or hosts of workers, with commas between them.  [default: any]",
)
@click.option("--max-restarts", default=0, help="Starts after a rank has died, or ended with an error.")
@click.option("--time-limit", help="How long the whole job may take, in seconds or such as '2 h'.")
@click.option(
    "--stall-after", default="300", help="Time without output after which ranks are asked where they are; 0 for never."
)
@click.option("--wait-for-workers", default="0", help="How long to wait for idle workers.")
@click.option("--wait-for-successors", default="30", help="How long to wait for another worker after one has died.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder in which each rank's output is added to its file.",
)
@click.option("--shutdown-timeout", default="30", help="How long scripts have to end after a signal, or a failure.")
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
@click.option("--debug", type=click.Choice(["error"]), help="Open pdb where a rank raises an error.")
@click.option("--debug-timeout", default="600", help="How long a rank's debugger waits for an answer.")
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
    script: str,
    arguments: tuple[str, ...],
    names: tuple[str, ...],
    **settings: Any,
) -> None:
    """Run SCRIPT, written for torchrun, as one rank on each of several Dask workers.

    Its standard input is empty. Ctrl-C, SIGTERM and SIGHUP are passed on to it; a second Ctrl-C ends it at once.
    """
    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = lambda message, *_: _print(f"{message}\n")
    stopped_by: list[int] = []
    caught = [number for number in ENDS if signal.getsignal(number) != signal.SIG_IGN]  # as nohup ignores SIGHUP
    for number in caught:
        signal.signal(number, signal.default_int_handler)
    try:
        what = replace(script_here(script, module, arguments, ship), environment=variables(names))
        options = Limits(**settings)
        is_local = standalone or not (scheduler or scheduler_file)
        if is_local and not module and not Path(script).is_file():
            raise JobError(f"There is no file {script} here.")
        output = _Output(log_dir)
        with _local(settings["n_workers"]) if is_local else _joined(scheduler, scheduler_file) as client:
            if client.run_on_scheduler(lambda: "distributed.dashboard.scheduler" in sys.modules):  # it has a dashboard
                with suppress(KeyError):  # Dask's setting of the link names a variable that is not set
                    click.echo(f"Where each rank is: {client.dashboard_link.removesuffix('/status')}{PAGE}", err=True)
            name = (script.rpartition(".")[2] if module else Path(script).stem).encode(errors="replace").decode()
            with Job[None](client, what, name, options, show=output.show) as job:
                output.job = job

                def stop(number: int, _: object) -> None:
                    stopped_by.append(number)
                    _pass_on(job, number)

                for number in caught:
                    signal.signal(number, stop)
                for _ in job.rows(keep=False):  # which the script has printed, too
                    pass
                if output.error:
                    raise output.error
    except (RuntimeError, OSError, ValueError, ImportError, CancelledError) as error:
        logging.disable()  # of connections that end now: the error comes last
        click.echo(_last_words(error, stopped_by), err=True)
        sys.exit(1)


take_torchruns(main)


def _local(n_workers: int | tuple[int, int] | None) -> Client:
    click.echo("Starting local workers.", err=True)
    return start_for_scripts(n_workers[1] if isinstance(n_workers, tuple) else n_workers)


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
        how = error.summary if isinstance(error, JobError) else said
        notes = [] if isinstance(error, ScriptFailed) and -error.code in stopped_by else notes
        said = f"Stopped by {signal.Signals(stopped_by[0]).name}. {how}"
    return "\n".join(["", *notes, said])


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
    """Prints what ranks print, and adds it to their files.

    Attributes:
        error: Of lines that could not be printed.
    """

    def __init__(self, log_dir: Path | None) -> None:
        self.job: Job | None = None
        self.error: OSError | None = None
        self._log_dir = log_dir
        self._begun: set[tuple[int, int]] = set()  # each (rank, attempt) that has lines in its file
        if log_dir:
            log_dir.mkdir(parents=True, exist_ok=True)
            (log_dir / "rank0.log").open("a").close()  # it's known at once whether it can be written

    def show(self, rank: int, attempt: int, lines: Lines) -> None:
        """Show lines that a rank has printed; where nobody reads them any more, send the scripts SIGTERM."""
        try:
            for is_error, some in groupby(lines, key=itemgetter(0)):
                _print(b"".join(b"[rank%d]: %s\n" % (rank, line) for _, line in some), is_error)
        except OSError as error:
            if not self.error and self.job:
                _pass_on(self.job, signal.SIGTERM, f"{error}: not all that ranks print can be written. ")
            self.error = error
        try:
            if self._log_dir:
                self._log(self._log_dir / f"rank{rank}.log", (rank, attempt), lines)
        except OSError as error:  # the disk is full, or the folder is gone
            self._log_dir = None
            with suppress(OSError):
                _print(f"{error}: there are no more lines in --log-dir.\n")

    def _log(self, path: Path, begins: tuple[int, int], lines: Lines) -> None:
        with path.open("ab") as file:
            if begins not in self._begun:
                file.write(f"--- attempt {begins[1]}, {datetime.now():%Y-%m-%d %H:%M:%S} ---\n".encode())
            file.writelines(line + b"\n" for _, line in lines)
        self._begun.add(begins)


def _print(text: str | bytes, is_error: bool = True) -> None:
    try:
        click.echo(text, err=is_error, nl=False)  # of bytes, a pipe gets the colors, too
    except OSError as error:
        if error.errno != errno.EIO:  # the terminal is gone: the scripts are told by SIGHUP, and may save
            raise


if __name__ == "__main__":
    main()
