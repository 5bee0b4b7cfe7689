"""What the command `daskrun` takes: its own options, those of torchrun, and an error in an option's words."""

import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click

from daskrun.errors import LINES

# Variables that tell a rank its place: no user's.
OF_RANK = re.compile("(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|CUDA_VISIBLE_DEVICES")
WORKERS = "Here each Dask worker is a rank, on whatever host it is: -n says how many, and --scheduler where they meet."
DASK = "Dask starts the workers, and watches them."
SHOWN = "All that ranks print is shown, and with --log-dir also written to a file for each rank."
# Options of torchrun that are not needed here: the sentence that says so, and their values that change nothing.
TORCHRUNS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "--nnodes": (WORKERS, ("1", "1:1")),
    "--node-rank": (WORKERS, ("0",)),
    **dict.fromkeys(["--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"], (WORKERS, None)),
    **dict.fromkeys(["--master-addr", "--master-port", "--local-addr"], (WORKERS, None)),
    "-t --tee": (SHOWN, None),
    "-r --redirects": (SHOWN, ("0",)),
    **dict.fromkeys(["--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters"], (SHOWN, ())),
    "--log-line-prefix-template": ("Lines begin with the rank, as [rank0].", ()),
    "--role": ("ROLE_NAME is default.", ("default",)),
    "--numa-binding": ("Start the workers with it, such as by numactl.", ()),
    "--signals-to-handle": ("SIGINT, SIGTERM and SIGHUP are passed on.", ("SIGTERM,SIGINT,SIGHUP",)),
    **dict.fromkeys(["--monitor-interval", "--event-log-handler", "--logs-specs"], (DASK, None)),
}
# Settings of `launch` in an error, and not in the name of a file or a function ("at train.py:4 in max_restarts").
SETTINGS = re.compile(
    r"(?<![\w./])(?<! in )"
    r"(n_workers|max_restarts|stall_after|wait_for_workers|wait_for_successors|shutdown_timeout|start_method|virtual_local_rank|time_limit)"
    r"(?![\w/]|\.\w)"
)
PAIR = re.compile(r"\((\d+), (\d+)\)")


def ranks(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Return a number of ranks, a pair (fewest, most) of "2:8", or None for all workers."""
    if value in (None, "auto", "cpu", "gpu"):
        return None
    try:
        fewest, *most = map(int, value.split(":", 1))
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of ranks nor two, such as 2:8.") from None
    return (fewest, *most) if most else fewest


def duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | str | None:
    """Return seconds, or the text of a duration."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


def stall(ctx: click.Context, param: click.Parameter, value: str) -> float | str | None:
    """Return a duration, or None of 0, which means never."""
    return duration(ctx, param, value) or None


def folder(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Return the path of a folder, or None."""
    if value == "":  # as of a variable that is not set, which would be the working folder
        raise click.BadParameter("give the name of a folder, or leave it out.")
    return Path(value) if value else None


class Command(click.Command):
    """Says where a script's options belong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            ours = {name for param in self.params if not getattr(param, "hidden", False) for name in param.opts}
            like = [name for name in error.possibilities or [] if name in ours]
            said = click.NoSuchOption(error.option_name, possibilities=like, ctx=ctx).format_message()
            where = "Options of the script follow its name: daskrun -n 2 train.py --epochs 3."
            raise click.UsageError(f"{said} {where}", ctx) from None


def _ignore(
    why: str, harmless: tuple[str, ...] | None, ctx: click.Context, param: click.Parameter, value: str | None
) -> None:
    """Say that an option of torchrun changes nothing; refuse a value that would."""
    if value is None:
        return
    if harmless is not None and value not in harmless:
        raise click.BadParameter(f"leave it out. {why}")
    click.echo(f"{param.opts[-1]} changes nothing. {why}", err=True)


def _refuse(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        raise click.BadParameter("the script has to be Python: let a small one start the program with os.execvp.")


def take_torchruns(command: click.Command) -> None:
    """Have the command take torchrun's options that are not needed here, and refuse those that cannot be."""
    for option, (why, harmless) in TORCHRUNS.items():
        click.option(*option.split(), hidden=True, expose_value=False, callback=partial(_ignore, why, harmless))(
            command
        )
    click.option("--no-python", is_flag=True, hidden=True, expose_value=False, callback=_refuse)(command)
    # Which is how scripts run here.
    click.option("--run-path", is_flag=True, hidden=True, expose_value=False)(command)


def variables(names: Iterable[str]) -> dict[str, str]:
    """Return the variables that "NAME" and "NAME=VALUE" name. Raises BadParameter."""
    variables = {}
    for one in names:
        name, given, value = one.partition("=")
        if not name or OF_RANK.fullmatch(name):
            raise click.BadParameter(f"--env {one}: ranks get {name or 'no variable without a name'} from daskrun.")
        if not given and name not in os.environ:
            raise click.BadParameter(f"--env {name}: there is no such variable here; write --env {name}=VALUE.")
        variables[name] = value if given else os.environ[name]
    return variables


def in_options(error: str) -> str:
    """Return an error with the names of options for settings of `launch`. Stacks and what ranks print stay as they are.

    >>> print(in_options("time_limit is 0: give seconds, or None for no limit.\\n  File x, in train(shape=(2, 8))"))
    --time-limit is 0: give seconds, or leave it out for no limit.
      File x, in train(shape=(2, 8))
    """
    ours, lines, printed = error.partition(LINES)
    sentences = [line if line.startswith(" ") else _in_options(line) for line in ours.split("\n")]
    return "\n".join(sentences) + lines + printed


def _in_options(sentence: str) -> str:
    sentence = sentence.replace("virtual_local_rank=True", "virtual_local_rank")
    sentence = sentence.replace("give launch ", "give ").replace("the function", "the script")
    sentence = sentence.replace("a pair (fewest, most) of them, or None", "a pair such as 2:8, or leave it out")
    sentence = PAIR.sub(r"\1:\2", sentence).replace(", or None", ", or leave it out")
    named = SETTINGS.sub(lambda setting: f"--{setting[0].replace('_', '-')}", sentence)
    return named.replace("--n-workers", "--nproc-per-node")
