"""A rank that stays: it runs the cells that its client sends, in IPython, and keeps their variables."""

import os
import sys
from collections.abc import Mapping
from queue import Empty
from traceback import walk_tb
from typing import Any, NamedTuple

import cloudpickle

from daskrun.child import context
from daskrun.child.stack import CELL
from daskrun.pickling import packed

SHORT = {"threshold": 20, "edgeitems": 2}  # of torch.set_printoptions: how tensors are shown


class CellError(NamedTuple):
    """What a cell has raised.

    Attributes:
        kind: The exception's class.
        message: Its text.
        line: Of the cell, 0 if it's none of its lines.
    """

    kind: str
    message: str
    line: int


class CellResult(NamedTuple):
    """What came of a cell. displayed: (data, metadata) of each figure and the like, on rank 0 alone."""

    error: CellError | None
    displayed: list[tuple[dict[str, Any], dict[str, Any]]]


def serve(idle_s: float | None) -> None:
    """Answer requests until none has come for so many seconds. A request is a function of the shell."""
    import torch

    here = context.current()
    assert here
    # pyplot asks for it when it's imported.
    os.environ.setdefault("MPLBACKEND", "agg" if here.mine.rank else "module://matplotlib_inline.backend_inline")
    torch.set_printoptions(**SHORT)
    shell = _new_shell(is_shown=here.mine.rank == 0)
    while True:
        here.is_idle = True
        try:
            number, call = here.requests.get(timeout=idle_s)
        except Empty:
            return
        except KeyboardInterrupt:  # of a cell that has just ended
            continue
        here.is_idle = False
        try:
            answer = packed(cloudpickle.loads(call)(shell))
        except BaseException as error:
            answer = packed(CellError(type(error).__name__, str(error), 0))
        sys.stdout.flush()
        here.send("reply", number, answer)


def run_cell(source: str, number: int, shell: Any) -> CellResult:
    """Run a cell, with IPython's magics and top-level await; its last value is printed.

    Args:
        number: Of the client's cell, 0 if that has none.
    """
    shell.execution_count = number or shell.execution_count
    shell.error, shell.display_pub.displayed = None, []
    shell.run_cell(source, store_history=True)
    return CellResult(shell.error, shell.display_pub.displayed)


def value_of(expression: str, shell: Any) -> Any:
    """Return a variable's value, or an expression's."""
    return shell.ev(expression)


def set_variables(variables: Mapping[str, Any], shell: Any) -> None:
    """Set variables."""
    shell.push(dict(variables))


def _new_shell(is_shown: bool) -> Any:
    from IPython.core.compilerop import CachingCompiler
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Compiler(CachingCompiler):
        def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
            return f"{CELL}{number}>"

    class Publisher(DisplayPublisher):
        displayed: list = []  # noqa: RUF012  it's set for each cell

        def publish(self, data: Any, metadata: Any = None, *_: Any, **__: Any) -> None:
            if is_shown and set(data) != {"text/plain"}:
                self.displayed.append((data, metadata or {}))
            else:
                print(data.get("text/plain", ""))

    class Hook(DisplayHook):
        def write_output_prompt(self) -> None:
            pass

        def write_format_data(self, format_dict: dict, md_dict: dict | None = None) -> None:
            print(format_dict.get("text/plain", ""))

        def finish_displayhook(self) -> None:
            pass

    class Shell(InteractiveShell):
        error: CellError | None = None

        def ask_exit(self) -> None:  # exit() calls it
            print("The ranks stay: ranks.close() ends them.")

        def _showtraceback(self, etype: type, evalue: BaseException, stb: list[str]) -> None:
            lines = [line for frame, line in walk_tb(evalue.__traceback__) if frame.f_code.co_filename.startswith(CELL)]
            line = lines[-1] if lines else getattr(evalue, "lineno", None) or 0  # of a syntax error
            self.error = CellError(etype.__name__, str(evalue), line)
            print(self.InteractiveTB.stb2text(stb), file=sys.stderr)  # at once: other ranks may wait for this one

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.cache_size = 0  # a cell's value isn't kept
    hook = sys.breakpointhook
    shell = Shell.instance(
        config=config,
        user_module=sys.modules["__main__"],
        display_pub_class=Publisher,
        displayhook_class=Hook,
        compiler_class=Compiler,
    )
    sys.breakpointhook = hook  # and not IPython's
    return shell
