"""What the check cells call, one module a notebook: each check passes a right answer, and gives a wrong one a hint."""

import dis
import inspect
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

Answer = Any  # whatever an attendee wrote
Arguments = ParamSpec("Arguments")
Solution = TypeVar("Solution")
_ours: list = []  # the solutions that solution cells gave, by identity
_whose = "Correct."  # how the message of the check that runs begins


class NotYet(AssertionError):
    """The answer is not right yet; the message is a hint."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines instead of a traceback, which would point into this module.
        return [f"Not yet: {self}"]


def unanswered(answer: Answer, given: FunctionType | None = None) -> bool:
    """Return whether a solution cell should answer: the stub is as it was, or a solution cell answered before.

    answer: None, or a function that only returns None, is a stub. given: the function that the stub repeats, where an
    exercise asks to change one. The function is looked at, not called.
    """
    if any(answer is solution for solution in _ours):
        return True
    if not inspect.isfunction(answer):
        return answer is None
    if given is not None:
        return _program(answer) == _program(given)
    return [value for _, value in _program(answer)] in ([None], [None, None])


def ours(solution: Solution) -> Solution:
    """Return the solution, so marked that its check says whose it was; also a decorator for a function."""
    if isinstance(solution, int | str):  # of which equal ones may be one object
        solution = type("Ours", (type(solution),), {"__repr__": type(solution).__repr__})(solution)  # type: ignore
    _ours.append(solution)
    return solution


def expect(condition: object, hint: str) -> None:
    """Raise NotYet(hint) unless `condition` holds."""
    if not condition:
        raise NotYet(hint)


def passed(message: str) -> None:
    """Print that an exercise is done, and whether the attendee or the solution's cell did it."""
    print(f"{_whose} {message}")


def exercise(check: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Let `check`, whose first argument is the answer, give a hint and no traceback where an answer makes it fail."""

    @wraps(check)
    def checked(*args: Arguments.args, **named: Arguments.kwargs) -> None:
        global _whose
        by_us = any(args[0] is solution for solution in _ours)
        _whose = "That was our solution." if by_us else "Correct."
        state = "not yet"  # also where an interrupt ends a check
        try:
            check(*args, **named)
            state = "solution" if by_us else "passed"
        except NotYet:
            raise
        except Exception as error:
            raise NotYet(_what_failed(error)) from None
        finally:
            if os.environ.get("WORKSHOP_ROOM"):
                _tell_the_room(check, state)

    return checked


def reconcile(guess: float | None, arithmetic: float, measured: float, unit: str) -> None:
    """Print a guess, what arithmetic on numbers seen before gives, and the measurement, side by side.

    unit: of all three, such as "s", "ms", "images/s", "MB" or "%".
    """
    try:
        wrong, number = isinstance(guess, bool | str), 0.0 if guess is None else float(guess)
    except (TypeError, ValueError):
        wrong, number = True, 0.0
    digits = 0 if max(abs(arithmetic), abs(measured)) >= 100 else 1 if max(abs(arithmetic), abs(measured)) >= 10 else 2
    print(f"your guess   {'none' if guess is None else '?' if wrong else f'{number:,.{digits}f}':>9} {unit}")
    print(f"arithmetic   {arithmetic:9,.{digits}f} {unit}")
    times = f"   {measured / arithmetic:.2f} times the arithmetic" if round(arithmetic, digits) else ""
    print(f"measured     {measured:9,.{digits}f} {unit}{times}")
    if wrong:
        raise NotYet(f"your guess is {guess!r}: write a number, without its unit, or None.")


def _tell_the_room(check, state):
    with suppress(Exception):  # whatever it is, it must not become an attendee's
        from workshop_utils.exercises.reporting import report

        report(check.__module__.rpartition(".")[2], check.__name__.removeprefix("check_"), state)


def _program(function):
    # What a function does, whatever its name and the names and types of its arguments.
    skipped = ("RESUME", "NOP", "RETURN_VALUE", "MAKE_CELL", "COPY_FREE_VARS")
    steps = [(step.opname, step.argval) for step in dis.get_instructions(function) if step.opname not in skipped]
    return [(name, _program(value) if inspect.iscode(value) else value) for name, value in steps]


def _what_failed(error):
    """Say which line of the attendee's own, if any, raised; its code is in a notebook's cell and not in a package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "ipykernel_" in frame.filename]
    what = f"{type(error).__name__}: {error}"
    written = [frame for frame in frames if frame.name != "<module>"]
    if written:
        return f"{written[-1].name} raised {what}, in the line `{written[-1].line}`."
    return f"the check cannot read this answer ({what})."
