"""Check, before anything is sent, that a call suits its function, and that no setting of `launch` is misspelt."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from itertools import chain, islice
from typing import Any

from dask.base import is_dask_collection
from distributed import Future

from daskrun.errors import warn

ALIKE = 0.85  # how similar, of 1, a name is to the setting that was meant: one letter of a short one is wrong
OF_OTHERS = ("num_workers", "workers")  # a DataLoader's setting, and how scripts call it


def check_call(launch: Callable, settings: Mapping[str, Any], fn: Callable, args: tuple, kwargs: Mapping) -> None:
    """Raise TypeError if fn(*args, **kwargs) is no possible call, or takes a misspelt setting of `launch` by **.

    settings: all of them, with their values. Warns of one that `fn` has a parameter for, too, but does not get.
    A function that does not tell what it takes, as some of C's do not, is let through.
    """
    if not callable(fn):
        raise TypeError(f"{fn!r} cannot be called: give launch a function, and then the function's arguments.")
    values = [*args, *kwargs.values()]
    values += chain.from_iterable(_inside(value) for value in values)
    if lazy := [value for value in values if _is_lazy(value)]:
        raise TypeError(
            f"An argument is or holds Dask's {type(lazy[0]).__name__}, and the ranks need its value: give "
            "future.result() or collection.compute(), or let the function load it."
        )
    try:
        written = inspect.signature(fn)
    except (ValueError, TypeError, NameError):
        return
    call, named = _as_called(fn) or written, _named(written)
    function = fn.func if isinstance(fn, partial) else fn
    name = getattr(function, "__name__", type(function).__name__)
    named |= _named(call)
    try:
        given = {*call.bind(*args, **kwargs).arguments, *getattr(fn, "keywords", {})}
    except TypeError as error:
        cures = [
            *(f"Did you mean {one}?" for word in kwargs if word not in named for one in _close(word, settings, named)),
            *(
                f"{one} goes to launch: for {name}'s, {_give(name, one)}."
                for one in settings
                if f"'{one}'" in str(error)
            ),
        ]
        raise TypeError(f"{name} cannot be called so: {error}. {' '.join(cures)}".rstrip()) from None
    for word in kwargs:
        if word not in named and word not in OF_OTHERS:
            for setting in get_close_matches(word, settings, 1, ALIKE):
                raise TypeError(
                    f"{name} takes any keyword, and would take {word}: did you mean {setting}, of launch? If not, "
                    f"{_give(name, word)}."
                )
    defaults = inspect.signature(launch).parameters
    for setting, value in settings.items():
        if setting in named and setting not in given and value != defaults[setting].default:
            warn(
                f"{setting}={value!r} goes to launch, and not to {name}, which takes a {setting}, too: for that one, "
                f"{_give(name, setting)}."
            )


def _inside(value: Any) -> Iterable[Any]:
    """Return the first things that a list, a tuple or a dict holds."""
    inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return islice(inside, 1000)


def _is_lazy(value: Any) -> bool:
    """Return whether Dask has still to compute this."""
    with suppress(Exception):  # an object may raise whatever it likes where it is asked for an attribute
        return isinstance(value, Future) or is_dask_collection(value)
    return False


def _as_called(fn: Callable) -> inspect.Signature | None:
    """Return what a decorated function takes; None where the decorator does not tell, as `functools.lru_cache`'s."""
    with suppress(ValueError):  # a decorator may give arguments of its own
        return inspect.signature(fn, follow_wrapped=False)
    return None


def _named(signature: inspect.Signature) -> set[str]:
    """Return the names of the parameters that may be given by name."""
    return {
        one.name for one in signature.parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }


def _close(word: str, *names: Mapping | set[str]) -> list[str]:
    return get_close_matches(word, set().union(*names), 1)


def _give(name: str, word: str) -> str:
    return f"launch functools.partial({name}, {word}=…)"
