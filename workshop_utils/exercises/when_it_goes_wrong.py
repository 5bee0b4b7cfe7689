"""Checks of notebook 12 · When it goes wrong."""

import time
from functools import partial, wraps

import torch
import torch.distributed as dist

from workshop_utils.exercises import Answer, Function, exercise, expect, passed, shown
from workshop_utils.exercises.gym import faults
from workshop_utils.exercises.ranks import expect_agreement

TARGET = 1.6  # mean loss below which exercise 1 stops
NO_SUM = "The sum is 2.2: divide it by the number of ranks"
LOSSES = (  # of rank 0 and of rank 1, and what that pair shows
    ((2.0, 2.0), "no loss is low"),
    ((0.7, 0.8), "both are low"),
    ((1.0, 1.2), f"the mean is 1.1. {NO_SUM}"),  # the first pair of which the sum would say something else
    ((1.0, 3.0), "the mean is 2.0"),
    ((3.0, 1.0), "the mean is 2.0"),
    ((0.2, 2.0), "the mean is 1.1"),
    ((2.0, 0.2), "the mean is 1.1"),
    ((1.5, 1.8), "the mean is 1.65"),
    ((1.8, 1.3), "the mean is 1.55"),
    ((float("nan"), 0.1), "one is NaN, so the mean is, too"),
)


def given_stop(loss: torch.Tensor) -> bool:
    """Return whether this rank alone would stop: the stub of exercise 1."""
    return loss.item() < 1.6


@partial(exercise, given=given_stop)
def check_stop(stop: Function, client: Answer) -> None:
    @wraps(stop)  # a hint reads the source of `stop`
    def after_two_steps(loss):  # `train` calls it after each step, and what it keeps of one must not spoil the next
        stop(torch.full_like(loss, 2.0))
        time.sleep(0.05 * dist.get_rank())  # so that a rank which does not wait for the sum cannot have it
        return stop(loss)

    for losses, about in LOSSES:
        case = f"with losses of 2.0 and then {losses[0]} on rank 0, and of 2.0 and then {losses[1]} on rank 1, "
        arguments = [(torch.tensor(loss),) for loss in losses]
        why = f"stop if the mean is below {TARGET}. Here, {about}."
        expect_agreement(client, after_two_steps, arguments, sum(losses) / 2 < TARGET, case, why)
    passed("All ranks decide by the same number, so they stop after the same step.")


@exercise
def check_case(answer: Answer, case: Answer) -> None:
    parts = ("fault", "rank", "step", "cure")
    known = isinstance(answer, dict) and set(answer) <= set(parts) and "fault" in answer
    expect(known, f"answer is {shown(answer)}: write a dict with {', '.join(map(repr, parts))}.")
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
        f"{answer['fault']!r} would look different. Which branch of the flow chart is it? What does each rank do in "
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
