"""Let a program start processes, each of which imports that program first."""

import atexit
import os
import shutil
import sys
import tempfile
from importlib.machinery import ModuleSpec
from multiprocessing import current_process
from multiprocessing.util import get_temp_dir
from pathlib import Path

from daskrun.errors import ClusterError

MARK = "DASKRUN_IMPORTED_AGAIN"  # names the file that a new process makes if it comes to start_local, too
LONGEST = 107 - len("/listener-12345678")  # bytes of the folder of a Unix socket, and of what multiprocessing adds


def prepare() -> None:
    """Let this process start others, if its program came on standard input or TMPDIR is long, too."""
    _shorten_socket_names()
    os.environ[MARK] = str(Path(get_temp_dir(), "imported-again"))
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None and not Path(getattr(main, "__file__", None) or __file__).is_file():
        # A new process would look for a file named <stdin>. It imports no program of this name.
        main.__spec__ = ModuleSpec("__main__", None)


def refuse_if_imported_again() -> None:
    """End this process, or raise ClusterError, if it is a new one that is importing the program that started it."""
    if not getattr(current_process(), "_inheriting", False):
        return
    if mark := os.environ.get(MARK):
        Path(mark).touch()  # the program that started this process says why: here, each worker would
        os._exit(1)
    raise ClusterError(_cure())


def explain_failure() -> None:
    """Raise ClusterError if workers could not start because they imported this program again."""
    mark = Path(os.environ[MARK])
    if mark.exists():
        mark.unlink()
        raise ClusterError(_cure()) from None


def _cure() -> str:
    return (
        "Each new worker imports this program again, which would start another cluster: put the call that "
        "starts it, and what comes after it, below the line if __name__ == '__main__':"
    )


def _shorten_socket_names() -> None:
    """Give multiprocessing a folder for its sockets with a short name, where TMPDIR is longer than they may be.

    Python 3.14 does so itself. Children have the folder of their parent, so a worker's DataLoader can use it, too.
    """
    if len(os.fsencode(get_temp_dir())) <= LONGEST:
        return
    try:
        folder = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")  # for this user alone
    except OSError as error:
        raise ClusterError(
            f"Workers need sockets, and the name of TMPDIR, {tempfile.gettempdir()!r}, is too long for them: set "
            f"TMPDIR to a folder with a name of at most 70 characters, as /tmp cannot be used ({error})."
        ) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
