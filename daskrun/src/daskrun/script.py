"""A script that was written for torchrun, as the command `daskrun` sends it to the ranks."""

import io
import tarfile
from pathlib import Path

from daskrun.errors import JobError
from daskrun.protocol import Script

MOST_SHIPPED = 64 * 2**20  # bytes


def script_here(path: str, is_module: bool, arguments: tuple[str, ...], ship: bool) -> Script:
    """Return the script at a path from the working folder. ship: send its folder along, without hidden files and links.

    Raises JobError where there is no such file to send, or the folder is too large.
    """
    if not ship:
        return Script(path, is_module, arguments, str(Path.cwd()), None)
    if not is_module and not Path(path).is_file():
        raise JobError(f"There is no file {path} here to send.")
    folder = Path.cwd() if is_module else Path(path).resolve().parent
    target = io.BytesIO()

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if target.tell() + entry.size > MOST_SHIPPED:
            raise JobError(f"{folder} has more than {MOST_SHIPPED >> 20} MiB: ship a folder of code alone.")
        name = Path(entry.name).name
        is_left_out = name.startswith(".") or name == "__pycache__" or not (entry.isfile() or entry.isdir())
        return None if is_left_out else entry

    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        archive.add(folder, "", filter=wanted)
    return Script(
        path if is_module else Path(path).resolve().name, is_module, arguments, str(folder), target.getvalue()
    )
