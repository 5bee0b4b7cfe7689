"""A rank's process: it runs a function or a script in its main thread, while a thread answers its worker."""

import atexit
import builtins
import ctypes
import faulthandler
import gc
import io
import linecache
import os
import runpy
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

from daskrun.child import context
from daskrun.child.stack import from_the_program, snapshot
from daskrun.protocol import Function, Order, Script, Store

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of Linux's prctl


class Program(NamedTuple):
    """What a rank runs.

    The lowest frame of its process calls it, so that a script finds none of the launcher's modules below its own.
    """

    call: Callable[..., object]
    arguments: tuple

    @staticmethod
    def end(error: BaseException | None = None) -> NoReturn:
        """End this process as Python does after its code, which raised this error, if any."""
        _exit(0 if error is None else _exit_code(error))


def main() -> Program:
    """Begin as a fresh process of a rank. Arguments: the numbers of its file descriptors, as for `begin`."""
    return begin([int(number) for number in sys.argv[1:]])


def begin(fds: list[int]) -> Program:
    """Become the rank that the worker orders, and return what it has to run.

    Args:
        fds: Of the connection to the worker, standard output and error, a file for stacks; of a store, its socket.
    """
    control, out, err, stacks, *listening = fds
    with suppress(PermissionError):  # a fresh process has a session already
        os.setsid()
    _set_streams(out, err)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    connection = Connection(control)
    try:
        order: Order = connection.recv()
    except EOFError:
        os._exit(0)
    if isinstance(order.program, Store):
        _name("daskrun store")
        _serve(order.program, listening[0], connection)
    assert order.mine
    _name(f"rank {order.mine.rank}")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    faulthandler.enable(stacks, all_threads=True)
    here = context.Context(connection, order.mine, order.host, order.port, isinstance(order.program, Script))
    context.enter(here)
    threading.Thread(target=_answer, args=[connection, here], name="daskrun", daemon=True).start()
    # Python 3.12 warns of the thread above if a script calls os.fork.
    warnings.filterwarnings("ignore", r"This process \(pid=\d+\) is multi-threaded", DeprecationWarning)
    try:
        return _program(order, here)
    except BaseException as error:
        Program.end(error)


def _program(order: Order, here: context.Context) -> Program:
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _breakpoint
    os.chdir(order.folder)
    if isinstance(order.program, Script):
        return _script(order.program, order.beside)
    assert isinstance(order.program, Function)
    sys.path[:] = order.sys_path or ()
    for name, source in order.program.cells.items():
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    return Program(_run_function, (order.program, here))


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python gives a process for what has ended its code, and print what Python prints."""
    if not isinstance(error, SystemExit):
        _debug(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    code = error.code or 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _exit(code: int) -> NoReturn:
    """End this process as Python does, but take apart only the program's own module: all of PyTorch's take a second.

    Files that something else holds are closed, too, as they would be with their owners.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that aren't daemons
        atexit._run_exitfuncs()
    except BaseException as error:
        _exit_code(error)
    threading.excepthook = lambda _: None  # of daemons, which Python would have stopped
    program = vars(sys.modules["__main__"])
    for name in [name for name in program if name != "__builtins__"]:
        program[name] = None
    gc.collect()
    # What was there before the fork is frozen, and not among these. What writes into another file comes before that.
    files = [thing for thing in gc.get_objects() if issubclass(type(thing), io.IOBase)]
    for file in sorted(files, key=lambda file: (type(file) is not io.TextIOWrapper, type(file).__module__ == "_io")):
        with suppress(Exception):
            file.flush() if file in (sys.stdout, sys.stderr) else file.close()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _run_function(function: Function, here: context.Context) -> None:
    """Run a function and send what it returned, or what it failed with, and exit with 1."""
    import cloudpickle

    from daskrun.child.failure import failure
    from daskrun.child.process_group import in_process_group
    from daskrun.pickling import packed
    from daskrun.private import names_of_main

    main_module = _new_main_module()
    store, told = None, False

    def call(its_store: Any) -> None:
        nonlocal store
        store = its_store
        try:
            fn, args, kwargs = cloudpickle.loads(function.call)
            # So that pickle finds them by name, as a Pool, or a DataLoader's process that sends an object, needs it.
            vars(main_module).update(names_of_main(fn.func if isinstance(fn, partial) else fn))
            here.send("returned", packed(fn(*args, **kwargs)))
        except BaseException as error:
            _debug(error)
            tell(error)
            raise
        if store is not None:
            store.add(f"returned-{here.mine.rank}", 1)

    def tell(error: BaseException) -> None:  # at once: the end of a process group may wait, or end this process
        nonlocal told
        if not told:
            told = True
            here.send("failed", failure(error, store, here.mine.world_size))

    try:
        in_process_group(call, here, function.backend)
    except BaseException as error:
        tell(error)
    if told:
        sys.exit(1)


def _script(script: Script, beside: str) -> Program:
    """Return what runs a script as `__main__`, as Python itself would."""
    sys.excepthook = sys.__excepthook__ = _print_error
    sys.argv = [script.path, *script.arguments]
    sys.path.insert(0, beside)
    module = _new_main_module()
    if script.is_module:
        return Program(runpy._run_module_as_main, (script.path,))  # type: ignore[attr-defined]  # as python -m does
    module.__file__ = os.path.abspath(script.path)
    module.__loader__ = SourceFileLoader("__main__", module.__file__)
    vars(module).update(__annotations__={}, __cached__=None)
    return Program(exec, (compile(Path(script.path).read_bytes(), module.__file__, "exec"), vars(module)))


def _new_main_module() -> ModuleType:
    # For good, as threads may outlive the program; by the second name multiprocessing finds its classes.
    module = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    return module


def _serve(store: Store, listening: int, connection: Connection) -> NoReturn:
    import torch.distributed as dist

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ranks need it while they save
        signal.signal(number, signal.SIG_IGN)
    served = dist.TCPStore(store.host, store.port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    with suppress(EOFError, OSError):
        connection.recv()
    del served
    os._exit(0)


def _set_streams(out: int, err: int) -> None:
    """Make these standard output and error, unbuffered; there is no standard input."""
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((null, out, err)):
        if fd != number:
            os.dup2(fd, number)
            os.close(fd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for name, number, errors in (("stdout", 1, "surrogateescape"), ("stderr", 2, "backslashreplace")):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, "utf-8", errors, write_through=True)  # type: ignore[type-var]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _name(name: str) -> None:
    """Name this process, for `ps` and `top`, and have it end with its parent."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NAME, name.encode())


def _answer(connection: Connection, here: context.Context) -> None:
    """Take what the worker sends; end with it."""
    while True:
        try:
            kind, *about = connection.recv()
            if kind == "look":
                here.send("snapshot", snapshot())
            elif kind == "line":
                here.lines.put(*about)
            elif kind == "request":
                here.requests.put(tuple(about))
            elif kind == "interrupt":
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        except (EOFError, ConnectionError):
            os.killpg(0, signal.SIGKILL)  # what it has started, too
        except OSError:  # the program has closed the connection
            return


def _print_error(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
    traceback.print_exception(kind, error, from_the_program(stack))


def _breakpoint(*_: object, **__: object) -> None:
    """Stop the caller of ``breakpoint()``, and let the client debug it."""
    if not (here := context.current()):
        raise RuntimeError("breakpoint() was called in a process that a rank has started, which has no debugger.")
    from daskrun.child.debugger import RankPdb

    RankPdb(here).set_trace(sys._getframe(1))


def _debug(error: BaseException) -> None:
    """Let the client debug the program where it raised an error, if the job was started so."""
    here = context.current()
    if here and here.mine.debug_errors:
        from daskrun.child.debugger import post_mortem

        post_mortem(here, error)
