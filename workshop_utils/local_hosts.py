"""Terminals on hosts that are addresses of this machine, to try a cluster's commands where there is one machine."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

# Elsewhere than on Linux, not all of 127.* is this machine, and all hosts have one address.
ADDRESSES = {"a": "127.0.0.2", "b": "127.0.0.3"} if sys.platform == "linux" else {}
LOOPBACK = "127.0.0.1"
# A command and all that it starts end when this process has ended, which closes their standard input.
SCRIPT = "({command}) & trap : TERM; read end_of_input; kill 0; wait"


class Terminal:
    """A terminal on one host, in which one command runs at a time.

    name: of the host. address: of the host, on this machine. Each command has a new and empty home folder, as a host
    that is replaced has a new disk.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = ADDRESSES.get(name, LOOPBACK)
        self._disk = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process: subprocess.Popen | None = None

    @property
    def home(self) -> Path:
        """The home folder of the last command, which goes with the next one, or with this process."""
        return Path(self._disk.name)

    @property
    def is_running(self) -> bool:
        """Whether a command was started and not ended; one that failed counts until it is ended."""
        return self._process is not None

    def run(self, command: str) -> None:
        """Start a command of a Unix shell, after ending the one before. It writes errors to the file `log` in `home`.

        It sees no GPU, and of this process's environment all but how many threads libraries may use.
        """
        self.end()
        self._disk.cleanup()
        self._disk = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        kept = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        own = {
            "HOME": str(self.home),
            "WORKSHOP_CACHE": str(self.home / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # where `dask` and `workshop` are
        }
        with (self.home / "log").open("w") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", SCRIPT.format(command=command)],
                cwd=self.home,
                env=kept | own,
                stdin=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def end(self) -> None:
        """End the command and all that it started, if one runs; wait until it has ended."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._process = None

    def kill(self) -> None:
        """Kill the command and all that it started at once, if one runs, without time to say goodbye."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self.end()


@cache
def terminal_on(host: str) -> Terminal:
    """Return the terminal on a host, the same at each call, so that a cell which is run again finds what it started."""
    return Terminal(host)


def free_port() -> int:
    """Return the number of a port of this machine on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]
