"""What the command `daskrun` takes beside its own options: those of torchrun, and numbers of ranks."""

import os
import re
from collections.abc import Iterable
from typing import Any

import click

# Variables that tell a rank its place: no user's.
OF_RANK = re.compile("(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|CUDA_VISIBLE_DEVICES")
# Options of torchrun that change nothing here, and the only values that these two may have.
TORCHRUNS = (
    *("--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--master-addr"),
    *("--master-port", "--local-addr", "-t --tee", "-r --redirects", "--local-ranks-filter", "--role"),
    *("--monitor-interval", "--event-log-handler", "--logs-specs", "--numa-binding", "--signals-to-handle"),
)
HARMLESS = {"--nnodes": ("1", "1:1"), "--node-rank": ("0",)}
WORKERS = "here each Dask worker is a rank, on whatever host it is: -n says how many, and --scheduler where they meet."


def ranks(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Return a number of ranks, a pair (fewest, most) of "2:8", or None for all workers."""
    if value in (None, "auto", "cpu", "gpu"):
        return None
    try:
        fewest, *most = map(int, value.split(":", 1))
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of ranks nor two, such as 2:8.") from None
    return (fewest, *most) if most else fewest


class Command(click.Command):
    """Says where a script's options belong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            where = "Options of the script follow its name: daskrun -n 2 train.py --epochs 3."
            raise click.UsageError(f"{error.format_message()} {where}", ctx) from None


def take_torchruns(command: click.Command) -> None:
    """Have the command take torchrun's options that change nothing here."""
    for option in TORCHRUNS:
        click.option(*option.split(), hidden=True, expose_value=False, callback=_ignore)(command)


def _ignore(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    name = param.opts[-1]
    if value is not None and value not in HARMLESS.get(name, (value,)):
        raise click.BadParameter(f"leave it out, as {WORKERS}")
    if value is not None:
        click.echo(f"{name} changes nothing: {WORKERS}", err=True)


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
