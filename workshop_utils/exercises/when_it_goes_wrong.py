"""Checks of notebook 12 · When it goes wrong, and the fault that exercise 2 looks for."""

import re
from collections.abc import Iterable, Set
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import daskrun
from daskrun import WorkerDied
from workshop_utils.exercises import Answer, NotYet, exercise, expect, passed
from workshop_utils.exercises.gym import faults

TARGET = 1.6  # mean loss below which exercise 1 stops
LOSSES = (  # of rank 0 and of rank 1, and what that pair shows
    ((2.0, 2.0), "no loss is low"),
    ((1.0, 1.2), "both are low"),
    ((1.0, 3.0), "the mean is 2.0"),
    ((3.0, 1.0), "the mean is 2.0"),
    ((0.2, 2.0), "the mean is 1.1"),
    ((2.0, 0.2), "the mean is 1.1"),
    ((1.5, 1.8), "the mean is 1.65"),
    ((1.8, 1.3), "the mean is 1.55"),
    ((float("nan"), 0.1), "one is no number, and neither is the mean"),
)
CHECK_S = 15  # time limit of the ranks that a check starts
SPOILED_RANK, SPOILED_STEP, N_STEPS = 1, 23, 60
TOO_LARGE = 64  # times


@exercise
def check_stop(stop: Answer, client: Answer) -> None:
    expect(callable(stop), "stop should be a function of this rank's loss.")
    daskrun.run(client, _meet, n_workers=2, backend="gloo", wait_for_workers=60)  # new workers import this module here
    try:
        answers = daskrun.run(client, _asked, stop, n_workers=2, backend="gloo", wait_for_workers=60, timeout=CHECK_S)
    except TimeoutError as error:
        raise NotYet(_why_they_wait(str(error))) from None
    except WorkerDied:
        hint = (
            "the ranks call different collectives, or with other shapes, so gloo ended one of them. Call the same ones."
        )
        raise NotYet(hint) from None
    for (losses, about), *said in zip(LOSSES, *answers, strict=True):
        case = f"where rank 0 has loss {losses[0]} and rank 1 has {losses[1]}"
        expect(None not in said, f"{case}, stop returns None: return whether to stop.")
        expect(
            said[0] == said[1],
            f"{case}, rank 0 says {_word(said[0])} and rank 1 says {_word(said[1])}. Each decides by what it has "
            "alone: let them decide by a number that all have.",
        )
        right = sum(losses) / 2 < TARGET
        expect(
            said[0] == right,
            f"{case}, both ranks say {_word(said[0])}: {about}, and they stop where the mean is below {TARGET}.",
        )
    passed("All ranks decide by the same number, so they stop after the same step.")


def _why_they_wait(told):
    """Return a hint, from the error of ranks that took too long."""
    left = re.search(rf"rank (\d) calls barrier, at {Path(__file__).name}", told)  # in `_asked`, after `stop`
    waits = re.search(r"rank (\d) calls (?!barrier)(\w+)", told)
    if left and waits:
        return (
            f"rank {waits[1]} calls {waits[2]}, and rank {left[1]}'s stop returned without it. Call it on every rank, "
            "after each step."
        )
    why = told.split(" If all is well")[0]
    return f"the ranks wait for each other. {why} Call the same collectives on every rank."


def _word(stops):
    return "stop" if stops else "go on"


def _meet() -> None:
    dist.barrier()


def _asked(stop: Any) -> list[bool | None]:
    """Return what `stop` says of this rank's loss in each case; every rank is asked about all of them."""
    said: list[bool | None] = []
    for losses, _ in LOSSES:
        answer = stop(torch.tensor(losses[dist.get_rank()]))
        said.append(None if answer is None else bool(answer))
        dist.barrier()  # or a collective of one rank would meet one that the other calls in a later case
    return said


def odd_loss_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss; on one rank, the gradient of one step is much too large."""
    loss = cross_entropy(model(images), labels)
    model.n_calls = getattr(model, "n_calls", 0) + 1  # type: ignore[assignment]
    if (dist.get_rank(), model.n_calls) == (SPOILED_RANK, SPOILED_STEP):
        loss.register_hook(lambda gradient: TOO_LARGE * gradient)
    return loss


@exercise
def check_culprit(culprit: Answer) -> None:
    ordered = isinstance(culprit, Iterable) and not isinstance(culprit, Set)
    numbers = list(culprit) if ordered else []
    expect(
        len(numbers) == 2 and all(map(_is_whole, numbers)),
        f"culprit is {culprit!r}: write a pair of whole numbers, (rank, step).",
    )
    rank, step = map(int, numbers)
    expect(1 <= step <= N_STEPS, f"there is no step {step}: they are 1 to {N_STEPS}.")
    expect(rank in (0, 1), f"there is no rank {rank}. The rank comes first, then the step.")
    expect(
        step <= SPOILED_STEP,
        f"by step {step} the weights are already spoiled, so both gradients are unusual. Which step was the first?",
    )
    expect(
        step == SPOILED_STEP,
        f"in step {step}, both ranks' gradients are of a length like those around it. In which step is one of them "
        "many times as long as the other?",
    )
    expect(rank == SPOILED_RANK, f"the step is right. But in it, rank {rank}'s gradient is as long as ever.")
    passed(f"Rank {rank}, step {step}. After the reduction, both ranks have the same wrong gradient.")


def _is_whole(number: Any) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool) and float(number).is_integer()


@exercise
def check_case(answer: Answer, case: Answer) -> None:
    parts = ("fault", "rank", "step", "cure")
    known = isinstance(answer, dict) and set(answer) <= set(parts) and "fault" in answer
    expect(known, f"answer is {answer!r}: write a dict with {', '.join(map(repr, parts))}.")
    # The first answer is the one that counts. The hints below do not tell the right one.
    points = case.points_for(faults.checked(**{part: answer.get(part) for part in parts}))
    expect(points["detection"] >= 0, "compare with case.clean: did the job end, as fast, and with the same numbers?")
    expect(
        points["detection"] > 0,
        "neither the fault nor the rank is right. Which branch of the flow chart is it, and what does each rank do in "
        "its last stack or row?",
    )
    healthy = answer["fault"] == faults.HEALTHY
    expect(
        not healthy or sum(points.values()) == faults.FULL,
        "nothing is wrong: right. Then there is no rank, no step, and nothing to cure: leave them out.",
    )
    expect(
        points["kind"] > 0,
        f"{answer['fault']!r} would look otherwise. Which branch of the flow chart is it? What does each rank do in "
        "the last stack or row that you have of it?",
    )
    expect(
        points["place"] > 0,
        f"the fault is right. But why rank {answer.get('rank')}? Say on which rank the fault is, not which one waits "
        "for it; None means all.",
    )
    expect(points["step"] > 0, "fault and rank are right. Which is the first step that is missing, or that differs?")
    cure = answer.get("cure")
    would = "Which cure?" if cure is None else f"Would {cure!r} help against that?"
    expect(points["cure"] > 0, f"fault, rank and step are right. {would}")
    passed("Here is the score.")
    case.diagnose(**answer)
