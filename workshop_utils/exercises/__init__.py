"""What check cells call, one module a notebook: a check lets a right answer pass and gives a wrong one a hint."""

import dis
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from numbers import Integral
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

CLOSED = "the cluster is closed: the last cell does that. Restart the kernel, and run the notebook from the top."
Answer = Any  # whatever an attendee wrote
Arguments = ParamSpec("Arguments")
Solution = TypeVar("Solution")
_ours: list = []  # answers that solution cells gave
_whose = "Correct."  # first words of the message of the check that runs


class NotYet(AssertionError):
    """The answer is not right yet; the message is a hint."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines instead of a traceback, which would point into this module.
        return [f"Not yet: {self}"]


def unanswered(answer: Answer, given: FunctionType | None = None) -> bool:
    """Return whether a solution cell should answer: the stub is unchanged, or a solution cell answered before.

    answer: None, or a function that only returns None, is a stub. given: the function that the stub repeats, where an
    exercise asks to change one. Functions are compared by their bytecode and never called.
    """
    if any(answer is solution for solution in _ours):
        return True
    if not inspect.isfunction(answer):
        return answer is None
    if given is not None:
        return _program(answer) == _program(given)
    return [value for _, value in _program(answer)] in ([None], [None, None])


def ours(solution: Solution) -> Solution:
    """Return the solution, marked so that its check says whose it was; also a decorator for a function."""
    if isinstance(solution, int | str):  # an equal answer of the attendee's may be the same object: make a new one
        kind: Any = type(solution)
        solution = type("Ours", (kind,), {"__repr__": kind.__repr__})(solution)
    _ours.append(solution)
    return solution


def expect(condition: object, hint: str) -> None:
    """Raise NotYet(hint) unless `condition` holds."""
    if not condition:
        raise NotYet(hint)


def which_mistake(is_it: Callable[[Any], object], mistakes: dict[str, Any], otherwise: str) -> str:
    """Return the first hint in `mistakes`, {hint: wrong answer}, whose wrong answer `is_it`; else `otherwise`."""
    return next((hint for hint, wrong in mistakes.items() if is_it(wrong)), otherwise)


def passed(message: str) -> None:
    """Print that an exercise is done, and whether the attendee or a solution cell did it."""
    print(f"{_whose} {message}")


def exercise(check: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Let `check`, whose first argument is the answer, raise NotYet where an answer makes it raise anything else."""

    @wraps(check)
    def checked(*args: Arguments.args, **named: Arguments.kwargs) -> None:
        global _whose
        by_us = any(args[0] is solution for solution in _ours)
        _whose = "That was our solution." if by_us else "Correct."
        state = "not yet"  # this stays if an interrupt ends the check
        try:
            check(*args, **named)
            state = "solution" if by_us else "passed"
        except NotYet:
            raise
        except Exception as error:
            from distributed import Client  # for a second, which a check that passes does not wait

            closed = any(isinstance(each, Client) and each.status == "closed" for each in (*args, *named.values()))
            raise NotYet(CLOSED if closed else _what_failed(error)) from None
        finally:
            if os.environ.get("WORKSHOP_ROOM"):
                _tell_the_room(check, state)

    return checked


def reconcile(guess: float | None, estimate: float, measured: float, unit: str) -> None:
    """Print a guess, a simple estimate from numbers seen before, and the measurement, one below the other.

    guess: None is left out. unit: of all three, such as "s", "ms", "images/s", "MB" or "%". A measured int is a count:
    all three are shown as whole numbers, without a ratio. Raises NotYet where the guess is no number.
    """
    is_count = isinstance(measured, Integral)
    largest = max(abs(estimate), abs(measured))
    digits = 0 if is_count or largest >= 100 else 1 if largest >= 10 else 2
    number = _as_number(guess)
    if guess is not None:
        shown = "?" if number is None else f"{number:,.{digits}f}"
        print(f"your guess      {shown:>8} {unit}")
    print(f"simple estimate {estimate:8,.{digits}f} {unit}")
    comparable = not is_count and round(estimate, digits) and round(measured, digits)
    times = f"   {measured / estimate:.2f} times the estimate" if comparable else ""
    print(f"measured        {measured:8,.{digits}f} {unit}{times}")
    expect(guess is None or number is not None, f"your guess is {guess!r}: write a number, without its unit, or None.")


def _as_number(guess):
    if isinstance(guess, bool | str):
        return None
    try:
        return float(guess)
    except (TypeError, ValueError):
        return None


def _tell_the_room(check, state):
    with suppress(Exception):  # an attendee must not have to care
        from workshop_utils.exercises.reporting import report

        report(check.__module__.rpartition(".")[2], check.__name__.removeprefix("check_"), state)


def _program(function):
    # The function's steps, without its name and the names and types of its arguments.
    skipped = ("RESUME", "NOP", "RETURN_VALUE", "MAKE_CELL", "COPY_FREE_VARS")
    steps = [(step.opname, step.argval) for step in dis.get_instructions(function) if step.opname not in skipped]
    return [(name, _program(value) if inspect.iscode(value) else value) for name, value in steps]


def _what_failed(error):
    """Name the line in a notebook's cell that raised, if the error came from the attendee's own function."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "ipykernel_" in frame.filename]
    what = f"{type(error).__name__}: {error}"
    written = [frame for frame in frames if frame.name != "<module>"]
    if written:
        return f"{written[-1].name} raised {what}, in the line `{written[-1].line}`."
    return f"the check cannot read this answer ({what})."


@contextmanager
def imported(stand_ins: dict[str, ModuleType]) -> Iterator[None]:
    """Have these modules imported in the block, by name, and after it what was there before.

    `patch.dict` would empty `sys.modules` for a moment. What another thread imports then is made anew, and a second
    `io` breaks `torch.load`.
    """
    before = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(before)
