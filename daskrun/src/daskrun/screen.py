"""Where lines that move are shown."""

import builtins
import io
import sys
from typing import TextIO


def screen() -> TextIO:
    """Return the file that `tqdm` should write to: a notebook's or a terminal's, else none that anybody reads."""
    if hasattr(builtins, "__IPYTHON__"):
        return sys.stdout  # a notebook gives stderr the color of an error
    return sys.stderr if sys.stderr and not sys.stderr.closed and sys.stderr.isatty() else io.StringIO()
