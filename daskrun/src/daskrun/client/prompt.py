"""The prompt of a rank's debugger, on the client."""

import signal
import sys
import threading


def can_ask() -> bool:
    """Return whether somebody can answer a prompt here: in a notebook, or at a terminal."""
    if threading.current_thread() is not threading.main_thread():
        return False
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if kernel := getattr(shell, "kernel", None):
        return bool(getattr(kernel, "_allow_stdin", False))
    return sys.stdin is not None and sys.stdin.isatty()


def line_for(rank: int, said: str) -> str | None:
    """Print what a rank's debugger says, and return the line that answers its prompt; None if nobody does."""
    text, newline, question = said.rpartition("\n")
    print(text, end=newline, flush=True)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # the command's own would not end the prompt
    try:
        return input(f"[rank{rank}] {question}") + "\n"
    except EOFError:
        return None
    finally:
        signal.signal(signal.SIGINT, handler)
