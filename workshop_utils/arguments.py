"""Check what people type as arguments, and say which one cannot be."""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

OFTEN = {"lr": ("lr", "learning_rate", "base_lr", "init_lr"), "batch_size": ("bs",)}  # what others call a setting


def whole_number(name: str, value: Any, least: int) -> int:
    """Return a setting as an int, also NumPy's; raise ValueError unless it is a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}.")
    return int(value)


def fraction(name: str, value: Any) -> float:
    """Return a setting as a float; raise ValueError unless it is between 0 and 1, and neither of them."""
    if not isinstance(value, Real) or not 0 < value < 1:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}: give a fraction between 0 and 1, such as 0.2.")
    return float(value)


def check_names(given: Iterable[str], *functions: Callable) -> None:
    """Raise TypeError, with the right name, unless each name given is one that a function takes by its name alone.

    A class takes what it is made with.
    """
    parameters = [one for function in functions for one in inspect.signature(function).parameters.values()]
    known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY or one.default is not one.empty]
    for name in set(given).difference(known):
        close = [short for short in known if name.lower() in OFTEN.get(short, ())] or get_close_matches(name, known, 1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise TypeError(f"There is no setting {name!r}: {guess}There are {', '.join(known)}.")
