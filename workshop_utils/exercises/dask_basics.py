"""Checks of notebook 02 · Dask basics."""

import inspect
import re
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Real
from unittest.mock import patch

import numpy as np
import pandas as pd
from dask.sizeof import sizeof
from dask.utils import key_split
from distributed import Client, futures_of

from workshop_utils.exercises import Answer, Function, exercise, expect, expect_equal, expect_type, passed, shown

ROUNDS, DARTS = 8, 250_000  # of exercise 1


def given_counts(client: Client) -> list[int]:
    """Return eight equal counts, slowly: the stub of exercise 1, which the notebook names `careful_counts`."""
    counts = []
    for _ in range(8):
        darts = client.submit(throw, 250_000)  # type: ignore[name-defined]  # noqa: F821
        counts.append(client.submit(count, darts.result()).result())  # type: ignore[name-defined]  # noqa: F821
    return counts


@partial(exercise, given=given_counts)
def check_careful_counts(careful_counts: Function, client: Client) -> None:
    with _watched() as (events, fetched, given):
        counts = careful_counts(client)
    expect(events, "nothing was sent to the workers: use `client`.")
    expect_type(counts, list | tuple | np.ndarray, f"careful_counts should return a list of {ROUNDS} counts")
    expect(len(counts) == ROUNDS, f"careful_counts should return {ROUNDS} counts, not {len(counts)}.")
    expect(not futures_of(list(counts)), "these are futures: let client.gather bring the counts here.")
    expect(
        all(isinstance(one, Real) and 0.75 * DARTS < float(one) < 0.82 * DARTS for one in counts),
        f"these are not {ROUNDS} counts of {DARTS:,} darts each: leave `throw` and `count` as they are.",
    )
    expect(
        len(set(counts)) >= ROUNDS - 1,  # two counts may be equal by chance
        f"different numbers among the {ROUNDS} counts: {len(set(counts))}. The same darts were counted again. "
        "Which of the calls is the same task as an earlier one, or has the same seed?",
    )
    expect(
        sum(fetched) < DARTS,
        f"{sum(fetched) / 1e6:.1f} MB of results came here, and the counts alone are a few bytes: "
        "pass the future of the darts to `count`, not its result.",
    )
    expect(
        sum(given) < DARTS,
        f"{sum(given) / 1e6:.1f} MB of arguments went to the workers: let a task throw the darts there, and pass its "
        "future to `count`.",
    )
    first = next((place for place, event in enumerate(events) if event.asks), len(events))
    sent = sum(event.n_tasks for event in events[:first])
    later = sum(event.n_tasks for event in events[first:])
    expect(
        sent >= ROUNDS or not later,
        f"tasks sent before the first result was asked for: {sent}. Send those of all {ROUNDS} rounds first, so that "
        "no round waits for another.",
    )
    n_threads = sum(client.nthreads().values())
    expect(
        sent >= min(ROUNDS, n_threads),
        f"tasks sent: {sent}, for {n_threads} threads. The rounds of one task run one after another: send more tasks.",
    )
    waits = next((place for place, event in enumerate(events) if event.waits), len(events))
    late = sum(event.n_tasks for event in events[waits + 1 :])
    expect(not late, "your function waited for a result before it had sent the other tasks: send all, then wait.")
    passed("Each count is of other darts, and no round waited for another.")


@exercise
def check_culprits(culprits: Answer, inputs: list[int], function: Callable[[int], object], client: Client) -> None:
    if isinstance(culprits, pd.Series):
        culprits = culprits.to_dict()
    expect_type(culprits, dict, "culprits should be a dict, {input: type of its exception}")
    expect(culprits, "it is empty: wait(futures) first, and then look at each future's status.")
    expect(all(isinstance(key, Real) for key in culprits), "the keys should be the inputs, which are numbers.")
    expect(
        not any(value in (None, type(None)) for value in culprits.values()),
        "a future that's finished has no exception: keep the inputs whose future has the status 'error'.",
    )
    truth = dict(zip(inputs, client.gather(client.map(_failure, [function] * len(inputs), inputs)), strict=True))
    truth = {key: name for key, name in truth.items() if name}
    mistakes = {
        "every input is in there. `puzzle` fails everywhere but on a worker: let client.map send it.": set(inputs)
    }
    otherwise = "some of these do not fail: take x where the future's status is 'error'."
    missing = sorted(set(truth) - set(culprits))
    if set(culprits) <= set(truth) and missing:
        otherwise = f"these fail, but more do: look at {', '.join(map(str, missing))}, too."
    expect_equal(set(culprits), set(truth), otherwise, mistakes)
    for key, value in culprits.items():
        expect(
            _names(value, set(truth.values())) == {truth[key]},
            f"{shown(value)} is not the type of the exception for input {key}: ask its "
            "future for exception(), and take the type of that.",
        )
    passed(f"{len(truth)} of {len(inputs)} inputs fail, for {len(set(truth.values()))} different reasons.")


@dataclass
class _Event:
    # A call that sent tasks to the workers, or asked for results.
    n_tasks: int = 0
    asks: bool = False
    waits: bool = False  # for a result other than darts that was not there yet


@contextmanager
def _watched():
    """Yield lists: an _Event for each call that sends tasks or asks for results; bytes of results; of arguments."""
    events: list[_Event] = []
    fetched: list[int] = []
    given: list[int] = []
    sync, gather = Client.sync, Client._gather

    def sends(name):
        method = getattr(Client, name)

        @wraps(method)
        def watched(self, *args, **named):
            given.append(sum(map(sizeof, (*args, *named.values()))))
            if name == "scatter":
                return method(self, *args, **named)
            events.append(event := _Event())
            at_once = name == "get" or named.get("sync")  # counted as all rounds: the client does not know its tasks
            if at_once:
                event.n_tasks = ROUNDS
            result = method(self, *args, **named)
            if not at_once:
                event.n_tasks = max(1, len(futures_of(result)))
            return result

        return patch.object(Client, name, watched)

    def watched_sync(self, function, *args, **named):  # every call that waits goes through here
        if function.__name__ in ("_gather", "_result", "_exception", "_wait"):
            asked = futures_of([getattr(function, "__self__", None), *args])
            # Waiting for darts holds no round up: the other rounds' darts have been asked for, or `sent` is too low.
            late = [future for future in asked if future.status == "pending" and key_split(future.key) != "throw"]
            events.append(_Event(asks=True, waits=bool(late)))
        return sync(self, function, *args, **named)

    @wraps(gather)
    async def watched_gather(*args, **named):  # every result comes through here, also those of as_completed
        result = await gather(*args, **named)
        fetched.append(sizeof(result))
        return result

    with ExitStack() as stack:
        for name in ("submit", "map", "compute", "persist", "get", "scatter"):
            stack.enter_context(sends(name))
        stack.enter_context(patch.object(Client, "sync", watched_sync))
        stack.enter_context(patch.object(Client, "_gather", watched_gather))
        yield events, fetched, given


def _failure(function, value):
    # Returns the name of the exception's type, or None.
    try:
        function(value)
    except Exception as error:
        return type(error).__name__


def _names(value, known):
    # Which of the known names of exceptions a type, an exception, or a text such as "builtins.ValueError" has.
    text = value if isinstance(value, str) else value.__name__ if inspect.isclass(value) else type(value).__name__
    return {name for name in known if re.search(rf"\b{name}\b", text)}
