"""Checks of notebook 03 · Single inference."""

import torch

from workshop_utils.exercises import Answer, exercise, expect, passed


@exercise
def check_top_three(function: Answer, logits: torch.Tensor, categories: list[str]) -> None:
    answer = function(logits, categories)
    expect(answer is not None, "top_three returns None; return a list.")
    answer = list(answer)
    expect(len(answer) == 3, f"top_three returned {len(answer)} entries instead of 3.")
    expect(all(len(pair) == 2 and isinstance(pair[0], str) for pair in answer), "return pairs (category, probability).")
    expect(not any(isinstance(p, str) for _, p in answer), "return each probability as a number, not as text.")
    probabilities, indices = logits.softmax(-1).topk(3)
    names = [categories[index] for index in indices]
    expect([name for name, _ in answer] == names, "these are not the three likeliest, in order.")
    close = all(abs(mine - p.item()) < 1e-4 for (_, mine), p in zip(answer, probabilities, strict=True))
    expect(close, "the names are right, the numbers are not: softmax over all categories, in [0, 1].")
    other = [name for name, _ in function(logits.flip(0), categories)]
    expect(other != names, "given other logits, it answers the same: use the arguments.")
    passed(", ".join(f"{name} {p:.0%}" for name, p in answer))


@exercise
def check_batch_accuracy(answer: Answer, logits: torch.Tensor, truth: torch.Tensor) -> None:
    expect(answer is not None, "accuracy is still None.")
    right = (logits.argmax(1) == truth).float().mean().item()
    expect(not isinstance(answer, str), f"accuracy is the text {answer!r}; it should be a number.")
    expect(getattr(answer, "ndim", 0) == 0, "that is one answer per photo; take their mean.")
    expect(not float(answer) > 1, "accuracy should be a fraction between 0 and 1.")
    expect(abs(float(answer) - right) < 0.005, "compare the position of each row's largest logit with truth.")
    passed(f"{right:.0%} of {len(truth)}.")


@exercise
def check_temperature(answer: Answer, logits: torch.Tensor, truth: torch.Tensor) -> None:
    expect(answer is not None, "temperature is still None.")
    expect(not isinstance(answer, str | bool), f"temperature is {answer!r}; it should be a number.")
    expect(getattr(answer, "ndim", 0) == 0, "that is more than one number; choose one temperature for all photos.")
    expect(float(answer) > 0, "a temperature is above 0: dividing by a negative one would turn the order round.")
    right = (logits.argmax(1) == truth).float().mean().item()
    before, now = ((logits / t).softmax(1).max(1).values.mean().item() for t in (1, float(answer)))
    cure = "surer: divide by less" if now < right else "less sure: divide by more"
    expect(abs(now - right) <= 0.01, f"it now says {now:.1%}, and {right:.1%} are right. Make it {cure}.")
    passed(f"It said {before:.0%}; at {float(answer):.2f} it says {now:.0%}, and {right:.0%} are right.")
