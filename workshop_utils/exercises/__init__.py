"""What the check cells call, one module a notebook: each check passes a right answer, and gives a wrong one a hint."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

Answer = Any  # whatever an attendee wrote
Arguments = ParamSpec("Arguments")


class NotYet(AssertionError):
    """The answer is not right yet; the message is a hint."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines instead of a traceback, which would point into this module.
        return [f"Not yet: {self}"]


def expect(condition: object, hint: str) -> None:
    """Raise NotYet(hint) unless `condition` holds."""
    if not condition:
        raise NotYet(hint)


def passed(message: str) -> None:
    """Print that an exercise is done."""
    print(f"Correct. {message}")


def exercise(check: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Let `check` give a hint, not a traceback from in here, where an answer makes it fail itself."""

    @wraps(check)
    def checked(*args: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            check(*args, **named)
        except NotYet:
            raise
        except Exception as error:
            raise NotYet(f"the check cannot read this answer ({type(error).__name__}: {error}).") from None

    return checked
