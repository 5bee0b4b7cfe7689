"""What check cells call, one module a notebook: a check lets a right answer pass and gives a wrong one a hint."""

import ast
import dis
import inspect
import os
import reprlib
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import wraps
from math import isfinite
from numbers import Integral
from typing import Any

CLOSED = "the cluster is closed: the last cell does that. Restart the kernel, and run the notebook from the top."
Answer = Any  # whatever an attendee wrote
Function = Callable[..., Any]  # the same, if the exercise asks for a function
LINE = 100  # characters
_whose = "Correct."  # first words of the message of the check that runs


class NotYet(AssertionError):
    """The answer is not right yet; the message is a hint."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines instead of a traceback, which would point into this module.
        return [f"Not yet: {self}"]


def is_stub(answer: Answer, given: Function | None = None) -> bool:
    """Return whether an answer is None, a function that only returns None, or `given`, which the stub repeats.

    Functions are compared by their statements and never called.
    """
    if not inspect.isfunction(answer):
        return answer is None
    if given is not None:
        return _statements(answer) == _statements(given) is not None
    steps = [step for step in dis.get_instructions(answer) if step.opname not in ("RESUME", "NOP", "RETURN_VALUE")]
    return [step.argval for step in steps] == [None]


def expect(condition: object, hint: str) -> None:
    """Raise NotYet(hint) unless `condition` holds."""
    if not condition:
        raise NotYet(hint)


def expect_equal(
    value: Answer,
    right: Any,
    otherwise: str,
    mistakes: Mapping[str, Any] | None = None,
    *,
    within: Any = None,
    about: str = "",
) -> None:
    """Raise NotYet unless `value` equals `right`.

    mistakes: {hint: wrong value}; the first hint whose value equals `value` is given, else `otherwise`. within: how far
    equal numbers may differ, also those of two lists; None for what are no numbers. about: the beginning of all hints.
    """

    def equals(other):
        if within is None:
            return value == other
        import numpy as np

        return np.allclose(value, other, rtol=0, atol=within)  # False for nan

    if not equals(right):
        hints = [hint for hint, wrong in (mistakes or {}).items() if equals(wrong)]
        raise NotYet(about + [*hints, otherwise][0])


def expect_type(value: Answer, kind: Any, hint: str) -> None:
    """Raise NotYet unless `value` is of a type. hint: such as "plan should return a list"; the value follows it."""
    expect(isinstance(value, kind), f"{hint}, not {shown(value)}.")


def pair(value: Answer, hint: str) -> list[Answer]:
    """Return both parts of a tuple, a list, an array or a tensor of two. Raises NotYet otherwise: see `expect_type`."""
    parts: list[Answer] = []
    if not isinstance(value, str | bytes | Mapping | Set):
        with suppress(TypeError):
            parts = list(value)
    expect(len(parts) == 2, f"{hint}, not {shown(value)}.")
    return parts


def number(value: Answer, hint: str) -> float:
    """Return a number, or an array or a tensor of one number, as a float.

    Raises NotYet, as `expect_type` does, for anything else, also for text and for True and False.
    """
    found = _as_number(value)
    if found is None:
        raise NotYet(f"{hint}, not {shown(value)}.")
    return found


def shown(value: Answer) -> str:
    """Return an answer as text for a hint: not longer than a line."""
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= LINE else f"{text[: LINE - 2]} …"


def passed(message: str) -> None:
    """Print that an exercise is done, and whether the attendee or a solution cell did it."""
    print(f"{_whose} {message}")


def exercise(check: Callable[..., None], given: Function | None = None) -> Callable[..., None]:
    """Let `check` raise NotYet where an answer makes it raise anything else.

    Its first parameter is the answer, by its name in the notebook. NotYet is also raised for None, and, if the
    parameter's type is Function, for what cannot be called. While there's no answer yet, the notebook's ``our_…`` of
    the same name is checked instead, if its cell has run: see `is_stub`, also for ``given``.
    """
    name, parameter = next(iter(inspect.signature(check).parameters.items()))

    @wraps(check)
    def checked(answer: Answer, *args: Any, **named: Any) -> None:
        global _whose
        is_ours = False
        solution = sys._getframe(1).f_globals.get(f"our_{name}")
        if solution is not None and is_stub(answer, given):
            answer, is_ours = solution, True
        _whose = "That was our solution." if is_ours else "Correct."
        state = "not yet"  # this stays if an interrupt ends the check
        try:
            expect(answer is not None, f"{name} is still None.")
            if parameter.annotation is Function:
                expect_type(answer, Callable, f"{name} should be a function")
            check(answer, *args, **named)
            state = "solution" if is_ours else "passed"
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
    all three are shown as whole numbers. A ratio is shown if both signs are the same. Raises NotYet where the guess
    is no number.
    """
    is_count = isinstance(measured, Integral)
    sizes = abs(estimate), abs(measured)
    digits = sum(max(sizes) < bound for bound in (100, 10))
    digits += any(0 < size * 10**digits < 10 for size in sizes)  # one digit is too few to divide by
    digits = 0 if is_count else digits
    guessed = _as_number(guess)
    guessed = guessed if guessed is not None and isfinite(guessed) else None
    if guess is not None:
        as_measured = "?" if guessed is None else f"{guessed:,.{digits}f}"
        if is_count and guessed is not None and not guessed.is_integer():
            as_measured = f"{guessed:g}"
        print(f"your guess      {as_measured:>8} {unit}")
    print(f"simple estimate {estimate:8,.{digits}f} {unit}")
    comparable = not is_count and round(estimate, digits) * round(measured, digits) > 0
    times = f"   {measured / estimate:.2f} times the estimate" if comparable else ""
    print(f"measured        {measured:8,.{digits}f} {unit}{times}")
    expect(
        guess is None or guessed is not None,
        f"your guess is {shown(guess)}: write a number, without its unit, or None.",
    )


def _as_number(value):
    if isinstance(value, bool | str | bytes):
        return None
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # no array or tensor, or one of several numbers
        value = value.item()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _tell_the_room(check, state):
    with suppress(Exception):  # an attendee must not have to care
        from workshop_utils.exercises.reporting import report

        report(check.__module__.rpartition(".")[2], check.__name__.removeprefix("check_"), state)


def _statements(function):
    # What the function does, as text, without its name, its docstring and its comments; None without its source.
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    body = definition.body if isinstance(definition, ast.FunctionDef) else [definition]
    return [
        ast.dump(each) for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]


def _what_failed(error):
    """Name the line in a notebook's cell that raised, if the error came from the attendee's own function."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "ipykernel_" in frame.filename]
    reason = ""
    with suppress(Exception):  # an attendee's exception may raise where it should say what it is
        reason, *_ = str(error).splitlines() or [""]  # Dask adds the whole traceback of an answer that it cannot send
    what = f"{type(error).__name__}: {reason}"
    from daskrun import WorkersBusy

    if isinstance(error, WorkersBusy):
        return f"this check needs workers of its own. {reason}"
    written = [frame for frame in frames if frame.name != "<module>"]
    if written:
        names = [frame.name for frame in written if frame.name[0] != "<"]  # a comprehension or lambda has none
        return f"{[written[-1].name, *names][-1]} raised {what}, in the line `{written[-1].line}`."
    if "positional argument" in reason:
        return f"the answer takes other arguments than the stub ({what})."
    return f"the check cannot read this answer ({what})."
