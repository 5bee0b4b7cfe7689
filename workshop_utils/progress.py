"""Show that what takes long goes on: a line below the notebook's cell, or on the terminal, from the third second on."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from daskrun.screen import screen

AFTER_S = 2
FINISHED = re.compile(r"^.*\[\d\d:\d\d[^]\n]*\] *\n?", flags=re.MULTILINE)  # a line as a stored output has it


def bar(iterable: Iterable | None = None, **settings: Any) -> tqdm:
    """Return tqdm's bar, which appears after two seconds, if there is still something to wait for.

    settings: what `tqdm` takes, such as desc, total and unit. TQDM_DISABLE=1 in the environment turns all bars off.
    """
    return tqdm(iterable, delay=AFTER_S, file=screen(), **settings)


@contextmanager
def waiting(what: str, so_far: Callable[[], str] = str) -> Iterator[None]:
    """Show `what`, the time that the block has taken, and what so_far() returns, and again every second.

    >>> with waiting("starting 2 workers"):  # "starting 2 workers [00:03]", but not where it took less than two seconds
    ...     pass
    """
    over = threading.Event()
    with bar(desc=what, bar_format="{desc} [{elapsed}{postfix}]") as line:

        def tick():
            while not over.wait(1):
                line.set_postfix_str(so_far(), refresh=False)
                line.update(0)

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            line.set_postfix_str(so_far(), refresh=False)
