"""What tests ask about processes that may end while they ask."""

import psutil


def has_ended(pid):
    """Say whether a process is over: gone, or a zombie, which waits for its parent to ask how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_of(process):
    """Return the command line of a psutil.Process, or "" once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
