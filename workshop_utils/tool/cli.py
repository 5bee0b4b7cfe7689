"""The command `workshop`: it reads arguments and prints; the other modules do the work."""

import os
import sys
from pathlib import Path

import click

from workshop_utils.tool import FIRST

PINS = "requirements.txt"
CORES, PORT, PORT_OR_ANY = click.IntRange(1), click.IntRange(1, 65535), click.IntRange(0, 65535)
for kind in (CORES, PORT, PORT_OR_ANY):
    kind.name = "number"  # which errors and help would call an integer range


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="workshop-dask-pytorch", prog_name="workshop", message="%(prog)s %(version)s")
def main() -> None:
    """Introduction to PyTorch with Dask: a JupyterLab workshop."""


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--no-browser", is_flag=True, help="Print the address instead of opening a browser.")
@click.option("--port", type=PORT, help="JupyterLab's port; by default 8888, or the next free one.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def lab(no_browser: bool, port: int | None, extra: tuple[str, ...]) -> None:
    """Open JupyterLab on notebook 01, with Dask's dashboards.

    `jupyter lab` gets EXTRA.
    """
    from workshop_utils.tool.lab import open_lab

    open_lab(_project(), port=port, browser=not no_browser, extra=extra)


@main.command()
@click.option("--address", help="Check the cluster of this scheduler instead, such as tcp://HOST:8786.")
def check(address: str | None) -> None:
    """Say what this machine or a cluster lacks, and the cure.

    The exit code is 1 if it lacks anything.
    """
    from workshop_utils.tool.check import run_checks

    all_ok = []
    for name, ok, text in run_checks(None if address else _project(PINS) / PINS, address):
        click.echo(f"{'[OK]  ' if ok else '[FAIL]'} {name}: {text}")
        all_ok.append(ok)
    n_failed = all_ok.count(False)
    click.echo(f"{n_failed} of {len(all_ok)} checks failed." if n_failed else f"All {len(all_ok)} checks passed.")
    sys.exit(n_failed > 0)


@main.command()
@click.option("--threads", type=CORES, help="Cores that one PyTorch operation may use; default: all.")
def worker_env(threads: int | None) -> None:
    """Print settings for a shell that starts workers.

    With them, `dask worker` starts workers that suit PyTorch.
    """
    from dask.system import CPU_COUNT

    from daskrun.settings import worker_environment

    click.echo(worker_environment(threads or CPU_COUNT))


@main.command()
@click.argument("address", required=False)
@click.option("--port", type=PORT, default=8786, help="Port of the scheduler; default: 8786.")
@click.option("--threads", type=CORES, help="Cores that one PyTorch operation may use; default: its share.")
def join(address: str | None, port: int, threads: int | None) -> None:
    """Become a worker of a scheduler, or the scheduler.

    With ADDRESS, a worker of the scheduler there. Without it, torchrun, srun or a Kubeflow job starts this on each
    machine: rank 0 becomes the scheduler, which listens at the address of its machine, and the others its workers. A
    notebook joins tcp://THAT_MACHINE:8786.
    """
    from workshop_utils.tool.join import become

    become(address, port, threads)


@main.command()
@click.option("--host", default="127.0.0.1", help="Where to listen: 0.0.0.0 for a room; default: this machine only.")
@click.option("--port", type=PORT_OR_ANY, default=8800, help="Default: 8800; 0 for any free one.")
@click.option("--csv", type=click.Path(dir_okay=False), help="A new file that gets a line for each report.")
def room(host: str, port: int, csv: str | None) -> None:
    """Show who passed which exercise, and who did not yet.

    Attendees join by setting WORKSHOP_ROOM.
    """
    from workshop_utils.tool.room import serve_room

    serve_room(_project(), host, port, csv)


@main.group()
def data() -> None:
    """Fetch photos, or draw sketches.

    Every lesson also runs without a download, on sketches.
    """


@data.command()
@click.option("--source", help="Folder or .tar, a path or an address; default: the public bucket.")
@click.option("--folder", type=click.Path(file_okay=False), help="Default: the cache, where the lessons look.")
def photos(source: str | None, folder: str | None) -> None:
    """Fetch the 20,580 photos of Stanford Dogs (0.8 GB).

    Stop it and start it again as you like: it goes on where it was.
    """
    from workshop_utils.dogs.download import AGAIN, PhotosError, fetch_photos

    try:
        images = fetch_photos(source, folder)
    except PhotosError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt as error:
        raise click.ClickException(AGAIN) from error
    click.echo(f"All photos are in {images}." + (f" To use them: export WORKSHOP_DATA={images}" if folder else ""))


@data.command()
def sketches() -> None:
    """Draw the sketches of notebooks 01 to 04, unless they are there.

    `make setup` does this. A notebook draws what it misses, too.
    """
    from workshop_utils.photos import find_data, list_photos
    from workshop_utils.shared import NotShared
    from workshop_utils.storage import CacheError, variables

    if variables().data:
        click.echo("No sketches were drawn: WORKSHOP_DATA is set, so the lessons use its photos.")
        return
    try:
        source = find_data()
    except (CacheError, NotShared) as error:
        raise click.ClickException(str(error)) from error
    n_images = len(list_photos(source.url, storage_options=source.storage_options))
    click.echo(f"{n_images:,} {source.noun} are in {source.url}.")


@main.command()
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Run all of the table, for hours, and print it; fetches 12 GB.")
@click.option("--table", is_flag=True, help="Print the table of what was measured earlier instead.")
def bench(name: str | None, every: bool, table: bool) -> None:
    """Run the benchmark NAME; without it, list them."""
    texts = {script: script.read_text(encoding="utf-8") for script in sorted((_project() / "benchmarks").glob("*.py"))}
    scripts = {script.stem: script for script, text in texts.items() if text.endswith("    main()\n")}
    if not scripts:
        raise click.ClickException(f"{_project()} has no folder benchmarks: run this in the folder of the workshop.")
    if bool(name) + every + table > 1:
        raise click.UsageError("Give one of NAME, --all and --table.")
    if every or table:
        name = "table"
    if name is None:
        for each, script in scripts.items():
            first_line = texts[script].splitlines()[0].strip('"')
            click.echo(f"{each:<14}{first_line}")
    elif name in scripts:
        options = ["--run"] if every else []
        os.execv(sys.executable, [sys.executable, str(scripts[name]), *options])  # Ctrl-C is then its own
    else:
        raise click.ClickException(f"There is no benchmark {name!r}; there are {', '.join(scripts)}.")


def _project(*also):
    """Return the folder of the workshop, this one or the one of this file, which has these files, too."""
    try:
        here = Path.cwd()
    except FileNotFoundError as error:  # as when it was deleted and cloned again
        raise click.ClickException("This folder is gone: cd to the folder of the workshop.") from error
    for folder in (here, Path(__file__).parents[2]):
        if all((folder / name).is_file() for name in (FIRST, *also)):
            return folder
    raise click.ClickException(f"There is no {FIRST} in {here}: run this in the folder of the workshop.")


if __name__ == "__main__":
    main()
